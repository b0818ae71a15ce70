"""The only writer: runs of tokens into the slots of rings and pages, in place; and back.

A loop over rows of dynamic update slices: scatters and vmapped slices copy the whole cache on TPU.
A row with nothing to write rewrites what it read (an update slice clamps, it does not drop).
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from kvjax.shapes import Array, Int


def write_ring(leaf, new, start: Int[Array, "b"], count: Int[Array, "b"]):
    """Writes new[:, b, :, j] to slot (start[b] + j) % s for j < count[b], in place.

    leaf: [l b n s d]; new: [l b n t d]. Of more than s tokens the last s stay.
    """
    slots, t = leaf.shape[3], new.shape[3]
    size = min(slots, t)
    if size == 0:
        return leaf

    def block(row, leaf, first):
        """Rewrites slots first .. first + size of one row."""
        token = first + jnp.arange(size, dtype=jnp.int32) - start[row]
        token = token % slots  # the first token of this slot, then the last
        token += jnp.maximum((count[row] - 1 - token) // slots, 0) * slots
        old = _cut(leaf, row, first, size)
        return _put(leaf, _blend(old, new, row, token, count[row]), row, first)

    def one(row, leaf):
        leaf = block(row, leaf, jnp.minimum(start[row] % slots, slots - size))
        return pinned(block(row, leaf, jnp.int32(0)) if 1 < size < slots else leaf)

    return jax.lax.fori_loop(0, leaf.shape[1], one, pinned(leaf))


def write_pages(stored, new, start: Int[Array, "b"], count: Int[Array, "b"], pair, tokens: int):
    """Writes the codes new[:, b, :, j] to slot start[b] + j for j < count[b], in place.

    stored: what `pair` packs, leaves [l b r p ...], slots counted through the pages; new: not
    packed, of so many tokens, leaves [l b r t ...], or [l b r t/g ...] where g tokens share an
    entry; start and count are multiples of `pair.group`, and their sum is at most the slots. Whole
    pages are rewritten: a word holds several tokens, and an index into the slots of a page, which
    may be on the lanes, makes XLA lay the whole leaf out anew.
    """
    if tokens == 0:
        return stored
    page, (_, rows, _, pages) = pair.page, jax.tree.leaves(stored)[0].shape[:4]
    size = (page + tokens - 2 * pair.group) // page + 1  # pages they touch, wherever they begin
    size = min(pages, size)

    def one(row, stored):
        first = jnp.clip(start[row] // page, 0, pages - size)

        def blend(old, new):
            slots = old.shape[4]
            per = page // slots  # tokens to an entry: 1, or the group that shares it
            token = first * slots + jnp.arange(size * slots, dtype=jnp.int32) - start[row] // per
            flat = old.reshape(*old.shape[:3], size * slots, *old.shape[5:])
            return _blend(flat, new, row, token, count[row] // per).reshape(old.shape)

        old = pair.unpack(jax.tree.map(lambda x: _cut(x, row, first, size), stored))
        fresh = pair.pack(jax.tree.map(blend, old, new))
        return jax.tree.map(lambda x, y: pinned(_put(x, y, row, first)), stored, fresh)

    return jax.lax.fori_loop(0, rows, one, jax.tree.map(pinned, stored))


def read_ring(leaf, start: Int[Array, "b"], size: int):
    """The tokens [l b n size d] of slots (start[b] + j) % s; past s of them, anything.

    Slices of a row at a time, because a gather along the slots lays the whole leaf out anew.
    """
    slots = leaf.shape[3]
    most = min(size, slots)

    def one(row):
        first = start[row] % slots
        low = jnp.minimum(first, slots - most)
        slot = first + jnp.arange(size, dtype=jnp.int32)
        whole = pinned(leaf)
        both = [pinned(leaf, _cut(whole, row, i, most)) for i in (low, jnp.int32(0))]
        at = jnp.where(slot < slots, slot - low, most + slot - slots)
        at = jnp.clip(at, 0, 2 * most - 1)
        return jnp.take(jnp.concatenate(both, axis=3), at, axis=3)[:, 0]

    return jnp.moveaxis(jax.lax.map(one, jnp.arange(leaf.shape[1])), 0, 1)


def _at(leaf, row, first):
    zero = jnp.int32(0)
    return (zero, row, zero, first) + (zero,) * (leaf.ndim - 4)


def _cut(leaf, row, first, size):
    shape = (leaf.shape[0], 1, leaf.shape[2], size, *leaf.shape[4:])
    return jax.lax.dynamic_slice(leaf, _at(leaf, row, first), shape)


def _put(leaf, fresh, row, first):
    return jax.lax.dynamic_update_slice(leaf, fresh, _at(leaf, row, first))


def _blend(old, new, row, token, count):
    """old [l 1 r size ...] with the new token of each slot, where 0 <= token < count."""
    mine = jax.lax.dynamic_index_in_dim(new, row, 1, keepdims=True)
    fresh = jnp.take(mine, jnp.clip(token, 0, new.shape[3] - 1), axis=3).astype(old.dtype)
    fits = ((token >= 0) & (token < count)).reshape((1, 1, 1, -1) + (1,) * (old.ndim - 4))
    return jnp.where(fits, fresh, old)


def pinned(leaf, part=None):
    """The leaf, or a part of it, in the layout that the leaf has outside of loops.

    A decoding loop else changes the layout and changes it back: two copies of the cache a step on
    TPU. Tokens are on the lanes there where a head does not fill them.
    """
    part = leaf if part is None else part
    order = _order(leaf.shape)
    if order is None:
        return part
    pin = lambda x: with_layout_constraint(x, Layout(order))  # noqa: E731
    return jax.lax.platform_dependent(part, tpu=pin, default=lambda x: x)


def _order(shape):
    """Axes from major to minor as XLA orders those of a large leaf on TPU: its tiles of 8 x 128
    are padded least, and rows are major among equals. None where each of these orders pads a lot.
    """
    if 0 in shape:
        return None
    last = len(shape) - 1
    pairs = [(last - 1, last), (last, last - 1), (last - 2, last)]  # the two minor axes

    def padded(pair):
        rows, lanes = (shape[i] for i in pair)
        return -(-rows // 8) * 8 / rows * (-(-lanes // 128) * 128 / lanes)

    best = min(pairs, key=padded)
    if padded(best) > 1.5:
        return None
    return (*(i for i in range(last + 1) if i not in best), *best)
