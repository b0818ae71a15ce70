"""Slots: a body of codes in pages, with what is needed to know each slot's position."""

import dataclasses

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import codecs, struct
from kvjax.attention import Query, attend_blocks
from kvjax.cache import positions
from kvjax.config import CacheRecipe, Rope, Store
from kvjax.evidence import Stored
from kvjax.shapes import EMPTY, Array, Float, Int

BLOCK = 512


@struct.dataclass
class Slots(struct.Record):
    """A body: codes in pages. Leaves that grow with tokens are [l b rows pages ...], those of
    codes as `codecs.Pair.pack` leaves a page, the others [l b rows pages slots].

    Without `pos` the slot is the position: slot s holds arrival base + s, once base + s < edge.
    With it (a scorer chose), each slot knows its arrival. Row r is kv head r.
    """

    codes: tuple  # (packed codes of keys, of values)
    base: Int[Array, "l b"]
    pos: Int[Array, "l b r p s"] | None = None  # uint16, all ones empty; int32, -1 empty, if longer
    bias: Float[Array, "l b r p s"] | None = None  # added to the logits
    stat: Float[Array, "l b r p s"] | None = None  # float32, of scorers that stream: cache/stat.py
    page: int = struct.static(128)
    closed: bool = struct.static(False)  # takes no more tokens: condense made it
    plain: bool = struct.static(False)  # a reducer's: raw codes, whatever the recipe's codec
    temperature: float = struct.static(1.0)  # divides the logits of this body (APE)
    exponent: float = struct.static(1.0)  # multiplies its log-sum-exp (APE's scale)

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return jax.tree.leaves(self.codes)[0].shape[self.base.ndim + 1] * self.page


def cut(x, start, size: int, axis: int):
    """x[start : start + size] along an axis; x itself if that is all of it."""
    if size == x.shape[axis]:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def pos_dtype(max_length: int):
    """Positions take two bytes where they fit; the largest value is kept for "empty"."""
    return jnp.uint16 if max_length < 65535 else jnp.int32


def pack_pos(pos, dtype):
    return (
        jnp.where(pos < 0, jnp.iinfo(jnp.uint16).max, pos).astype(dtype)
        if dtype == jnp.uint16
        else pos
    )


def unpack_pos(pos):
    if pos.dtype != jnp.uint16:
        return pos
    return jnp.where(pos == jnp.iinfo(jnp.uint16).max, -1, pos.astype(jnp.int32))


def arrivals(body: Slots, edge: Int[Array, "b"]):
    """Arrival index of each slot of a layer's body: [b s], or [b r s] with `pos`; -1 is empty."""
    if body.pos is not None:
        return unpack_pos(rearrange(body.pos, "b r p s -> b r (p s)"))
    pos = body.base[:, None] + jnp.arange(body.capacity, dtype=jnp.int32)
    return jnp.where(pos < edge[:, None], pos, -1)


def attend(body: Slots, query: Query, edge, recipe: CacheRecipe, rope: Rope, tables=None):
    """Attends to one layer's body (leaves without layer axis), decoding a block at a time."""
    query = query.replace(scale=query.scale / body.temperature)
    pos = arrivals(body, edge)
    out, lse = _rows(body, query, pos, recipe, rope, tables)
    if body.exponent != 1.0:
        lse = jnp.where(lse > EMPTY / 2, lse * body.exponent, EMPTY)
    return out, lse


def _rows(body, query, pos, recipe, rope, tables):
    pair = codecs.pair(*((Store(),) if body.plain else (recipe.store, tables)))
    lies = body.plain or on_read(recipe, pair) is None  # else keys must be theirs to be rotated
    if lies:
        query = query.replace(q=pair.turn_query(query.q))
    read, plain = _reader(body, pos, recipe, rope, query.q.dtype, tables, inside=lies)
    heads = jax.tree.leaves(body.codes)[0].shape[1]
    value_dim = jax.eval_shape(lambda: read(0, body.page))[1].shape[-1]
    bias = None if body.bias is None else rearrange(body.bias, "b r p s -> b r (p s)")
    out, lse = attend_blocks(query, read, body.capacity, pos, bias, kv_heads=heads,
                             value_dim=value_dim, block=_block(body), whole=plain)  # fmt: skip
    return (pair.turn_back(out) if lies else out), lse


def _block(body) -> int:
    return max(BLOCK // body.page, 1) * body.page


def stored(body: Slots, edge, recipe: CacheRecipe, rope: Rope, dtype, tables=None) -> Stored:
    """What reads the keys of a layer's body once more, for an observer."""
    pos = arrivals(body, edge)
    read, plain = _reader(body, pos, recipe, rope, dtype, tables)
    keys = lambda start, size: rearrange(read(start, size)[0], "b r p s d -> b r (p s) d")  # noqa: E731
    return Stored(pos, keys, body.capacity, min(_block(body), body.capacity), plain)


def _reader(body, pos, recipe, rope, dtype, tables, inside=False):
    """`read(start, size)`: keys, rotated, and values [b r p s d]; and whether they lie there.

    inside: in the basis in which the codecs store them.
    """
    if body.plain:  # as made from keys after RoPE
        recipe, tables = dataclasses.replace(recipe, store=Store(page=body.page)), None
    pair = codecs.pair(recipe.store, tables)
    turned = on_read(recipe, pair)
    pair = pair.inside if inside else pair
    rotary = positions.ranks(pos) if turned == "read" else jnp.maximum(pos, 0)
    rotary = rotary if rotary.ndim == 3 else rotary[:, None]

    def read(start, size):
        k, v = _decode(body, pair, start // body.page, size // body.page, dtype)
        if turned:
            at = rearrange(cut(rotary, start, size, 2), "b r (p s) -> b r p s", s=body.page)
            k = positions.turn(k, at, rope)
        return k, v

    return read, pair.raw and not turned


def on_read(recipe, pair) -> str | None:
    """How stored keys are rotated on read: by rank ("read"), by arrival ("keep"), or not at all."""
    if recipe.store.positions == "read":
        return "read"
    return "keep" if pair.k.rope == "before" else None


def _decode(body, pair, first, pages, dtype):
    """Keys and values [b r pages slots d] of a range of pages."""
    return pair.read(jax.tree.map(lambda x: cut(x, first, pages, 2), body.codes), dtype)
