"""What leaves the tail arrives in the bodies: appended in order, or competing for room."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import budgets, codecs, scorers
from kvjax.cache import state
from kvjax.cache.select import ids
from kvjax.cache.slots import BLOCK, Slots, pack_pos, unpack_pos
from kvjax.cache.state import State
from kvjax.cache.write import pinned, write_pages
from kvjax.config import CacheRecipe
from kvjax.scorers import Seen
from kvjax.shapes import Array, Bool, Int


def absorb(
    body: Slots | State,
    arriving: tuple[Any, Any, Any],
    budget,
    length,
    recipe: CacheRecipe,
    tables=None,
    stat=None,
):
    """Takes arriving tokens (k, v [l b n a d], arrival [l b n a]; -1 past the last).

    stat [l b n a]: what is remembered of them, if the body remembers; it is not passed on.

    Without a scorer they are appended until the body is full; with one the best `budget[b]` of what
    is stored and what arrives stay, and new ones overwrite freed slots in place.
    Returns (body, leaving, trimmed): the tokens that the body let go, in the same form; and the
    rows [b] of which the budget would have kept more, or None if it does not count by itself.
    """
    if body.closed:
        return body, arriving, None
    if isinstance(body, State):
        assert recipe.fold is not None
        return *state.absorb(body, *arriving, recipe.fold, tables), None
    if body.pos is None:
        return *_append(body, *arriving, recipe, tables), None
    return _compete(body, *arriving, stat, budget, length, recipe, tables)


def _append(body, k, v, arrival, recipe, tables):
    mine = arrival[0, :, 0]  # heads and layers agree
    count = (mine >= 0).sum(axis=1)
    slot = jnp.where(count > 0, mine[:, 0], body.base[0]) - body.base[0]
    fits = jnp.clip(body.capacity - slot, 0, count)
    encode = jax.vmap(lambda t, *x: codecs.pair(recipe.store, t).encode(*x))
    new, pair = encode(tables, k, v, arrival >= 0), codecs.pair(recipe.store)
    a = k.shape[3]
    codes = write_pages(body.codes, new, slot, fits, pair, a)
    left = jnp.where(jnp.arange(a) >= fits[:, None, None], arrival, -1)
    return body.replace(codes=codes), (k, v, left)


def _compete(body, k, v, arrival, stat, budget, length, recipe, tables):
    """Layer by layer, so that only one layer's codes are ever decoded."""
    gone = (jnp.zeros_like(k), jnp.zeros_like(v), jnp.zeros(k.shape[:4], jnp.int32))
    assert recipe.choice is not None
    counts = hasattr(budgets.build(recipe.choice.budget), "over")

    def layer(i, carry):
        codes, pos, held, gone, over = carry
        here = lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False)  # noqa: E731
        pair = codecs.pair(recipe.store, table := jax.tree.map(lambda x: jnp.asarray(x)[i], tables))
        new = jax.tree.map(here, (k, v, arrival, stat))
        old = (*pair.read(jax.tree.map(here, codes), k.dtype), *jax.tree.map(here, (pos, held)))
        plan, where, kept = _plan(old, new, budget, length, recipe, table)
        codes, leaving = _exchange(codes, i, plan, new[0], new[1], pair)
        put = lambda x, y: pinned(jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), i, 0))  # noqa: E731
        pos, held = jax.tree.map(put, (pos, held), (where, kept))
        over = None if over is None else over | plan.over
        return codes, pos, held, jax.tree.map(put, gone, (*leaving, plan.left)), over

    carry = (
        body.codes,
        body.pos,
        body.stat,
        gone,
        jnp.zeros_like(budget, bool) if counts else None,
    )
    codes, pos, held, gone, over = jax.lax.fori_loop(0, k.shape[0], layer, carry)
    return body.replace(codes=codes, pos=pos, stat=held), gone, over


class Plan(NamedTuple):
    """Who goes where in one layer; s slots, a newcomers."""

    taken: Bool[Array, "b n s"]  # slots that newcomers take
    token: Int[Array, "b n s"]  # which newcomer
    lost: Int[Array, "b n a"]  # the entries that leave: slots, then s + newcomer
    left: Int[Array, "b n a"]  # their arrivals; -1 past the last
    over: Bool[Array, "b"] | None  # rows of which the budget would have kept more, if it tells


def _plan(old, new, budget, length, recipe, tables):
    """Who goes where, and then pos and stat [b n p s] of the slots.

    old: keys, values [b n p s d], pos and stat [b n p s]; new: the same, and arrival, [b n a ..].
    stat may be None in both.
    """
    pos, arrival = old[2], new[2]
    a, slots = arrival.shape[2], pos.shape[2] * pos.shape[3]
    old = jax.tree.map(lambda x: rearrange(x, "b n p s ... -> b n (p s) ..."), old)
    flat, held = unpack_pos(old[2]), old[3]
    old = (*old[:2], flat, held)
    every = jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), old, new)
    seen = Seen(every[0], every[1], every[2], length, stat=every[3])
    keep = choose(seen, budget, recipe, tables)
    free, enter = ~keep[..., :slots], keep[..., slots:]
    entrant, _ = ids(enter, a)  # the j-th newcomer that stays, ascending
    rank = jnp.cumsum(free, axis=-1) - 1
    taken = free & (rank < enter.sum(-1, keepdims=True))  # ascending
    token = jnp.take_along_axis(entrant, jnp.clip(rank, 0, a - 1), axis=-1)
    where = jnp.where(taken, jnp.take_along_axis(arrival, token, 2), jnp.where(free, -1, flat))
    lost, real = ids(~keep & (every[2] >= 0), a)
    left = jnp.where(real, jnp.take_along_axis(every[2], lost, axis=2), -1)
    take = lambda x, y: jnp.where(taken, jnp.take_along_axis(y, token, 2), x)  # noqa: E731
    held = None if held is None else take(held, new[3]).reshape(pos.shape)
    plan = Plan(taken, token, lost, left, over(seen, budget, recipe, tables))
    return plan, pack_pos(where, pos.dtype).reshape(pos.shape), held


def _exchange(codes, i, plan, k, v, pair):
    """Writes the newcomers of layer i in place, pages at a time: (codes, (k, v) that leave)."""
    some = jax.tree.leaves(codes)[0]
    pages, page = some.shape[3], plan.taken.shape[2] // some.shape[3]
    per = min(max(BLOCK // page, 1), pages)
    fresh = pair.encode(k, v)
    gone = tuple(
        jnp.take_along_axis(x, _as(jnp.maximum(plan.lost - pages * page, 0), x), 2) for x in (k, v)
    )

    def block(j, carry):
        codes, gone = carry
        first = jnp.minimum(j * per, pages - per)  # the last block may go over some pages again
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first * page, per * page, 2)  # noqa: E731
        taken, token = cut(plan.taken), cut(plan.token)
        at = lambda x: (i, 0, 0, first) + (0,) * (x.ndim - 4)  # noqa: E731
        old = jax.tree.map(
            lambda x: jax.lax.dynamic_slice(x, at(x), (1, *x.shape[1:3], per, *x.shape[4:]))[0],
            codes,
        )
        old = pair.unpack(old)

        def blend(old, new):
            flat = old.reshape(*old.shape[:2], per * page, *old.shape[4:])
            take = jnp.take_along_axis(new, _as(token, new), axis=2)
            return jnp.where(_as(taken, new), take, flat).reshape(old.shape)

        def put(leaf, pages):
            return pinned(jax.lax.dynamic_update_slice(leaf, pages[None], at(leaf)))

        stop = jnp.minimum((j + 1) * per, pages) * page
        mine = (plan.lost >= j * per * page) & (plan.lost < stop)
        slot = jnp.clip(plan.lost - first * page, 0, per * page - 1)
        out = []
        for x, so_far in zip(pair.decode(old, k.dtype), gone, strict=True):
            x = rearrange(x, "b n p s d -> b n (p s) d")
            x = jnp.take_along_axis(x, _as(slot, x), axis=2)
            out.append(jnp.where(_as(mine, x), x, so_far))
        mixed = pair.pack(jax.tree.map(blend, old, fresh))
        return jax.tree.map(put, codes, mixed), tuple(out)

    return jax.lax.fori_loop(0, -(-pages // per), block, (codes, gone))


def _as(index, like):
    """index [b n s] with trailing axes, to broadcast against `like` [b n s ...]."""
    return index.reshape(index.shape + (1,) * (like.ndim - 3))


def choose(seen: Seen, budget, recipe: CacheRecipe, tables=None):
    """Mask [b n s] of the entries that stay, `budget[b]` per head (or that many on average)."""
    rule, *asked = _asked(seen, recipe, tables)
    return rule(*asked, budget)


def over(seen: Seen, budget, recipe: CacheRecipe, tables=None):
    """[b]: rows of which the budget would have kept more, or None if it does not tell."""
    rule, *asked = _asked(seen, recipe, tables)
    return rule.over(*asked, budget) if hasattr(rule, "over") else None


def _asked(seen, recipe, tables):
    """The budget, and what it is asked about: scores, valid, protected, arrivals, [b n s]."""
    choice = recipe.choice
    assert choice is not None
    scores = scorers.build(choice.scorer, (tables or {}).get("scorer"))(seen)
    valid, sinks = seen.pos >= 0, seen.pos < choice.sinks
    return budgets.build(choice.budget), scores, valid, sinks & valid, seen.pos
