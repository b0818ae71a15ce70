"""What leaves the tail arrives in the bodies: appended in order, or competing for room."""

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import budgets, codecs, scorers
from kvjax.cache import state
from kvjax.cache.select import ids
from kvjax.cache.slots import Slots, pack_pos, unpack_pos
from kvjax.cache.state import State
from kvjax.cache.write import pinned, write_pages
from kvjax.config import CacheRecipe
from kvjax.scorers import Seen


def absorb(body: Slots | State, arriving, budget, length, recipe: CacheRecipe, tables=None):
    """Takes arriving tokens (k, v [l b n a d], arrival [l b n a]; -1 past the last).

    Without a scorer they are appended until the body is full; with one the best `budget[b]` of what
    is stored and what arrives stay, and new ones overwrite freed slots in place.
    Returns (body, leaving): the tokens that the body let go, in the same form.
    """
    if body.closed:
        return body, arriving
    if isinstance(body, State):
        return state.absorb(body, *arriving, recipe.fold, tables)
    if body.pos is None:
        return _append(body, *arriving, recipe, tables)
    return _compete(body, *arriving, budget, length, recipe, tables)


def _append(body, k, v, arrival, recipe, tables):
    mine = arrival[0, :, 0]  # heads and layers agree
    count = (mine >= 0).sum(axis=1)
    slot = jnp.where(count > 0, mine[:, 0], body.base[0]) - body.base[0]
    fits = jnp.clip(body.capacity - slot, 0, count)
    a = k.shape[3]
    encode = jax.vmap(lambda t, *x: codecs.pair(recipe.store, t).encode(*x))
    codes = encode(tables, k, v, arrival >= 0)

    def write(leaf, new):
        per = a // new.shape[3]  # tokens to an entry: 1, or the group that shares it
        return write_pages(leaf, new, slot // per, fits // per)

    left = jnp.where(jnp.arange(a) >= fits[:, None, None], arrival, -1)
    return body.replace(codes=jax.tree.map(write, body.codes, codes)), (k, v, left)


def _compete(body, k, v, arrival, budget, length, recipe, tables):
    """Layer by layer, so that only one layer's codes are ever decoded."""
    gone = (jnp.zeros_like(k), jnp.zeros_like(v), jnp.zeros(k.shape[:4], jnp.int32))

    def layer(i, carry):
        codes, pos, gone = carry
        mine = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), (codes, pos))
        new = (jax.lax.dynamic_index_in_dim(x, i, 0, False) for x in (k, v, arrival))
        table = jax.tree.map(lambda x: x[i], tables)
        new, leaving = _compete_layer(*mine, *new, budget, length, recipe, table)
        put = lambda x, y: pinned(jax.lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), i, 0))  # noqa: E731
        return (*jax.tree.map(put, (codes, pos), new), jax.tree.map(put, gone, leaving))

    codes, pos, gone = jax.lax.fori_loop(0, k.shape[0], layer, (body.codes, body.pos, gone))
    return body.replace(codes=codes, pos=pos), gone


def _compete_layer(codes, pos, k, v, arrival, budget, length, recipe, tables):
    """One layer: codes [b n p s ...], pos [b n p s], k and v [b n a d], arrival [b n a]."""
    pair = codecs.pair(recipe.store, tables)
    a, slots = k.shape[2], pos.shape[2] * pos.shape[3]
    old_k, old_v = (rearrange(x, "b n p s d -> b n (p s) d") for x in pair.decode(codes, k.dtype))
    flat = unpack_pos(rearrange(pos, "b n p s -> b n (p s)"))
    every = [jnp.concatenate(x, axis=2) for x in ((old_k, k), (old_v, v), (flat, arrival))]
    keep = choose(Seen(*every, length), budget, recipe, tables)
    free = ~keep[..., :slots]
    enter = keep[..., slots:]
    entrant, real = ids(enter, a)  # the j-th newcomer that stays, ascending
    rank = jnp.cumsum(free, axis=-1) - 1
    here = free & (rank < enter.sum(-1, keepdims=True))  # the slots that newcomers take, ascending
    token = jnp.take_along_axis(entrant, jnp.clip(rank, 0, a - 1), axis=-1)  # [b n slots]
    fresh = pair.encode(k, v)

    def write(leaf, new):
        take = jnp.take_along_axis(new, _as(token, new), axis=2)
        shape = (*leaf.shape[:2], slots, *leaf.shape[4:])
        return jnp.where(_as(here, new), take, leaf.reshape(shape)).reshape(leaf.shape)

    where = jnp.where(here, jnp.take_along_axis(arrival, token, axis=2), jnp.where(free, -1, flat))
    out = jax.tree.map(write, codes, fresh), pack_pos(where, pos.dtype).reshape(pos.shape)
    lost, real = ids(~keep & (every[2] >= 0), a)
    gone = tuple(jnp.take_along_axis(x, _as(lost, x), axis=2) for x in every)
    return out, (gone[0], gone[1], jnp.where(real, gone[2], -1))


def _as(index, like):
    """index [b n s] with trailing axes, to broadcast against `like` [b n s ...]."""
    return index.reshape(index.shape + (1,) * (like.ndim - 3))


def choose(seen: Seen, budget, recipe: CacheRecipe, tables=None):
    """Mask [b n s] of the entries that stay, `budget[b]` per head (or that many on average)."""
    choice = recipe.choice
    scores = scorers.build(choice.scorer, (tables or {}).get("scorer"))(seen)
    valid, sinks = seen.pos >= 0, seen.pos < choice.sinks
    return budgets.build(choice.budget)(scores, valid, sinks & valid, seen.pos, budget)
