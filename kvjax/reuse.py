"""Caches as texts: join several into one context, replace a span in the middle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.api import Model, _mesh, _placed
from kvjax.cache import init, ops, positions
from kvjax.cache.cache import Cache, LayerCache, Tail, Tokens
from kvjax.config import CacheRecipe, ModelConfig, Store
from kvjax.errors import InputError, unknown
from kvjax.inputs import a_cache, array, checked, fits, number, rows
from kvjax.model import look


def join(
    model: Model,
    caches: list[Cache],
    *,
    positions: str = "follow",
    temperature: float = 1.0,
    scale: float = 1.0,
) -> Cache:
    """Several exact caches as one context, in this order; room for as many tokens as they had.

    positions: "follow" turns the keys of each piece to come after the one before; "reuse" leaves
    them where they were encoded, and the next token follows the longest. temperature divides the
    logits of the joined pieces and scale multiplies their log-sum-exp (APE, arXiv:2502.05431,
    equations 6 and 7). The pieces do not see each other, and are left as they were.
    """
    if positions not in ("follow", "reuse"):
        raise unknown("value of positions", positions, ("follow", "reuse"))
    if not isinstance(caches, (list, tuple)) or not caches:
        raise InputError("join needs a list of at least one cache")
    for i, cache in enumerate(caches):
        _exact(cache, f"join: cache {i}")
        if cache.batch != caches[0].batch:
            raise InputError(f"join: cache {i} has {cache.batch} rows, the first {caches[0].batch}")
    temperature = number("temperature", temperature, 1e-9)
    scale = number("scale", scale, 1e-9)
    clocks = np.stack([np.asarray(cache.clock) for cache in caches])
    last = clocks.sum(axis=0) if positions == "follow" else clocks.max(axis=0)
    room = sum(cache.max_length for cache in caches)
    fits(model.config, int(last.max()), room, "make the pieces with a larger one")
    plain = positions == "follow" and temperature == scale == 1.0
    with _mesh(model):
        whole = _placed(model, _follow(tuple(caches), model.config, turn=positions == "follow"))
        if not plain:
            whole = _placed(model, _as_body(whole, model.config, temperature, scale))
    return checked(whole)


def _exact(cache, who):
    if not all(group.keeps_all for group in a_cache(cache).groups):
        raise InputError(
            f"{who} is compressed ({cache.recipe.name!r}): its keys cannot be moved exactly; use "
            "exact caches and condense the result"
        )


@functools.partial(jax.jit, static_argnames=("config", "turn"))
def _follow(caches, config: ModelConfig, turn: bool):
    """An exact cache of all pieces' tokens by arrival; keys turned to follow, or left as is."""
    first = caches[0]
    room = sum(cache.max_length for cache in caches)
    whole = init.init_cache(config, first.recipe, first.batch, room)
    longest = jnp.zeros_like(first.seen)
    high = jnp.zeros_like(first.seen)
    for cache in caches:
        by = whole.seen if turn else jnp.zeros_like(whole.seen)
        for old, new in zip(cache.groups, whole.groups, strict=True):
            if old.window is not None:  # what a piece has forgotten stays forgotten
                lost = jnp.maximum(cache.high - old.tail.capacity, 0)
                reach = whole.seen + lost + new.tail.capacity
                high = jnp.maximum(high, jnp.where(lost > 0, reach, 0))
        whole = ops.absorb_long(whole, _tokens(cache, config, by), cache.seen)
        longest = jnp.maximum(longest, cache.clock)
    whole = whole.replace(high=jnp.maximum(whole.high, high))
    return whole if turn else whole.replace(clock=longest)


def _tokens(cache: Cache, config: ModelConfig, by) -> Tokens:
    """The tokens of an exact cache in order of arrival, keys turned by[b] positions further.

    What a sliding window has forgotten is not there: slots that no later query sees hold others.
    """
    at = jnp.arange(cache.max_length, dtype=jnp.int32)
    parts = []
    for group in cache.groups:
        rope = config.kinds[config.pattern[group.start]].rope
        k, v = (jnp.take(x, at % group.tail.capacity, axis=3) for x in (group.tail.k, group.tail.v))
        k = positions.move(k, by[None, :, None, None], rope)
        parts.append((jnp.swapaxes(k, 2, 3), jnp.swapaxes(v, 2, 3)))
    k, v = (jnp.concatenate(x) for x in zip(*parts, strict=True))
    return Tokens(k, v)


@functools.partial(jax.jit, static_argnames=("config", "temperature", "scale"))
def _as_body(cache: Cache, config: ModelConfig, temperature: float, scale: float):
    """The same tokens in a closed body, with room in the tail for as many again."""
    recipe = CacheRecipe("joined", "after", stride=cache.recipe.stride, store=Store())
    assert recipe.store is not None
    groups = []
    for group in cache.groups:
        if group.window is not None:
            raise InputError(
                "join with reuse, temperature or scale needs layers that see everything"
            )
        depth, capacity = group.stop - group.start, group.tail.capacity
        pages = -(-capacity // recipe.store.page)
        body = init.empty_body(config, recipe, depth, cache.batch, pages, capacity, closed=True)
        pad = ((0, 0),) * 3 + ((0, body.capacity - capacity), (0, 0))
        shape = (depth, cache.batch, config.kv_heads, -1, body.page, config.head_dim)
        codes = tuple(jnp.pad(x, pad).reshape(shape) for x in (group.tail.k, group.tail.v))
        body = body.replace(codes=codes, temperature=temperature, exponent=scale)
        tail = Tail(jnp.zeros_like(group.tail.k), jnp.zeros_like(group.tail.v))
        groups.append(LayerCache(tail, (body,), group.start, group.stop))
    return cache.replace(groups=tuple(groups), edge=cache.seen, recipe=recipe)


def edit(model: Model, cache: Cache, span: tuple[int, int], tokens: Any) -> Cache:
    """The exact cache with tokens span[0] .. span[1] of every row replaced by `tokens` [b n].

    Only the new tokens are computed, seeing what comes before them; what follows keeps its values,
    its keys are turned by the change of length in one pass. `tokens` may be empty (deletion) and so
    may the span (insertion). The cache is left as it was.
    Source: He et al. 2024, arXiv:2407.03157 (PIE), section 3.
    """
    _exact(cache, "edit: the cache")
    if any(g.window is not None and g.tail.capacity < cache.max_length for g in cache.groups):
        raise InputError("edit needs every token, and sliding-window layers have forgotten some")
    start, stop = (int(x) for x in array("span", span).reshape(2))
    shortest = int(jnp.min(cache.seen))
    if not 0 <= start <= stop <= shortest:
        raise InputError(
            f"span {start}..{stop} does not lie within the {shortest} tokens of the cache"
        )
    tokens = array("tokens", tokens)
    if tokens.size:
        tokens, _ = rows(model.config, tokens)
    tokens = tokens.reshape(cache.batch, -1) if not tokens.size else tokens
    if len(tokens) != cache.batch:
        raise InputError(f"the cache holds {cache.batch} rows and tokens have {len(tokens)}")
    change = tokens.shape[1] - (stop - start)
    if shortest + change < 1:
        raise InputError("edit would leave a row without tokens")
    total = int(jnp.max(cache.seen)) + change
    fits(model.config, total, cache.max_length, "prefill with a larger one")
    with _mesh(model):
        made = _edit(
            model.params,
            cache,
            tokens.astype(np.int32),
            jnp.int32(start),
            jnp.int32(stop),
            model.config,
        )
    return checked(made)


@functools.partial(jax.jit, static_argnames="config")
def _edit(params, cache, tokens, start, stop, config):
    n = tokens.shape[1]
    change = n - (stop - start)
    new = None
    if n:
        before = jnp.full_like(cache.seen, start)
        view = cache.replace(seen=before, clock=before)
        _, new = look(params, config, view, tokens, logits="none")
    groups = []
    for group in cache.groups:
        rope = config.kinds[config.pattern[group.start]].rope
        slot = jnp.arange(group.tail.capacity, dtype=jnp.int32)
        old = jnp.where(slot < start + n, slot, slot - change)  # where each slot's token was
        moved = jnp.where(slot < start + n, 0, change)
        tail = {}
        for name in ("k", "v"):
            x = jnp.take(getattr(group.tail, name), jnp.clip(old, 0, slot[-1]), axis=3)
            x = positions.move(x, moved, rope) if name == "k" else x
            if new is not None:
                fresh = jnp.swapaxes(getattr(new, name)[group.start : group.stop], 2, 3)
                fresh = jnp.take(fresh, jnp.clip(slot - start, 0, n - 1), axis=3).astype(x.dtype)
                here = (slot >= start) & (slot < start + n)
                x = jnp.where(here[:, None], fresh, x)
            tail[name] = x
        groups.append(group.replace(tail=Tail(**tail)))
    seen = cache.seen + change
    return cache.replace(groups=tuple(groups), seen=seen, clock=cache.clock + change,
                         high=jnp.maximum(cache.high, seen))  # fmt: skip
