"""Plain formulas in float64: what attention and rotation are."""

import numpy as np


def dense(q, k, v, see, scale):
    """Float64 softmax attention: q [t d], k [s d], v [s e], see [t s] to out [t e], lse [t]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = np.where(see, q @ k.T * scale, -np.inf)
    top = s.max(axis=1, keepdims=True)
    p = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = p.sum(axis=1, keepdims=True)
    out = p @ v / np.where(total > 0, total, 1)
    return out, np.where(total > 0, top + np.log(np.where(total > 0, total, 1)), -1e30)[:, 0]


def rope(x, pos, base):
    """RoFormer's rotation in float64 of x [.. d] to `pos` [..]; pairs are (i, i + d/2)."""
    x, half = np.asarray(x, np.float64), x.shape[-1] // 2
    angle = np.asarray(pos)[..., None] * base ** (-np.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
