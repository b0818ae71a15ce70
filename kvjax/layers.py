"""The parts of a decoder layer: RMS norm, rotary positions, the gated mlp."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import Rope, Style
from kvjax.shapes import Array, Float, Int


def rms_norm(x, weight, eps: float, style: Style):
    """Root-mean-square norm over the last axis, in float32, back in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    w = weight.astype(jnp.float32)
    return (y * (1.0 + w if style.unit_offset else w)).astype(x.dtype)


def frequencies(rope: Rope, dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies [dim / 2] per position, and the factor on cos and sin.

    Source: RoFormer arXiv:2104.09864; linear arXiv:2306.15595; Llama 3.1 report arXiv:2407.21783;
    YaRN arXiv:2309.00071 (NTK by parts, equations 17 to 23).
    """
    half = np.arange(0, dim, 2, dtype=np.float64) / dim
    freq = rope.base**-half
    if rope.scaling == "none":
        return freq, 1.0
    if rope.scaling == "linear":
        return freq / rope.factor, 1.0
    if rope.scaling == "llama3":
        turns = rope.original_length * freq / (2 * math.pi)
        ramp = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        return freq * (ramp + (1.0 - ramp) / rope.factor), 1.0
    if rope.scaling == "yarn":

        def index_of(rotations):
            span = rope.original_length / (rotations * 2 * math.pi)
            return dim * math.log(span) / (2 * math.log(rope.base))

        low = max(math.floor(index_of(rope.beta_fast)), 0)
        high = min(math.ceil(index_of(rope.beta_slow)), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        factor = rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0
        return freq * (1.0 - ramp) + freq / rope.factor * ramp, factor
    raise ValueError(f"{rope.scaling=} must be none, linear, llama3 or yarn")


def angles(rope: Rope, dim: int, pos: Int[Array, "*p"]) -> tuple[Array, Array]:
    """cos and sin [*p dim/2], float32, of the rotary positions `pos`."""
    freq, factor = frequencies(rope, dim)
    a = pos[..., None].astype(jnp.float32) * jnp.asarray(freq, jnp.float32)
    return jnp.cos(a) * factor, jnp.sin(a) * factor


def rotate(x: Float[Array, "*p d"], cos, sin):
    """Rotates the pairs (i, i + d/2) of the last axis; cos and sin broadcast to [*p d/2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def mlp(x, gate, up, down, style: Style):
    """Gated mlp: x [b t m], gate and up [f m], down [m f]."""
    act = jax.nn.gelu if style.gelu else jax.nn.silu
    y = act(jnp.einsum("btm,fm->btf", x, gate)) * jnp.einsum("btm,fm->btf", x, up)
    return jnp.einsum("btf,mf->btm", y, down)
