"""What changes a cache as tokens come and go: append, absorb_long, compress, truncate."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import budgets, codecs, sharding
from kvjax.cache import cache as c
from kvjax.cache import stat
from kvjax.cache.absorb import absorb
from kvjax.cache.cache import Cache, LayerCache, Tokens
from kvjax.cache.state import State
from kvjax.cache.write import read_ring, write_ring
from kvjax.errors import InputError
from kvjax.shapes import Array, Int


def group_of(cache: Cache) -> int:
    """Tokens that leave the tail together."""
    return codecs.pair(cache.recipe.store).group if cache.recipe.store else 1


def append(cache: Cache, new: Tokens, count: Int[Array, "b"] | None = None) -> Cache:
    """Remembers the first count[b] of the new tokens (all of them if None), in the tail.

    Writes the tail and nothing else. A row whose tail has no room for its count is left as it was
    and flagged OVERFLOW; a row with a NaN among its keys or values is flagged NAN. More new tokens
    than a sliding-window tail can take without losing its window are an error at trace time.

    Where a scorer streams, slots gain what the new queries gave them: the first count[b] of them if
    the look kept them apart (up to 1 + lookahead tokens), else all that were looked at.
    """
    t = new.k.shape[2]
    for group in cache.groups:
        room = group.tail.capacity
        if group.window is not None and room < cache.max_length:  # it wraps: the window must stay
            room -= group.window - 1
        if t > room:
            raise InputError(
                f"append got {t} tokens and a tail has room for {room}; use absorb_long, or a "
                "recipe with a larger stride or lookahead"
            )
    return sharding.local(_append, *_ready(cache, new, count), None)


def _ready(cache, new, count):
    """Cache, new tokens and counts as the shards take them. NaN is looked for here, over all heads:
    a shard sees only its own, and flags must agree."""
    full = jnp.full((cache.batch,), new.k.shape[2], jnp.int32)
    count = full if count is None else jnp.clip(jnp.asarray(count, jnp.int32), 0, full)
    cache = cache.replace(flags=cache.flags | _nan(new, count))
    return cache, new if stat.streams(cache) else new.replace(evidence=()), count


def _append(cache: Cache, new: Tokens, count, tables):
    count, flags = _admit(cache, new, count, [g for g in cache.groups if _bounded(cache, g)])
    groups = []
    for i, group in enumerate(cache.groups):
        group, own = stat.add(group, new, i, count, cache.recipe)
        groups.append(group.replace(tail=_write_tail(group, new, own, cache.seen, count)))
    return _advance(cache, count).replace(groups=tuple(groups), flags=flags)


def _bounded(cache, group) -> bool:
    """Whether a tail can be full: not a ring that forgets what no query sees."""
    return group.window is None or group.tail.capacity >= cache.max_length


def _admit(cache, new, count, groups):
    """Counts with rows refused that would overflow the tails of `groups`, and the flags."""
    over = jnp.zeros_like(count, bool)
    for group in groups:
        held = cache.seen + count - c.oldest_in_ring(cache, group)
        over |= (held > group.tail.capacity) & (count > 0)
    return jnp.where(over, 0, count), cache.flags | jnp.where(over, c.OVERFLOW, 0)


def _advance(cache, count):
    seen = cache.seen + count
    return cache.replace(seen=seen, clock=cache.clock + count, high=jnp.maximum(cache.high, seen))


def _nan(new, count):
    real = jnp.arange(new.k.shape[2]) < count[:, None]
    nan = lambda x: jnp.isnan(x).any(axis=(0, 3, 4))  # noqa: E731
    bad = (nan(new.k) | nan(new.v)) & real
    return jnp.where(bad.any(axis=1), c.NAN, 0)


def _of_group(group: LayerCache, x):
    """New tokens [l b t n d] of a group's layers, heads leading: [l b n t d]."""
    return jnp.swapaxes(x[group.start : group.stop], 2, 3)


def _write_tail(group: LayerCache, new: Tokens, own, seen, count):
    """own: `stat` of the new tokens [l b n t], or None."""
    k, v = (_of_group(group, x) for x in (new.k, new.v))
    tail, held = group.tail, group.tail.stat
    if held is not None:
        held = write_ring(held[..., None], own[..., None], seen, count)[..., 0]
    return tail.replace(
        k=write_ring(tail.k, k, seen, count), v=write_ring(tail.v, v, seen, count), stat=held
    )


def absorb_long(
    cache: Cache, new: Tokens, count: Int[Array, "b"] | None = None, *, tables: Any = None
) -> Cache:
    """Remembers the first count[b] new tokens, however many, and settles what is older than the
    window into the bodies. A row whose tail should keep all and has no room is left as it was and
    flagged OVERFLOW."""
    return sharding.local(_settle, *_ready(cache, new, count), tables, agree=_trims(cache))


def compress(cache: Cache, *, tables: Any = None) -> Cache:
    """Moves whole groups that are older than the window from the tail to the bodies.

    To be called at least every `recipe.stride` appended tokens, else the tail overflows. Tokens at
    or past `seen` are never moved. A cache whose tails keep all is returned as it is.
    """
    if not any(map(c.takes_more, cache.groups)):
        return cache
    count = jnp.zeros_like(cache.seen)
    return sharding.local(_settle, cache, None, count, tables, agree=_trims(cache))


def _trims(cache) -> bool:
    """Whether a head can lack room for what its budget would keep: flags then depend on heads."""
    choice = cache.recipe.choice
    return choice is not None and hasattr(budgets.build(choice.budget), "over")


def _settle(cache: Cache, new: Tokens | None, count, tables):
    size, window = group_of(cache), cache.recipe.window
    t = new.k.shape[2] if new is not None else 0
    flags = cache.flags
    if new is not None:
        fixed = [g for g in cache.groups if _bounded(cache, g) and not c.takes_more(g)]
        count, flags = _admit(cache, new, count, fixed)
    total = cache.seen + count
    moved = jnp.maximum((total - cache.edge - window) // size, 0) * size
    groups = []
    for i, group in enumerate(cache.groups):
        group, own = stat.add(group, new, i, count, cache.recipe)
        tail, bodies = group.tail, group.bodies
        if c.takes_more(group):
            most = (t + tail.capacity - window) // size * size
            *arriving, held = _oldest(cache, group, new, own, most)
            table = jax.tree.map(lambda x, g=group: x[g.start : g.stop], tables)
            arriving = _masked(*arriving, cache.edge, moved)
            bodies, lost = _chain(bodies, arriving, held, cache, total, table)
            flags = flags | lost
        if new is not None:
            tail = _write_tail(group, new, own, cache.seen, count)
        groups.append(group.replace(tail=tail, bodies=bodies))
    if any(map(c.takes_more, cache.groups)):
        cache = _moved(cache, moved)
    return _advance(cache, count).replace(groups=tuple(groups), flags=flags)


def _moved(cache, moved):
    """The clock after tokens left the tail: ranks fall by what was dropped (positions="read")."""
    edge = cache.edge + moved
    clock = cache.clock
    if cache.recipe.store.positions == "read":
        held = jnp.minimum(edge, cache.budget)
        clock = clock - (moved - (held - jnp.minimum(cache.edge, cache.budget)))
    return cache.replace(edge=edge, clock=clock)


def _oldest(cache, group, new, own, most):
    """Keys and values [l b n most d] and stat [l b n most] or None of arrivals edge + j, from the
    tail or the new tokens."""
    at = cache.edge[:, None] + jnp.arange(most, dtype=jnp.int32)  # [b most]

    def read(ring, fresh):
        x = read_ring(ring, cache.edge, most)
        if fresh is not None:
            j = jnp.clip(at - cache.seen[:, None], 0, fresh.shape[3] - 1)[None, :, None, :, None]
            late = (at >= cache.seen[:, None])[None, :, None, :, None]
            x = jnp.where(late, jnp.take_along_axis(fresh, j, axis=3).astype(x.dtype), x)
        return x

    k, v = (None, None) if new is None else (_of_group(group, x) for x in (new.k, new.v))
    held, wide = group.tail.stat, lambda x: None if x is None else x[..., None]
    if held is not None:
        held = read(wide(held), wide(own))[..., 0]
    return read(group.tail.k, k), read(group.tail.v, v), held


def _masked(k, v, start, count):
    """The arriving tokens k, v [l b n a d] with their arrival indices start + j, j < count."""
    j = jnp.arange(k.shape[3], dtype=jnp.int32)
    arrival = jnp.where(j < count[:, None], start[:, None] + j, -1)
    return k, v, jnp.broadcast_to(arrival[None, :, None], k.shape[:4])


def _chain(bodies, arriving, held, cache, length, tables):
    """What leaves one body arrives at the next; what leaves the last is forgotten, and flagged
    where nothing should have been, or where a budget would have kept it."""
    out, flags = [], 0
    for body in bodies:
        body, arriving, over = absorb(
            body, arriving, cache.budget, length, cache.recipe, tables, held
        )
        flags |= 0 if over is None else jnp.where(over, c.TRIMMED, 0)
        out.append(body)
    keeps_all = all(body.closed or getattr(body, "pos", None) is None for body in bodies)
    keeps_all &= not any(isinstance(body, State) for body in bodies)
    lost = (arriving[2] >= 0).any(axis=(0, 2, 3))
    return tuple(out), jnp.where(lost, c.OVERFLOW, 0) if keeps_all else flags


def truncate(cache: Cache, length: Int[Array, "b"] | int) -> Cache:
    """Forgets every token of arrival >= length[b].

    Exact while those tokens are still in the tail: down to `edge`, and in sliding-window layers as
    far back as their ring reaches. Below that a row is left as it was and flagged UNDERFLOW, unless
    every body keeps its tokens in order (no scorer, group 1): those cut anywhere. Host functions
    raise. A length above `seen` changes nothing.
    """
    length = jnp.minimum(
        jnp.broadcast_to(jnp.asarray(length, jnp.int32), cache.seen.shape), cache.seen
    )
    ok = length >= 0
    for group in cache.groups:
        if group.window is not None:
            lost = jnp.maximum(cache.high - group.tail.capacity, 0)
            ok &= (lost == 0) | (length - (group.window - 1) >= lost)
        elif not group.keeps_all:
            ok &= (length >= cache.edge) | _cuts(cache, group)
    length = jnp.where(ok, length, cache.seen)
    flags = cache.flags | jnp.where(ok, 0, c.UNDERFLOW)
    cache = cache.replace(clock=cache.clock - (cache.seen - length), seen=length, flags=flags)
    return cache.replace(edge=jnp.minimum(cache.edge, length))


def _cuts(cache, group):
    """Whether the bodies of a group can be cut anywhere: all tokens kept, in order, group 1."""
    whole = cache.recipe.choice is None and cache.recipe.when == "during"
    return whole and group_of(cache) == 1 and all(b.pos is None for b in group.bodies)


def split_floats(cache: Cache) -> tuple[list[Any], Callable[[list[Any]], Cache]]:
    """The floating leaves of a cache, and what joins them back: `(floats, join)`.

    floats is a list of arrays to differentiate or train, raw codes, scales, tails, biases;
    `join(floats)` is the cache with them in place. Others (positions, packed codes and scales) stay
    inside `join`, so `jax.grad(lambda floats: loss(join(floats)))(floats)` never meets them.
    """
    leaves, tree = jax.tree.flatten(cache)
    trained = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def join(floats) -> Cache:
        new = dict(zip(trained, floats, strict=True))
        return jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in trained], join
