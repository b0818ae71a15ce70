"""Compressing an exact cache after the fact: score, choose, gather, encode; a layer at a time."""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import codecs
from kvjax.cache import init, positions
from kvjax.cache.absorb import choose
from kvjax.cache.cache import Cache, LayerCache, Tail
from kvjax.cache.select import ids
from kvjax.cache.slots import pack_pos
from kvjax.cache.write import write_ring
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.scorers import Seen


@functools.partial(jax.jit, static_argnames=("config", "recipe", "condensed"))
def compact(
    cache: Cache,
    evidence,
    counts,
    config: ModelConfig,
    recipe: CacheRecipe,
    condensed: init.Sizes,
    tables=None,
):
    """The cache that `recipe` makes of an exact one of the sizes `condensed`.

    counts [b]: entries per kv head to keep, window included. evidence: per group, what the scorer's
    observer saw (leaves [l b ...]), or ().
    """
    assert recipe.store is not None
    seen = cache.seen
    window = jnp.minimum(recipe.window, counts)
    if recipe.choice is None:  # all are kept: whole groups, as if they had come one by one
        size = codecs.pair(recipe.store).group
        window = seen - (seen - window) // size * size
    edge, budget = seen - window, counts - window
    turned = recipe.store.positions == "rerot"
    groups = []
    for group, seen_by in zip(cache.groups, evidence or [None] * len(cache.groups), strict=True):
        rope = config.kinds[config.pattern[group.start]].rope
        if group.window is not None:  # its ring is small already; it follows the clock
            k = group.tail.k
            k = positions.move(k, (counts - seen)[None, :, None, None], rope) if turned else k
            groups.append(group.replace(tail=group.tail.replace(k=k)))
            continue
        table = jax.tree.map(lambda x, g=group: x[g.start : g.stop], tables)
        shape = jax.eval_shape(
            lambda g=group: init.layers(config, recipe, cache.batch, cache.max_length, condensed,
                                         g.start, g.stop, config.kinds[config.pattern[g.start]])
        )  # fmt: skip
        groups.append(_layers(group, seen_by, table, shape, seen, edge, budget, recipe, rope))
    clock = cache.clock - (seen - counts) if turned else cache.clock
    return cache.replace(groups=tuple(groups), clock=clock, edge=edge, budget=budget, recipe=recipe)


def _layers(group, evidence, tables, shape, seen, edge, budget, recipe, rope) -> LayerCache:
    rope = rope if recipe.store.positions == "rerot" else None
    slots = group.tail.capacity

    def one(x):
        k, v, mine, table = x
        pair = codecs.pair(recipe.store, table)
        pos = jnp.arange(slots, dtype=jnp.int32)
        pos = jnp.where(pos < edge[:, None], pos, -1)  # [b s]: the window does not compete
        pos = jnp.broadcast_to(pos[:, None], k.shape[:3])
        if recipe.choice is None:
            keep = pos >= 0
        else:
            keep = choose(Seen(k, v, pos, seen, mine), budget, recipe, table)
        return gather(keep, shape.bodies[0], k, v, pos, pair, rope and (rope, budget))

    codes, pos, owner = jax.lax.map(one, (group.tail.k, group.tail.v, evidence, tables))
    body = shape.bodies[0]
    base = jnp.zeros(body.base.shape, jnp.int32)
    made = body.replace(
        codes=codes, base=base, pos=None if body.pos is None else pos,
        owner=None if body.owner is None else owner,
    )  # fmt: skip
    later = tuple(_empty_at(b, edge) for b in shape.bodies[1:])
    tail = _tail(group.tail, shape.tail, seen, edge, budget, rope)
    return LayerCache(tail, (made, *later), group.start, group.stop)


def gather(keep, body, k, v, pos, pair, turned):
    """The kept entries of one layer (mask [b n s]) in the shape of `body`, ascending, encoded.

    turned: None, or (rope, stop [b]): keys are rotated to the positions just below stop. Only
    distances matter: a head of a pool that keeps more than stop entries begins below 0.
    """
    b, n, _ = keep.shape
    if body.owner is None:
        pages = jax.tree.leaves(body.codes)[0].shape[3]
        at, real = ids(keep, pages * body.page)
        owner = jnp.zeros((b, n, pages), jnp.int32)
        at, real = (rearrange(x, "b n (p s) -> b n p s", s=body.page) for x in (at, real))
        head = jnp.broadcast_to(jnp.arange(n)[:, None, None], at.shape)
    else:
        at, real, owner, head = pool_pages(keep, body)
    row = jnp.arange(b)[:, None, None, None]
    arrival = jnp.where(real, pos[row, head, at], -1)
    k, v = k[row, head, at], v[row, head, at]  # [b r p s d]
    if turned is not None:
        rope, stop = turned
        place = stop[:, None, None] + jnp.cumsum(keep, axis=-1) - 1 - keep.sum(-1, keepdims=True)
        k = positions.move(k, place[row, head, at] - jnp.maximum(arrival, 0), rope)
    blank = real[..., None]
    codes = pair.encode(jnp.where(blank, k, 0), jnp.where(blank, v, 0), real)
    kind = jnp.int32 if body.pos is None else body.pos.dtype
    own = owner if body.owner is None else owner.astype(body.owner.dtype)
    return codes, pack_pos(arrival, kind), own


def pool_pages(keep, body):
    """Deals pages to heads by need: slot ids, which are real, owner of a page, head of a slot."""
    b, n, slots = keep.shape
    pages, page = body.owner.shape[3], body.page
    count = keep.sum(axis=-1)  # [b n]
    need = -(-count // page)
    stop = jnp.cumsum(need, axis=-1)
    index = jnp.arange(pages)
    owner = (index[None, :, None] >= stop[:, None, :]).sum(-1)  # [b p]; n where free
    mine = jnp.minimum(owner, n - 1)
    first = jnp.take_along_axis(stop - need, mine, axis=1)
    rank = ((index - first) * page)[..., None] + jnp.arange(page)  # [b p s]
    order, _ = ids(keep, slots)
    row, head = jnp.arange(b)[:, None, None], mine[..., None]
    at = order[row, head, jnp.clip(rank, 0, slots - 1)]
    real = (rank < count[row[..., 0], mine][..., None]) & (owner < n)[..., None]
    owner = jnp.where(owner < n, owner, -1)
    head = jnp.broadcast_to(mine[..., None], at.shape)
    return at[:, None], real[:, None], owner[:, None], head[:, None]


def _empty_at(body, edge):
    """An empty body whose first slot is the arrival after the condensed ones."""
    made = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), body)
    return made.replace(base=jnp.broadcast_to(edge, body.base.shape))


def _tail(old, shape, seen, edge, budget, rope) -> Tail:
    """The window, in a ring of the new capacity; rerotated by what was dropped before it."""
    capacity = shape.capacity
    take = min(capacity, old.capacity)
    at = jnp.clip(edge[:, None] + jnp.arange(take, dtype=jnp.int32), 0, old.capacity - 1)
    k, v = (jnp.take_along_axis(x, at[None, :, None, :, None], axis=3) for x in (old.k, old.v))
    if rope is not None:
        k = positions.move(k, (budget - edge)[None, :, None, None], rope)
    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shape)
    count = seen - edge
    return Tail(write_ring(empty.k, k, edge, count), write_ring(empty.v, v, edge, count))
