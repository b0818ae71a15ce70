"""What a scorer learns from queries: observers, which look along while a layer attends.

An observer is a small frozen pytree. Called with `Looked` inside the layer scan it returns a pytree
of arrays [b ...]; what several looks have seen is joined by `merge`. Scorers find it, stacked over
layers and sliced again, as `seen.evidence`. An observer that needs a softmax of its own (KVzip)
makes it from the keys it wants.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from einops import reduce

from kvjax import struct
from kvjax.attention import WHOLE, Query, mass
from kvjax.shapes import Array, Float, Int


@struct.dataclass
class Stored:
    """A body that a layer has attended to, whose keys can be read again block by block."""

    pos: Int[Array, "b s"] | Int[Array, "b n s"]
    read: Callable = struct.field(pytree_node=False)  # read(start, size): rotated keys [b n s d]
    slots: int = struct.static(0)
    block: int = struct.static(0)  # size of what is read at once; start may be traced
    plain: bool = struct.static(True)  # raw codes: few queries may read all at once


@struct.dataclass
class Looked:
    """One layer, after it has attended. The tail is an exact cache's: slot s holds arrival s."""

    query: Query
    plain: Float[Array, "b t h d"]  # queries before RoPE
    k: Float[Array, "b n c d"]  # keys of the tail, rotated
    v: Float[Array, "b n c e"]
    pos: Int[Array, "b c"]
    here: Float[Array, "b n t d"]  # keys of the new tokens, rotated
    lse: Float[Array, "b t h"]  # total, over all memory
    hidden: Float[Array, "b t m"]  # input of the attention, after its norm
    tables: Any = None  # of this layer
    use: Callable = struct.field(pytree_node=False, default=lambda f: f(None))  # use(f) is f(block)
    bodies: tuple[Stored | None, ...] = ()  # of a cache that streams; None for a state
    stat: Float[Array, "b n c"] | None = None  # what its tail remembers: cache/stat.py
    apart: bool = struct.static(False)  # whether a streaming observer keeps the queries apart

    def placed(self, x, fill=0.0):
        """x [b .. t] of the new tokens at their slots of the tail, [b .. c]; elsewhere `fill`."""
        start = self.query.pos[:, 0]  # arrivals of a row are contiguous; -1 if it has none
        j = jnp.arange(self.k.shape[2]) - start[:, None]  # [b c]
        shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (-1,)
        at = jnp.clip(j, 0, x.shape[-1] - 1).reshape(shape)
        real = jnp.take_along_axis(self.query.pos, jnp.clip(j, 0, x.shape[-1] - 1), 1) >= 0
        here = (j >= 0) & (j < x.shape[-1]) & real & (start >= 0)[:, None]
        return jnp.where(here.reshape(shape), jnp.take_along_axis(x, at, -1), fill)


@struct.dataclass
class Mass:
    """Attention that each slot gets from the new queries, the new tokens' own slots included.

    {"sums": [b h c]}, over the queries that were looked at; last: each row's last real one.
    """

    last: bool = struct.static(False)

    def __call__(self, looked: Looked):
        query, lse = _last(looked) if self.last else (looked.query, looked.lse)
        before, _ = mass(query, looked.k, looked.pos, lse)
        own, _ = mass(query, looked.here, looked.query.pos, lse)
        return {"sums": before + looked.placed(own)}

    def merge(self, one, two):
        return jax.tree.map(jnp.add, one, two)


def _last(looked: Looked):
    """Each row's last real query, and its log-sum-exp [b 1 h]."""
    query = looked.query
    at = jnp.maximum((query.pos >= 0).sum(axis=1) - 1, 0)[:, None]
    q = jnp.take_along_axis(query.q, at[..., None, None], axis=1)
    query = query.replace(q=q, pos=jnp.take_along_axis(query.pos, at, axis=1))
    return query, jnp.take_along_axis(looked.lse, at[..., None], axis=1)


@struct.dataclass
class Gained:
    """Attention that each stored slot and each new token gets: an observer for streaming.

    last: of each row's last real query only. reduce: over the query heads of a kv head ("mean",
    "sum"), or "all": the mean over all heads of the layer, alike for each. Returns {"tail",
    "bodies", "here"} as cache/stat.py takes it; each is a second pass over the keys, by blocks,
    with the total log-sum-exp. Padding queries give nothing.
    """

    last: bool = struct.static(False)
    reduce: str = struct.static("mean")

    def __call__(self, looked: Looked):
        query, lse = looked.query, looked.lse
        if self.last and not looked.apart:
            query, lse = _last(looked)

        def got(k, pos):
            if not looked.apart:
                return self._heads(mass(query, k, pos, lse)[0], k.shape[1])

            def one(q, at, lse):
                alone = query.replace(q=q[:, None], pos=at[:, None])
                return mass(alone, k, pos, lse[:, None])[0]

            return self._heads(jax.vmap(one, 1, -1)(query.q, query.pos, lse), k.shape[1])

        bodies = tuple(
            () if body is None else _by_blocks(got, body, query, looked.k.shape[1])
            for body in looked.bodies
        )
        return {
            "tail": got(looked.k, looked.pos),
            "bodies": bodies,
            "here": got(looked.here, looked.query.pos),
        }

    def _heads(self, sums, n: int):
        """[b h s ..] of query heads to [b s n ..] of kv heads."""
        if self.reduce == "all":
            mean = jnp.broadcast_to(
                sums.mean(axis=1, keepdims=True), (len(sums), n, *sums.shape[2:])
            )
            return jnp.swapaxes(mean, 1, 2)
        return reduce(sums, "b (n g) s ... -> b s n ...", self.reduce, n=n)


def _by_blocks(got, body: Stored, query: Query, n: int):
    """got(k, pos) over the slots of a body, [b s ..], of which a block is decoded at a time."""
    few = body.plain and query.q.shape[1] * (query.q.shape[2] // n) <= WHOLE
    size, last = (body.slots if few else body.block), body.pos.ndim - 1

    def part(start):
        pos = jax.lax.dynamic_slice_in_dim(body.pos, start, size, axis=last)
        return got(body.read(start, size), pos)

    if size == body.slots:
        return part(0)
    shape = jax.eval_shape(part, jnp.int32(0))
    whole = jnp.zeros((shape.shape[0], body.slots, *shape.shape[2:]), shape.dtype)

    def add(whole, i):  # the last block may begin in the one before
        start = jnp.minimum(i * size, body.slots - size)
        return jax.lax.dynamic_update_slice_in_dim(whole, part(start), start, axis=1), None

    return jax.lax.scan(add, whole, jnp.arange(-(-body.slots // size)))[0]


@struct.dataclass
class QueryMoments:
    """Number, mean and centred second moment of the queries before RoPE, from arrival `first` on.

    {"count": [b], "mean": [b h d], "spread": [b h d d]}; spread is a sum, not yet divided.
    """

    first: int = struct.static(4)

    def __call__(self, looked: Looked):
        real = (looked.query.pos >= self.first).astype(jnp.float32)  # [b t]
        q = looked.plain.astype(jnp.float32)
        count = real.sum(axis=1)
        mean = jnp.einsum("bthd,bt->bhd", q, real) / jnp.maximum(count, 1.0)[:, None, None]
        off = (q - mean[:, None]) * real[..., None, None]
        return {"count": count, "mean": mean, "spread": jnp.einsum("bthi,bthj->bhij", off, off)}

    def merge(self, one, two):
        """Chan et al. 1979: exact, and no difference of large sums."""
        total = one["count"] + two["count"]
        wide = lambda x: x.reshape(x.shape + (1, 1))  # noqa: E731
        share = two["count"] / jnp.maximum(total, 1.0)
        apart = two["mean"] - one["mean"]
        outer = jnp.einsum("...hi,...hj->...hij", apart, apart)
        return {
            "count": total,
            "mean": one["mean"] + apart * wide(share),
            "spread": one["spread"] + two["spread"] + outer * wide(one["count"] * share)[..., None],
        }
