"""The only writer: runs of tokens into slots, in place.

A loop over rows of dynamic update slices: scatters and vmapped slices copy the whole cache on TPU.
A row with nothing to write rewrites what it read (an update slice clamps, it does not drop).
"""

import jax
import jax.numpy as jnp

from kvjax.shapes import Array, Int


def write_run(leaf, new, start: Int[Array, "b"], count: Int[Array, "b"], *, ring: bool):
    """Writes new[:, b, :, j] to slot start[b] + j for j < count[b]; where both fit, in place.

    leaf: [l b r s ...]; new: [l b r t ...]. In a ring slots count modulo s, and of more than s
    tokens the last s stay; otherwise start + count must be at most s.
    """
    slots, t = leaf.shape[3], new.shape[3]
    size = min(slots, t)
    if size == 0:
        return leaf
    zero = jnp.int32(0)
    rest = leaf.ndim - 4

    def block(row, leaf, first):
        """Rewrites slots first .. first + size of one row."""
        at = (zero, row, zero, first) + (zero,) * rest
        old = jax.lax.dynamic_slice(
            leaf, at, (leaf.shape[0], 1, *leaf.shape[2:3], size, *leaf.shape[4:])
        )
        mine = jax.lax.dynamic_index_in_dim(new, row, 1, keepdims=True)
        token = first + jnp.arange(size, dtype=jnp.int32) - start[row]
        if ring:
            token = token % slots  # the first token of this slot, then the last
            token += jnp.maximum((count[row] - 1 - token) // slots, 0) * slots
        fits = (token >= 0) & (token < count[row])
        fresh = jnp.take(mine, jnp.clip(token, 0, t - 1), axis=3).astype(leaf.dtype)
        fits = fits.reshape((1, 1, 1, size) + (1,) * rest)
        return jax.lax.dynamic_update_slice(leaf, jnp.where(fits, fresh, old), at)

    def one(row, leaf):
        begin = start[row] % slots if ring else start[row]
        leaf = block(row, leaf, jnp.clip(begin, 0, slots - size))
        return block(row, leaf, zero) if ring and 1 < size < slots else leaf

    return jax.lax.fori_loop(0, leaf.shape[1], one, leaf)
