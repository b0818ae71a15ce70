"""Compressing an exact cache after the fact: score, choose, gather, encode.

Two jitted steps: `chosen` gives the mask of what stays, over all layers at once, since a budget may
span them; `packed` gathers it into bodies of static size, a layer at a time, or into a pool.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from kvjax import budgets, codecs, reducers, scorers
from kvjax.cache import init, positions, sizes
from kvjax.cache.cache import TRIMMED, Cache, LayerCache, Tail
from kvjax.cache.pool import fold, plan
from kvjax.cache.select import ids
from kvjax.cache.slots import pack_pos
from kvjax.cache.write import write_ring
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.scorers import Seen


def compact(
    cache: Cache,
    evidence,
    lengths,
    config: ModelConfig,
    recipe: CacheRecipe,
    later: int,
    tables=None,
) -> Cache:
    """The cache that `recipe` makes of an exact one, with room for `later` tokens more.

    lengths [b], on the host: tokens of each row. evidence: per group, what the scorer's observer
    saw (leaves [l b ...]), or (). A host function; the steps are jitted.
    """
    counts, keep = jnp.asarray(sizes.counts(recipe, lengths)), None
    if recipe.choice is not None and sizes.full_layers(config):
        wants = jnp.asarray(sizes.wants(config, recipe, lengths))
        keep, over = chosen(cache, evidence, counts, wants, config, recipe, tables)
        cache = cache.replace(flags=cache.flags | jnp.where(over, TRIMMED, 0))
        if recipe.reducer is not None and not reducers.makes(recipe):
            cache = moved(cache, keep, evidence, counts, config, recipe, tables)
    room = sizes.sizes(config, recipe, lengths, later)
    return packed(cache, keep, counts, config, recipe, room, tables)


def _window(cache, counts, recipe):
    """The newest tokens that stay in the tail, [b]."""
    window = jnp.minimum(recipe.window, counts)
    if recipe.choice is None:  # all are kept: whole groups, as if they had come one by one
        size = codecs.pair(recipe.store).group
        window = cache.seen - (cache.seen - window) // size * size
    return window


@functools.partial(jax.jit, static_argnames=("config", "recipe"))
def chosen(cache: Cache, evidence, counts, wants, config, recipe, tables=None):
    """Per group the mask [l b n s] of the entries that stay in its body, or None (a window); and
    [b], the rows of which the budget would have kept more than there is room for."""
    args = _competing(cache, evidence, counts, config, recipe, tables)
    budget = budgets.build(recipe.choice.budget)
    keep, none = budget(*args, wants), jnp.zeros_like(cache.seen, bool)
    over = budget.over(*args, wants) if hasattr(budget, "over") else none
    stops = np.cumsum([g.stop - g.start for g in cache.groups if g.window is None])[:-1]
    mine = iter(jnp.split(keep, stops))
    return tuple(next(mine) if g.window is None else None for g in cache.groups), over


@functools.partial(jax.jit, static_argnames=("config", "recipe"))
def moved(cache: Cache, keep, evidence, counts, config, recipe, tables=None) -> Cache:
    """The exact cache, with the values that a reducer gives to entries that stay in a body."""
    score, valid, *_ = _competing(cache, evidence, counts, config, recipe, tables)
    groups, below = [], 0
    for group, mask in zip(cache.groups, keep, strict=True):
        if mask is not None:
            mine = slice(below, below + len(mask))
            move = lambda x: reducers.build(recipe.reducer).moved(*x, config.scale)  # noqa: E731
            dropped = valid[mine] & ~mask
            v = jax.lax.map(move, (group.tail.k, group.tail.v, mask, dropped, score[mine]))
            group, below = group.replace(tail=group.tail.replace(v=v)), mine.stop
        groups.append(group)
    return cache.replace(groups=tuple(groups))


def _competing(cache, evidence, counts, config, recipe, tables):
    """What a budget is asked about, [l b n s] of all layers: scores, valid, protected, arrivals."""
    edge = cache.seen - _window(cache, counts, recipe)
    scores, full = [], [g for g in cache.groups if g.window is None]
    for group, seen_by in zip(cache.groups, evidence or [None] * len(cache.groups), strict=True):
        if group.window is None:
            scores.append(_scores(cache, group, seen_by, edge, config, recipe, tables))
    heads, slots = full[0].tail.k.shape[2:4]
    pos = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (cache.batch, heads, slots))
    valid = pos < edge[:, None, None]
    score = jnp.concatenate(scores)
    valid, pos = (jnp.broadcast_to(x, score.shape) for x in (valid, pos))
    return score, valid, valid & (pos < recipe.choice.sinks), pos


def _scores(cache, group, evidence, edge, config, recipe, tables):
    """The scorer's [l b n s] for the layers of a group."""
    rope = config.kinds[config.pattern[group.start]].rope
    table = jax.tree.map(lambda x: x[group.start : group.stop], tables)
    slots = jnp.arange(group.tail.capacity, dtype=jnp.int32)

    def one(x):
        k, v, mine, table = x
        wide = lambda y: jnp.broadcast_to(y[:, None], k.shape[:3])  # noqa: E731
        pos = wide(jnp.where(slots < cache.seen[:, None], slots, -1))
        seen = Seen(k, v, pos, cache.seen, mine, wide(slots < edge[:, None]), rope=rope,
                    scale=config.scale)  # fmt: skip
        return scorers.build(recipe.choice.scorer, (table or {}).get("scorer"))(seen)

    return jax.lax.map(one, (group.tail.k, group.tail.v, evidence, table))


@functools.partial(jax.jit, static_argnames=("config", "recipe", "room"))
def packed(cache: Cache, keep, counts, config, recipe, room: sizes.Sizes, tables=None) -> Cache:
    """The condensed cache: `keep` per group from `chosen`, or None for all tokens."""
    seen = cache.seen
    window = _window(cache, counts, recipe)
    edge, budget = seen - window, counts - window
    turned = recipe.store.positions == "rerot"
    groups = []
    for group, mask in zip(cache.groups, keep or [None] * len(cache.groups), strict=True):
        rope = config.kinds[config.pattern[group.start]].rope
        if group.window is not None:  # its ring is small already; it follows the clock
            k = group.tail.k
            k = positions.move(k, (counts - seen)[None, :, None, None], rope) if turned else k
            groups.append(group.replace(tail=group.tail.replace(k=k)))
            continue
        table = jax.tree.map(lambda x, g=group: x[g.start : g.stop], tables)
        shape = jax.eval_shape(
            lambda g=group: init.layers(config, recipe, cache.batch, cache.max_length, room,
                                        g.start, g.stop, config.kinds[config.pattern[g.start]])
        )  # fmt: skip
        groups.append(_layers(group, mask, table, shape, seen, edge, budget, recipe, rope))
    pool = _pool(cache, keep, config, recipe, room, budget)
    clock = cache.clock - (seen - counts) if turned else cache.clock
    return cache.replace(
        groups=tuple(groups), clock=clock, edge=edge, budget=budget, recipe=recipe, pool=pool
    )


def _layers(group, keep, tables, shape, seen, edge, budget, recipe, rope) -> LayerCache:
    rope = rope if recipe.store.positions == "rerot" else None
    slots = group.tail.capacity

    def one(x):
        k, v, keep, table = x
        pair = codecs.pair(recipe.store, table)
        pos = jnp.arange(slots, dtype=jnp.int32)
        pos = jnp.where(pos < edge[:, None], pos, -1)  # [b s]: the window is not in the body
        pos = jnp.broadcast_to(pos[:, None], k.shape[:3])
        keep = pos >= 0 if keep is None else keep
        return gather(keep, shape.bodies[0], k, v, pos, pair, rope and (rope, budget))

    later, made = shape.bodies, ()
    if shape.pooled is None:
        codes, pos = jax.lax.map(one, (group.tail.k, group.tail.v, keep, tables))
        body, *later = later
        made = (
            body.replace(
                codes=codes,
                base=jnp.zeros(body.base.shape, jnp.int32),
                pos=None if body.pos is None else pos,
            ),
        )
    if reducers.makes(recipe):
        body, *later = later
        made += (_reduced(group, keep, tables, body, edge, recipe),)
    later = tuple(_empty_at(b, edge) for b in later)
    tail = _tail(group.tail, shape.tail, seen, edge, budget, rope)
    return LayerCache(tail, (*made, *later), group.start, group.stop, None, shape.pooled)


def _reduced(group, keep, tables, body, edge, recipe):
    """What the reducer makes of the entries that a group drops, in the shape of `body`."""
    pos = jnp.arange(group.tail.capacity, dtype=jnp.int32)
    pos = jnp.where(pos < edge[:, None], pos, -1)

    def one(x):
        k, v, keep, table = x
        at = jnp.broadcast_to(pos[:, None], k.shape[:3])
        reduce = reducers.build(recipe.reducer, (table or {}).get("reducer"))
        return reduce(k, v, at, (at >= 0) & ~keep)

    made = jax.lax.map(one, (group.tail.k, group.tail.v, keep, tables))
    k, v, at, bias = (rearrange(x, "l b n x ... -> l b n 1 x ...") for x in made)
    base = jnp.zeros(body.base.shape, jnp.int32)
    return body.replace(codes=(k, v), base=base, pos=pack_pos(at, body.pos.dtype), bias=bias)


def gather(keep, body, k, v, pos, pair, turned):
    """The kept entries of one layer (mask [b n s]) in the shape of `body`, ascending, encoded.

    turned: None, or (rope, stop [b]): keys are rotated to the positions just below stop.
    """
    pages = jax.tree.leaves(body.codes)[0].shape[3]
    at, real = ids(keep, pages * body.page)
    take = lambda x: jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - 3)), 2)  # noqa: E731
    arrival = jnp.where(real, take(pos), -1)
    k, v = take(k), take(v)
    if turned is not None:
        rope, stop = turned
        k = positions.move(k, take(_places(keep, stop)) - jnp.maximum(arrival, 0), rope)
    k, v, real, arrival = (
        rearrange(x, "b n (p s) ... -> b n p s ...", s=body.page) for x in (k, v, real, arrival)
    )
    blank = real[..., None]
    codes = pair.write(jnp.where(blank, k, 0), jnp.where(blank, v, 0), real)
    return codes, pack_pos(arrival, jnp.int32 if body.pos is None else body.pos.dtype)


def _places(keep, stop):
    """New positions [.. n s] of the kept entries: those just below stop [b]. Only distances
    matter: a head that keeps more than stop entries begins below 0."""
    return stop[:, None, None] + jnp.cumsum(keep, axis=-1) - 1 - keep.sum(-1, keepdims=True)


def _pool(cache, keep, config, recipe, room, budget):
    """The kept entries of all layers in one pool, or None if the recipe has none."""
    shape = jax.eval_shape(
        lambda: init.empty_pool(config, recipe, cache.batch, cache.max_length, room)
    )
    if shape is None:
        return None
    full = [(g, mask) for g, mask in zip(cache.groups, keep, strict=True) if mask is not None]
    head, layer, at, real, first, count = plan(jnp.concatenate([m for _, m in full]), shape)
    row, below, k, v = jnp.arange(cache.batch)[:, None, None], 0, 0.0, 0.0
    arrival = jnp.where(real, at, -1)
    for group, mask in full:
        depth = group.stop - group.start
        mine = (layer >= below) & (layer < below + depth)
        where = jnp.clip(layer - below, 0, depth - 1)[..., None], row, head[..., None]
        gk, gv = (x[*where, at] for x in (group.tail.k, group.tail.v))  # [b p s d]
        if recipe.store.positions == "rerot":
            rope = config.kinds[config.pattern[group.start]].rope
            place = jax.vmap(_places, (0, None))(mask, budget)[*where, at]
            gk = positions.move(gk, place - jnp.maximum(arrival, 0), rope)
        k, v = (jnp.where(mine[..., None, None], x, y) for x, y in ((gk, k), (gv, v)))
        below += depth
    blank = real[..., None]
    wide = lambda x: x[None, :, None]  # noqa: E731
    k, v = (wide(jnp.where(blank, x, 0)) for x in (k, v))
    codes = fold(codecs.pair(recipe.store).write(k, v, wide(real)))
    owner = jnp.where(real.any(axis=-1), head, -1)
    return shape.replace(
        codes=codes, pos=pack_pos(wide(arrival), shape.pos.dtype), first=first, count=count,
        owner=wide(owner).astype(shape.owner.dtype),
    )  # fmt: skip


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
