"""The compressed cache: an exact tail and compressed bodies, and how a layer attends to them."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax import codecs, struct
from kvjax.attention import Query, attend_blocks, merge
from kvjax.cache import pool, positions, slots, state
from kvjax.cache.pool import Pool
from kvjax.cache.slots import Slots
from kvjax.cache.state import State
from kvjax.config import CacheRecipe, Rope
from kvjax.shapes import Array, Float, Int

OVERFLOW, UNDERFLOW, NAN, TRIMMED = 1, 2, 4, 8
"""Bits of `Cache.flags`: no room was left; truncated below the edge; a NaN was to be remembered;
more entries reached a threshold than there was room for, and the lowest went: a note, no error."""


@struct.dataclass
class Tokens(struct.Record):
    """New tokens of all layers, as `look` returns and `append` takes them."""

    k: Float[Array, "l b t n d"]  # after RoPE unless the recipe stores keys before it
    v: Float[Array, "l b t n e"]
    # What an observer saw, for each layer group, leaves [l b ...]; cache/stat.py if it streams.
    evidence: tuple[Any, ...] = ()


@struct.dataclass
class Tail(struct.Record):
    """A ring of exact tokens; the token of arrival index p is in slot p % capacity."""

    k: Float[Array, "l b n c d"]
    v: Float[Array, "l b n c e"]
    stat: Float[Array, "l b n c"] | None = None  # float32: cache/stat.py

    @property
    def capacity(self) -> int:
        return self.k.shape[-2]


@struct.dataclass
class LayerCache(struct.Record):
    """The memory of layers start to stop: leaves stacked over them."""

    tail: Tail
    bodies: tuple = ()
    start: int = struct.static(0)
    stop: int = struct.static(0)
    window: int | None = struct.static(None)  # of a sliding-window layer, which has no bodies
    pooled: int | None = struct.static(None)  # number of its first layer in the pool, if it has one

    @property
    def keeps_all(self) -> bool:
        """Whether the tail holds every token: no body took any."""
        return not self.bodies and self.pooled is None


@struct.dataclass
class Cache(struct.Record):
    """What a model remembers of a batch of texts; all rows independent."""

    groups: tuple[LayerCache, ...]
    seen: Int[Array, "b"]  # arrivals so far: the arrival index of the next token
    clock: Int[Array, "b"]  # rotary position of the next token
    edge: Int[Array, "b"]  # arrivals that the bodies have taken
    high: Int[
        Array, "b"
    ]  # the largest `seen` so far; rings hold nothing older than high - capacity
    budget: Int[Array, "b"]  # entries per kv head that the bodies may keep
    flags: Int[Array, "b"]  # OVERFLOW, UNDERFLOW, NAN, TRIMMED
    recipe: CacheRecipe = struct.static(CacheRecipe())
    max_length: int = struct.static(0)
    pool: Pool | None = None  # what condense kept, where layers or heads keep unequal numbers

    @property
    def batch(self) -> int:
        return self.seen.shape[0]


@struct.dataclass
class Places:
    """Where a tail's tokens are: what all layers of a group share, made once outside the scan."""

    pos: Int[Array, "b c"]  # arrival index, -1 where empty
    rotary: Int[Array, "b c"]
    edge: Int[Array, "b"]


def raw_keys(recipe: CacheRecipe) -> bool:
    """Whether keys are stored before RoPE and rotated on read."""
    if recipe.store is None:
        return False
    return recipe.store.positions == "read" or codecs.pair(recipe.store).k.rope == "before"


def oldest_in_ring(cache: Cache, group: LayerCache) -> Int[Array, "b"]:
    """The lowest arrival index that the tail of `group` answers for."""
    if not group.keeps_all:
        return cache.edge
    if group.window is None:
        return jnp.zeros_like(cache.seen)
    return jnp.maximum(cache.high - group.tail.capacity, 0)


def takes_more(group: LayerCache) -> bool:
    """Whether tokens leave the tail of a group for its bodies."""
    return any(not body.closed for body in group.bodies)


def places(cache: Cache, group: LayerCache) -> Places:
    pos = positions.ring(group.tail.capacity, cache.seen, oldest_in_ring(cache, group))
    shift = (cache.clock - cache.seen)[:, None]
    return Places(pos, jnp.where(pos >= 0, pos + shift, 0), cache.edge)


def attend(
    layer: LayerCache, query: Query, at: Places, recipe: CacheRecipe, rope: Rope, tables=None,
    pooled: tuple[Pool, Any, Any] | None = None,
):  # fmt: skip
    """Attends to one layer's memory: the pieces to merge, and a function that reads the tail.

    layer and tables: leaves without their layer axis. pooled: (pool, first page, pages) or None.
    """
    tail, turned = layer.tail, raw_keys(recipe)
    dtype = query.q.dtype

    def read(start, size):
        k, v = (slots.cut(x, start, size, 2) for x in (tail.k, tail.v))
        if turned:
            k = positions.turn(k, slots.cut(at.rotary, start, size, 1)[:, None], rope)
        return k.astype(dtype), v.astype(dtype)

    n, e = tail.k.shape[1], tail.v.shape[-1]
    sizes: dict[str, Any] = dict(kv_heads=n, value_dim=e)
    sizes["whole"] = not turned  # turned keys are float32: by blocks
    pieces = [attend_blocks(query, read, tail.capacity, at.pos, **sizes)]
    for body in layer.bodies:
        if isinstance(body, State):
            assert recipe.fold is not None
            pieces.append(state.attend(body, query, recipe.fold, tables))
        else:
            pieces.append(slots.attend(body, query, at.edge, recipe, rope, tables))

    if pooled is not None:
        pieces.append(pool.attend(*pooled, query, n, recipe, tables))
    return pieces, read


def readable(layer: LayerCache, at: Places, recipe: CacheRecipe, rope: Rope, dtype, tables=None):
    """What reads each body of a layer again, as `evidence.Stored`; None for a state."""
    return tuple(
        slots.stored(body, at.edge, recipe, rope, dtype, tables)
        if isinstance(body, Slots)
        else None
        for body in layer.bodies
    )


def merge_all(pieces):
    """Attention over all pieces together."""
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = merge(whole, piece)
    return whole


def nbytes(cache: Any) -> int:
    """Bytes held by the leaves of a cache (or of any tree of arrays)."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
