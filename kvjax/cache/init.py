"""Making a cache: capacities from the recipe, and an empty tree of that size."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kvjax import budgets, codecs, reducers, scorers
from kvjax.cache import pool, state
from kvjax.cache.cache import Cache, LayerCache, Tail
from kvjax.cache.recipes import a_recipe, resolve
from kvjax.cache.sizes import Sizes, full_layers, kept, round_up, sizes
from kvjax.cache.slots import Slots, pos_dtype
from kvjax.config import CacheRecipe, ModelConfig, Store
from kvjax.errors import InputError, whole
from kvjax.shapes import EMPTY


def check(config: ModelConfig, recipe: CacheRecipe, max_length: int) -> None:
    """Refuses, with one sentence, what cannot work."""
    if max_length < 1:
        raise InputError(f"max_length must be at least 1, got {max_length}")
    if recipe.store is None:
        return
    pair = codecs.pair(recipe.store)
    if recipe.store.page % pair.unit:
        raise InputError(
            f"pages of {recipe.store.page} slots do not hold whole groups and words of the codec, "
            f"which are of {pair.unit}; use page={round_up(recipe.store.page, pair.unit)}"
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
    if recipe.reducer is not None and (
        recipe.choice is None or recipe.when != "after" or recipe.store.positions != "keep"
    ):
        raise InputError(
            f"{recipe.name}: reducer makes tokens of what condense drops, where it was: it needs a "
            "scorer, when='after' and positions='keep'"
        )
    if recipe.choice is None:
        return
    if recipe.when == "during":
        _check_streaming(recipe, pair, max_length)


def _check_streaming(recipe: CacheRecipe, pair, max_length: int) -> None:
    """The same of choosing while tokens arrive."""
    assert recipe.choice is not None and recipe.store is not None
    budget, name = budgets.build(recipe.choice.budget), recipe.name
    if pair.group > 1:
        raise InputError(
            f"{name}: the codec shares scales over {pair.group} tokens; a scorer that streams "
            "needs a codec with group 1"
        )
    if scorers.streams(recipe):
        scorers.build(recipe.choice.scorer).streams()  # refuses what cannot be added up
    elif scorers.reads(recipe.choice):
        raise InputError(f"{name} scores by attention evidence, once: use when='after'")
    if getattr(scorers.build(recipe.choice.scorer), "late", False) and not recipe.window:
        raise InputError(f"{name}: a token's score comes with the next: window must be from 1")
    if recipe.store.positions == "read" and hasattr(budget, "over"):
        raise InputError(
            f"{name}: positions='read' counts what every head holds, and with budget "
            f"{recipe.choice.budget.name!r} heads differ: use positions='keep'"
        )
    if not budget.streams:
        raise InputError(
            f"{name}: its budget {recipe.choice.budget.name!r} is dealt by condensing: use "
            "when='after'"
        )
    body = kept(recipe, max_length) - recipe.window
    if body < max(recipe.choice.sinks, 1):
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
    batch, max_length = whole("batch", batch), whole("max_length", max_length)
    recipe = resolve(a_recipe(recipe), max_length)
    check(config, recipe, max_length)
    after = recipe.when == "after" and recipe.store is not None
    length = max_length if length is None else min(whole("length", length), max_length)
    made = sizes(config, recipe, [length], max_length - length) if after else None
    groups = tuple(layers(config, recipe, batch, max_length, made, *run) for run in config.runs())
    zero = lambda: jnp.zeros((batch,), jnp.int32)  # noqa: E731
    budget = jnp.full(
        (batch,), max(kept(recipe, length if after else max_length) - recipe.window, 0), jnp.int32
    )
    return Cache(
        groups, zero(), zero(), zero(), zero(), budget, zero(), recipe, max_length,
        made and empty_pool(config, recipe, batch, max_length, made),
    )  # fmt: skip


def empty_pool(config, recipe, batch, max_length, made: Sizes) -> pool.Pool | None:
    """The pool of a condensed cache, if its budget wants one."""
    if not made.most:
        return None
    layers, dtype = len(full_layers(config)), jnp.dtype(config.dtype)
    return pool.empty(recipe, made.pages, made.most, layers, batch, config.head_dim, dtype,
                      pos_dtype(max_length))  # fmt: skip


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
    depth, pooled = stop - start, None
    if condensed is None:
        keeps = max_length if recipe.choice is None else kept(recipe, max_length) - recipe.window
        capacity = min(round_up(keeps, recipe.store.page), round_up(max_length, recipe.store.page))
        pages = capacity // recipe.store.page
        bodies = (empty_body(config, recipe, depth, batch, pages, max_length),)
        if recipe.fold is not None:
            n, d = config.kv_heads, config.head_dim
            bodies += (state.empty(recipe.fold, depth, batch, n, d, config.scale),)
    else:
        bodies = after_bodies(config, recipe, depth, batch, condensed, max_length)
        if condensed.most:
            pooled = full_layers(config).index(start)
    made = tail(after_tail(recipe, condensed))
    if scorers.streams(recipe):
        made = made.replace(stat=jnp.zeros(made.k.shape[:4], jnp.float32))
    return LayerCache(made, bodies, start, stop, None, pooled)


def after_tail(recipe, condensed: Sizes | None) -> int:
    """The tail of a condensed cache: with raw codes it also keeps all later tokens."""
    capacity = tail_capacity(recipe)
    if condensed is None or recipe.choice is None or not codecs.pair(recipe.store).raw:
        return capacity
    return max(capacity, round_up(recipe.window + condensed.later + recipe.lookahead, 8))


def after_bodies(config, recipe, depth, batch, condensed, max_length):
    """The condensed body, closed, unless a pool holds it, and for coded recipes a second one for
    the tokens to come."""
    page = recipe.store.page
    if recipe.choice is None:  # every token is kept in order: later ones follow in the same body
        return (empty_body(config, recipe, depth, batch, -(-max_length // page), max_length),)
    made = ()
    if not condensed.most:
        made = (empty_body(config, recipe, depth, batch, condensed.pages, max_length, closed=True),)
    if reducers.makes(recipe):
        made += (reduced_body(config, recipe, depth, batch, max_length),)
    if codecs.pair(recipe.store).raw:
        return made
    room = -(-(condensed.later + recipe.window) // page)
    plain = dataclasses.replace(recipe, choice=None)
    return (*made, empty_body(config, plain, depth, batch, room, max_length))


def reduced_body(config, recipe, depth, batch, max_length) -> Slots:
    """A closed body for what a reducer makes: one page, raw whatever the codec, with biases."""
    store = Store(page=reducers.build(recipe.reducer).size)
    plain = dataclasses.replace(recipe, store=store)
    body = empty_body(config, plain, depth, batch, 1, max_length, closed=True)
    bias = jnp.full(body.codes[0].shape[:-1], EMPTY, jnp.float32)
    return body.replace(bias=bias, plain=True)


def empty_body(config, recipe, depth, batch, pages, max_length, *, closed=False) -> Slots:
    """A body of `pages` pages of each kv head."""
    page, n, d = recipe.store.page, config.kv_heads, config.head_dim
    pair, dtype = codecs.pair(recipe.store), jnp.dtype(config.dtype)
    lead = (depth, batch, n, pages)
    x = jnp.zeros((*lead, page, d), dtype)
    codes = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(pair.write, x, x))
    pos = None
    if recipe.choice is not None:
        kind = pos_dtype(max_length)
        pos = jnp.full((*lead, page), 65535 if kind == jnp.uint16 else -1, kind)
    base = jnp.zeros((depth, batch), jnp.int32)
    stat = jnp.zeros((*lead, page), jnp.float32) if scorers.streams(recipe) else None
    return Slots(codes, base, pos, stat=stat, page=page, closed=closed)
