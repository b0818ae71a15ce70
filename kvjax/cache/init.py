"""Making a cache: capacities from the recipe, and an empty tree of that size."""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kvjax import budgets, codecs, scorers
from kvjax.cache import state
from kvjax.cache.cache import Cache, LayerCache, Tail
from kvjax.cache.recipes import resolve
from kvjax.cache.slots import Slots, pos_dtype
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.errors import InputError


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def bucket(length: int) -> int:
    """The length rounded up to a sixteenth of its power of two: few shapes for many lengths."""
    return round_up(length, max(1 << max((length - 1).bit_length() - 4, 0), 1))


def kept(recipe: CacheRecipe, length: int) -> int:
    """Entries per kv head that the recipe keeps of `length` tokens, window included."""
    if recipe.choice is not None and recipe.choice.slots is not None:
        return min(recipe.choice.slots, length)
    exact = recipe.choice is None or recipe.choice.count == "exact"
    return round(recipe.keep * length) if exact else int(recipe.keep * length)


def check(config: ModelConfig, recipe: CacheRecipe, max_length: int) -> None:
    """Refuses, with one sentence, what cannot work."""
    if max_length < 1:
        raise InputError(f"max_length must be at least 1, got {max_length}")
    if recipe.store is None:
        return
    pair = codecs.pair(recipe.store)
    if recipe.store.page % pair.group:
        raise InputError(
            f"pages of {recipe.store.page} slots do not hold whole groups of {pair.group}; "
            f"use page={round_up(recipe.store.page, pair.group)}"
        )
    if recipe.when == "after" and recipe.store.positions == "read":
        raise InputError(
            f"{recipe.name}: positions='read' needs keys stored before RoPE: use when='during'"
        )
    if recipe.when == "during" and recipe.store.positions == "rerot":
        raise InputError(
            f"{recipe.name}: positions='rerot' renumbers once, in condense: use when='after', or "
            "positions='read'"
        )
    if recipe.fold is not None and (recipe.choice is None or recipe.when == "after"):
        raise InputError(
            f"{recipe.name}: fold takes what eviction drops as tokens arrive: it needs a scorer "
            "and when='during'"
        )
    if recipe.fold is not None and recipe.store.positions == "read":
        raise InputError(f"{recipe.name}: a state holds keys after RoPE: use positions='keep'")
    if recipe.choice is None:
        return
    budget = budgets.build(recipe.choice.budget)
    name = recipe.name
    if recipe.when == "during":
        if pair.group > 1:
            raise InputError(
                f"{name}: the codec shares scales over {pair.group} tokens; a scorer that streams "
                "needs a codec with group 1"
            )
        if scorers.observes(recipe.choice.scorer):
            raise InputError(f"{name} scores by attention evidence, once: use when='after'")
        if budget.pooled:
            raise InputError(f"{name}: pools of pages are made by condensing: use when='after'")
    body = kept(recipe, max_length) - recipe.window
    if recipe.when == "during" and body < max(recipe.choice.sinks, 1):
        raise InputError(
            f"{name}: keep leaves {kept(recipe, max_length)} of {max_length} entries, which its "
            f"window of {recipe.window} and {recipe.choice.sinks} sinks exceed; raise keep or "
            "shrink window"
        )


def tail_capacity(recipe: CacheRecipe) -> int:
    """Slots of a tail before bodies: the window, a group not whole yet, a stride, drafts.

    A large one is whole tiles of a TPU, where XLA swaps the axes of a cache of another size.
    """
    group = codecs.pair(recipe.store).group if recipe.store else 1
    room = recipe.window + group - 1 + recipe.stride + recipe.lookahead
    return round_up(room, math.lcm(group, 16) if room > 128 else group)


def init_cache(
    config: ModelConfig,
    recipe: CacheRecipe,
    batch: int,
    max_length: int,
    *,
    length: int | None = None,
) -> Cache:
    """An empty cache for `batch` texts of up to `max_length` tokens each.

    A recipe that condenses after prefill gets the shapes it has once condensed from prompts of up
    to `length` tokens (default max_length): to be filled with `insert`, or for compiling.
    """
    recipe = resolve(recipe, max_length)
    check(config, recipe, max_length)
    if batch < 1:
        raise InputError(f"batch must be at least 1, got {batch}")
    after = recipe.when == "after" and recipe.store is not None
    length = min(max_length, length or max_length)
    sizes = Sizes(bucket(length), bucket(max(max_length - length, 1)))
    groups = tuple(
        layers(config, recipe, batch, max_length, sizes if after else None, *run)
        for run in config.runs()
    )
    zero = lambda: jnp.zeros((batch,), jnp.int32)  # noqa: E731
    budget = jnp.full(
        (batch,), max(kept(recipe, length if after else max_length) - recipe.window, 0), jnp.int32
    )
    return Cache(groups, zero(), zero(), zero(), zero(), budget, zero(), recipe, max_length)


def abstract_cache(
    config: ModelConfig,
    recipe: CacheRecipe,
    batch: int,
    max_length: int,
    *,
    length: int | None = None,
) -> Cache:
    """The tree of ShapeDtypeStruct that `init_cache` would fill: for compiling ahead of time."""
    return jax.eval_shape(lambda: init_cache(config, recipe, batch, max_length, length=length))


@dataclass(frozen=True)
class Sizes:
    """What a condensed cache is built for: the longest prompt, and the tokens that may follow."""

    prompt: int
    later: int


def layers(
    config, recipe, batch, max_length, condensed: Sizes | None, start, stop, kind
) -> LayerCache:
    """An empty memory for layers start to stop, which are of one kind."""
    n, d, dtype = config.kv_heads, config.head_dim, jnp.dtype(config.dtype)

    def tail(capacity):
        shape = (stop - start, batch, n, capacity, d)
        return Tail(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    if kind.window is not None:  # an exact cache may be read again from `window` tokens back
        again = recipe.window if recipe.store is None or recipe.when == "after" else 0
        capacity = round_up(kind.window + max(recipe.stride, again) + recipe.lookahead, 8)
        return LayerCache(tail(min(capacity, max_length)), (), start, stop, kind.window)
    if recipe.store is None:
        return LayerCache(tail(max_length), (), start, stop)
    depth = stop - start
    if condensed is None:
        keeps = max_length if recipe.choice is None else kept(recipe, max_length) - recipe.window
        capacity = min(round_up(keeps, recipe.store.page), round_up(max_length, recipe.store.page))
        bodies = (empty_body(config, recipe, depth, batch, capacity, max_length),)
        if recipe.fold is not None:
            n, d = config.kv_heads, config.head_dim
            bodies += (state.empty(recipe.fold, depth, batch, n, d, config.scale),)
    else:
        slots = max(kept(recipe, condensed.prompt) - recipe.window, 1)
        bodies = after_bodies(config, recipe, depth, batch, slots, condensed, max_length)
    return LayerCache(tail(after_tail(recipe, condensed)), bodies, start, stop)


def after_tail(recipe, condensed: Sizes | None) -> int:
    """The tail of a condensed cache: with raw codes it also keeps all later tokens."""
    capacity = tail_capacity(recipe)
    if condensed is None or recipe.choice is None or not codecs.pair(recipe.store).raw:
        return capacity
    return max(capacity, round_up(recipe.window + condensed.later + recipe.lookahead, 8))


def after_bodies(config, recipe, depth, batch, slots, condensed, max_length):
    """The condensed body, closed, and for coded recipes a second one for the tokens to come."""
    if recipe.choice is None:  # every token is kept in order: later ones follow in the same body
        room = round_up(max_length, recipe.store.page)
        return (empty_body(config, recipe, depth, batch, room, max_length),)
    pool = budgets.build(recipe.choice.budget).pooled
    body = empty_body(config, recipe, depth, batch, slots, max_length, pool=pool, closed=True)
    if codecs.pair(recipe.store).raw:
        return (body,)
    room = round_up(condensed.later + recipe.window, recipe.store.page)
    plain = dataclasses.replace(recipe, choice=None)
    return (body, empty_body(config, plain, depth, batch, room, max_length))


def empty_body(
    config, recipe, depth, batch, slots, max_length, *, pool=False, closed=False
) -> Slots:
    """A body of at least `slots` slots per kv head, in whole pages; one pool of that mean size."""
    page, n, d = recipe.store.page, config.kv_heads, config.head_dim
    rows, pages = (1, -(-slots * n // page) + n) if pool else (n, -(-slots // page))
    pair, dtype = codecs.pair(recipe.store), jnp.dtype(config.dtype)
    lead = (depth, batch, rows, pages)
    x = jnp.zeros((*lead, page, d), dtype)
    codes = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(pair.encode, x, x))
    pos = owner = None
    if recipe.choice is not None:
        kind = pos_dtype(max_length)
        pos = jnp.full((*lead, page), 65535 if kind == jnp.uint16 else -1, kind)
    if pool:
        owner = jnp.full(lead, -1, jnp.int8 if n < 128 else jnp.int32)
    base = jnp.zeros((depth, batch), jnp.int32)
    return Slots(codes, base, pos, owner, page=page, heads=n if pool else 1, closed=closed)
