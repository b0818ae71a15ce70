"""What changes a cache: append, absorb_long, compress, truncate, and rows of a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvjax import codecs, sharding
from kvjax.cache import cache as c
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
    return cache, new.replace(evidence=()), count


def _append(cache: Cache, new: Tokens, count, tables):
    count, flags = _admit(cache, new, count, [g for g in cache.groups if _bounded(cache, g)])
    groups = tuple(
        group.replace(tail=_write_tail(group, new, cache.seen, count)) for group in cache.groups
    )
    return _advance(cache, count).replace(groups=groups, flags=flags)


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


def _write_tail(group: LayerCache, new: Tokens, seen, count):
    k, v = (_of_group(group, x) for x in (new.k, new.v))
    tail = group.tail
    return tail.replace(
        k=write_ring(tail.k, k, seen, count),
        v=write_ring(tail.v, v, seen, count),
    )


def absorb_long(
    cache: Cache, new: Tokens, count: Int[Array, "b"] | None = None, *, tables: Any = None
) -> Cache:
    """Remembers the first count[b] new tokens, however many, and settles what is older than the
    window into the bodies. A row whose tail should keep all and has no room is left as it was and
    flagged OVERFLOW."""
    return sharding.local(_settle, *_ready(cache, new, count), tables)


def compress(cache: Cache, *, tables: Any = None) -> Cache:
    """Moves whole groups that are older than the window from the tail to the bodies.

    To be called at least every `recipe.stride` appended tokens, else the tail overflows. Tokens at
    or past `seen` are never moved. A cache whose tails keep all is returned as it is.
    """
    if not any(map(c.takes_more, cache.groups)):
        return cache
    return sharding.local(_settle, cache, None, jnp.zeros_like(cache.seen), tables)


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
    for group in cache.groups:
        tail, bodies = group.tail, group.bodies
        if c.takes_more(group):
            most = (t + tail.capacity - window) // size * size
            arriving = _oldest(cache, group, new, most)
            table = jax.tree.map(lambda x, g=group: x[g.start : g.stop], tables)
            bodies, lost = _chain(
                bodies, _masked(*arriving, cache.edge, moved), cache, total, table
            )
            flags = flags | lost
        if new is not None:
            tail = _write_tail(group, new, cache.seen, count)
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


def _oldest(cache, group, new, most):
    """Keys and values [l b n most d] of arrivals edge + j, from the tail or the new tokens."""
    at = cache.edge[:, None] + jnp.arange(most, dtype=jnp.int32)  # [b most]
    out = []
    for ring, name in ((group.tail.k, "k"), (group.tail.v, "v")):
        x = read_ring(ring, cache.edge, most)
        if new is not None:
            fresh = _of_group(group, getattr(new, name))
            j = jnp.clip(at - cache.seen[:, None], 0, fresh.shape[3] - 1)[None, :, None, :, None]
            late = (at >= cache.seen[:, None])[None, :, None, :, None]
            x = jnp.where(late, jnp.take_along_axis(fresh, j, axis=3).astype(x.dtype), x)
        out.append(x)
    return out


def _masked(k, v, start, count):
    """The arriving tokens k, v [l b n a d] with their arrival indices start + j, j < count."""
    j = jnp.arange(k.shape[3], dtype=jnp.int32)
    arrival = jnp.where(j < count[:, None], start[:, None] + j, -1)
    return k, v, jnp.broadcast_to(arrival[None, :, None], k.shape[:4])


def _chain(bodies, arriving, cache, length, tables):
    """What leaves one body arrives at the next; what leaves the last is forgotten, and flagged
    where nothing should have been."""
    out = []
    for body in bodies:
        body, arriving = absorb(body, arriving, cache.budget, length, cache.recipe, tables)
        out.append(body)
    keeps_all = all(body.closed or getattr(body, "pos", None) is None for body in bodies)
    keeps_all &= not any(isinstance(body, State) for body in bodies)
    lost = (arriving[2] >= 0).any(axis=(0, 2, 3))
    return tuple(out), jnp.where(lost, c.OVERFLOW, 0) if keeps_all else 0


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
        elif group.bodies:
            ok &= (length >= cache.edge) | _cuts(cache, group)
    length = jnp.where(ok, length, cache.seen)
    flags = cache.flags | jnp.where(ok, 0, c.UNDERFLOW)
    cache = cache.replace(clock=cache.clock - (cache.seen - length), seen=length, flags=flags)
    return cache.replace(edge=jnp.minimum(cache.edge, length))


def _cuts(cache, group):
    """Whether the bodies of a group can be cut anywhere: all tokens kept, in order, group 1."""
    whole = cache.recipe.choice is None and cache.recipe.when == "during"
    return whole and group_of(cache) == 1 and all(b.pos is None for b in group.bodies)


def _in_batch(cache, rows) -> None:
    """Refuses rows that are not there, where their numbers are known."""
    if not isinstance(rows, Tracer):
        rows = jnp.asarray(rows)
        if not jnp.issubdtype(rows.dtype, jnp.integer) or bool(
            ((rows < 0) | (rows >= cache.batch)).any()
        ):
            raise InputError(f"rows {rows.tolist()} are not among the {cache.batch} of the cache")


def select(cache: Cache, rows: Int[Array, "r"]) -> Cache:
    """The conversations `rows` of a batch, as a batch of their own."""
    rows = jnp.asarray(rows)
    _in_batch(cache, rows)
    take = lambda x: jnp.take(x, rows, axis=1 if x.ndim > 1 else 0)  # noqa: E731
    return jax.tree.map(take, cache)


def insert(cache: Cache, row: int | Int[Array, ""], other: Cache) -> Cache:
    """Puts the one conversation of `other` in a row of a batch; both of one recipe and size."""
    _in_batch(cache, row)
    if other.batch != 1:
        raise InputError(f"insert takes a cache of one row, got {other.batch}; use select first")
    if jax.tree.structure(cache) != jax.tree.structure(other):
        raise InputError(
            f"insert needs equal recipes and capacities: this cache is {cache.recipe.name!r} of "
            f"{cache.max_length}, the other {other.recipe.name!r} of {other.max_length}"
        )

    def put(x, y):
        axis = 1 if x.ndim > 1 else 0
        if x.shape[:axis] + x.shape[axis + 1 :] != y.shape[:axis] + y.shape[axis + 1 :]:
            raise InputError(f"insert needs equal leaves, got {x.shape} and {y.shape}")
        return jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), row, axis)

    return jax.tree.map(put, cache, other)


def reset(cache: Cache, row: int | Int[Array, ""]) -> Cache:
    """Forgets a row: it is ready for a new conversation, with its budget as before.

    Outside jit a copy: no buffer is shared with the cache given.
    """
    _in_batch(cache, row)
    here = jnp.arange(cache.batch) == row
    zero = lambda x: jnp.where(here, 0, x)  # noqa: E731
    groups = tuple(
        group.replace(bodies=tuple(_emptied(body, here) for body in group.bodies))
        for group in cache.groups
    )
    made = cache.replace(
        groups=groups, seen=zero(cache.seen), clock=zero(cache.clock), edge=zero(cache.edge),
        high=zero(cache.high), flags=zero(cache.flags),
    )  # fmt: skip
    return made if isinstance(cache.flags, Tracer) else jax.tree.map(jnp.copy, made)


def _emptied(body, here):
    if isinstance(body, State):
        zero = lambda x: jnp.where(here.reshape(1, -1, *(1,) * (x.ndim - 2)), 0.0, x)  # noqa: E731
        return body.replace(sums=zero(body.sums), mass=zero(body.mass))
    if body.pos is None:
        return body.replace(base=jnp.where(here, 0, body.base))
    empty = jnp.asarray(65535 if body.pos.dtype == jnp.uint16 else -1, body.pos.dtype)
    pos = jnp.where(here[:, None, None, None], empty, body.pos)
    owner = body.owner
    if owner is not None:
        owner = jnp.where(here[:, None, None], jnp.asarray(-1, owner.dtype), owner)
    return body.replace(pos=pos, owner=owner)


def split_floats(cache: Cache) -> tuple[list[Any], Callable[[list[Any]], Cache]]:
    """The floating leaves of a cache, and what joins them back: `(floats, join)`.

    floats is a list of arrays to differentiate or train, raw codes, scales, tails, biases;
    `join(floats)` is the cache with them in place. Integer leaves (positions, packed codes) stay
    inside `join`, so `jax.grad(lambda floats: loss(join(floats)))(floats)` never meets them.
    """
    leaves, tree = jax.tree.flatten(cache)
    trained = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def join(floats) -> Cache:
        new = dict(zip(trained, floats, strict=True))
        return jax.tree.unflatten(tree, [new.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in trained], join
