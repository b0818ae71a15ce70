"""Choosing: the exact best `count` of a row, as a mask, by counting instead of sorting.

The score threshold is found bit by bit: 32 passes that count, no sort and no gather. NaN is the
lowest score. Protection is a constraint, in a key above every score. Ties go to the lowest
position. So exactly min(count, valid) entries are kept, whatever the scores are.
"""

import jax
import jax.numpy as jnp


def sortable(scores):
    """uint32 keys in the order of float32 scores: NaN lowest, 0 and the largest key left free."""
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores.astype(jnp.float32))
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    bits = jnp.where(bits == jnp.uint32(1 << 31), jnp.uint32(0), bits)  # -0.0; XLA drops `+ 0.0`
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def top(scores, valid, protected, pos, count):
    """Mask of the `count` best of the last axis, among `valid`, protected ones first.

    scores, valid, protected, pos: [... s]; count: [...], broadcast against the leading axes. pos
    must be unique among the valid of a row. If count is below the number of protected, the
    protected of lowest position are kept.
    """
    key = jnp.where(protected, jnp.uint32(0xFFFFFFFF), sortable(scores))
    key = jnp.where(valid, key, jnp.uint32(0))
    count = jnp.minimum(count, valid.sum(axis=-1)).astype(jnp.int32)
    bar = _largest(lambda t: ((key >= t[..., None]) & valid).sum(axis=-1) >= count, count.shape)
    above = (key > bar[..., None]) & valid
    tied = (key == bar[..., None]) & valid
    left = count - above.sum(axis=-1)
    far = jnp.uint32(0xFFFFFFFF) - pos.astype(jnp.uint32)  # the lowest position is the largest
    last = _largest(lambda t: ((far >= t[..., None]) & tied).sum(axis=-1) >= left, count.shape)
    keep = above | (tied & (far >= last[..., None]))
    return keep & (count > 0)[..., None]


def _largest(enough, shape):
    """The largest uint32 [shape] for which `enough` still holds; it must hold for 0."""

    def bit(i, best):
        trial = best | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(trial), trial, best)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros(shape, jnp.uint32))


def ids(mask, size: int):
    """Ascending indices of the true entries of the last axis: [... size], and which are real.

    Past the last true entry the index is that of the last slot, and not real.
    """
    rank = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    want = jnp.arange(1, size + 1, dtype=jnp.int32)
    flat = rank.reshape(-1, rank.shape[-1])
    at = jax.vmap(lambda row: jnp.searchsorted(row, want))(flat)
    at = at.reshape(*mask.shape[:-1], size).astype(jnp.int32)
    return jnp.minimum(at, mask.shape[-1] - 1), want <= rank[..., -1:]
