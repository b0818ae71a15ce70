"""Slots: a body of codes in pages, with what is needed to know each slot's position."""

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import codecs, struct
from kvjax.attention import Query, attend_blocks, merge, visible
from kvjax.cache import positions
from kvjax.config import CacheRecipe, Rope
from kvjax.errors import InputError
from kvjax.shapes import EMPTY, Array, Float, Int

BLOCK = 512


@struct.dataclass
class Slots(struct.Record):
    """A body: codes in pages. Leaves that grow with tokens are [l b rows pages slots ...].

    Without `pos` the slot is the position: slot s holds arrival base + s, once base + s < edge.
    With it (a scorer chose), each slot knows its arrival. With `owner`, a page belongs to one kv
    head of its row (a pool); without, row r is kv head r.
    """

    codes: tuple  # (codes of keys, codes of values)
    base: Int[Array, "l b"]
    pos: Int[Array, "l b r p s"] | None = None  # uint16, all ones empty; int32, -1 empty, if longer
    owner: Int[Array, "l b r p"] | None = None  # kv head within the row; -1 is free
    bias: Float[Array, "l b r p s"] | None = None  # added to the logits
    page: int = struct.static(128)
    heads: int = struct.static(1)  # kv heads that share a row: more than one in a pool
    closed: bool = struct.static(False)  # takes no more tokens: condense made it
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
    out, lse = (_pooled if body.owner is not None else _rows)(
        body, query, pos, recipe, rope, tables
    )
    if body.exponent != 1.0:
        lse = jnp.where(lse > EMPTY / 2, lse * body.exponent, EMPTY)
    return out, lse


def _rows(body, query, pos, recipe, rope, tables):
    """Row r of the body is kv head r."""
    pair, dtype = codecs.pair(recipe.store, tables), query.q.dtype
    turned = on_read(recipe, pair)
    rotary = positions.ranks(pos) if turned == "read" else jnp.maximum(pos, 0)
    rotary = rotary if rotary.ndim == 3 else rotary[:, None]

    def read(start, size):
        k, v = _decode(body, pair, start // body.page, size // body.page, dtype)
        if turned:
            at = rearrange(cut(rotary, start, size, 2), "b r (p s) -> b r p s", s=body.page)
            k = positions.turn(k, at, rope)
        return k, v

    heads = jax.tree.leaves(body.codes)[0].shape[1]
    value_dim = jax.eval_shape(lambda: read(0, body.page))[1].shape[-1]
    bias = None if body.bias is None else rearrange(body.bias, "b r p s -> b r (p s)")
    block, whole = max(BLOCK // body.page, 1) * body.page, pair.raw and not turned
    return attend_blocks(query, read, body.capacity, pos, bias, kv_heads=heads,
                         value_dim=value_dim, block=block, whole=whole)  # fmt: skip


def on_read(recipe, pair) -> str | None:
    """How stored keys are rotated on read: by rank ("read"), by arrival ("keep"), or not at all."""
    if recipe.store.positions == "read":
        return "read"
    return "keep" if pair.k.rope == "before" else None


def _decode(body, pair, first, pages, dtype):
    """Keys and values [b r pages slots d] of a range of pages."""
    return pair.decode(jax.tree.map(lambda x: cut(x, first, pages, 2), body.codes), dtype)


def _pooled(body, query, pos, recipe, rope, tables):
    """Pages with owners: one batched product per page, then a merge by owner, block by block."""
    pair = codecs.pair(recipe.store, tables)
    if on_read(recipe, pair):
        raise InputError("a pool holds keys after RoPE; use positions='keep' and a codec that does")
    rows, pages = body.owner.shape[1:]
    per = pages if pair.raw else max(BLOCK // body.page, 1)
    pos = rearrange(pos, "b r (p s) -> b r p s", p=pages)

    def part(first, count):
        k, v = _decode(body, pair, first, count, query.q.dtype)
        own, at = (cut(x, first, count, 2) for x in (body.owner, pos))
        return _pool_block(query, k, v, own, at, body.heads)

    out = part(0, min(per, pages))
    if pages > per:
        full = pages // per
        out, _ = jax.lax.scan(
            lambda c, i: (merge(c, part(i * per, per)), None), out, jnp.arange(1, full)
        )
        out = merge(out, part(full * per, pages % per)) if pages % per else out
    return out


def _pool_block(query, k, v, own, pos, n):
    """Attention over pages [b r p s d] of owners [b r p], for the n kv heads of each row."""
    b, r, p, page, _ = k.shape
    t = query.q.shape[1]
    q = rearrange(query.q, "b t (r n g) d -> b r n (g t) d", r=r, n=n)
    q = q * jnp.asarray(query.scale, q.dtype)
    owner = jnp.maximum(own, 0).astype(jnp.int32)
    mine = jnp.take_along_axis(q, owner[..., None, None], axis=2)  # [b r p (g t) d]
    s = jnp.einsum("brpqd,brpsd->brpqs", mine, k, preferred_element_type=jnp.float32)
    see = visible(query, rearrange(pos, "b r p s -> b (r p) s"))
    see = rearrange(see, "b (r p) t s -> b r p t s", r=r) & (own >= 0)[..., None, None]
    see = jnp.tile(see, (1, 1, 1, q.shape[3] // t, 1))
    top = jax.lax.stop_gradient(jnp.max(jnp.where(see, s, EMPTY), axis=-1))
    weight = jnp.where(see, jnp.exp(s - top[..., None]), 0.0)
    out = jnp.einsum("brpqs,brpse->brpqe", weight.astype(v.dtype), v,
                     preferred_element_type=jnp.float32)  # fmt: skip
    return _by_owner(out, weight.sum(-1), top, owner, n, t)


def _by_owner(out, total, top, own, n, t):
    """Merges unnormalised page results [b r p q e], sums and maxima [b r p q] into heads."""
    mine = jax.nn.one_hot(own, n, axis=-1, dtype=jnp.float32)  # [b r p n]
    best = jnp.max(jnp.where(mine[..., None] > 0, top[:, :, :, None], EMPTY), axis=2)  # [b r n q]
    back = jnp.einsum("brpn,brnq->brpq", mine, best)
    scale = jnp.where(total > 0, jnp.exp(top - back), 0.0)
    whole = jnp.einsum("brpn,brpq->brnq", mine, total * scale)
    some = whole > 0
    safe = jnp.where(some, whole, 1.0)
    out = jnp.einsum("brpn,brpqe->brnqe", mine, out * scale[..., None]) / safe[..., None]
    lse = jnp.where(some, best + jnp.log(safe), EMPTY)
    return (rearrange(out, "b r n (g t) e -> b t (r n g) e", t=t),
            rearrange(lse, "b r n (g t) -> b t (r n g)", t=t))  # fmt: skip
