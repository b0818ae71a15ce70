"""Whether a cache is one that its recipe makes for a model: shapes, dtypes, positions."""

import dataclasses
import math

import jax
import numpy as np

from kvjax import budgets, codecs, reducers, scorers
from kvjax.cache import init, state
from kvjax.cache.cache import Cache, LayerCache, Tail, takes_more
from kvjax.cache.pool import Pool, fold
from kvjax.cache.sizes import full_layers
from kvjax.cache.slots import Slots, pos_dtype
from kvjax.cache.state import State
from kvjax.config import ModelConfig, Store
from kvjax.errors import InputError

COUNTERS = ("seen", "clock", "edge", "high", "budget", "flags")
FLAGS = 15  # all bits of Cache.flags


def same(what: str, got, want) -> None:
    if got != want:
        raise InputError(f"{what}: {short(got)}, expected {short(want)}")


def short(value) -> str:
    """The value as text of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_shapes(cache: Cache, config: ModelConfig) -> None:
    """Refuses a cache, an abstract one too, whose leaves do not fit recipe, model or each other."""
    _is(cache, Cache, "the root of the tree")
    recipe = cache.recipe
    try:
        init.check(config, recipe, cache.max_length)
        init.tail_capacity(recipe)
    except InputError:
        raise
    except Exception as error:  # options in a damaged file can be anything to any method
        raise InputError(f"the recipe {recipe.name!r} is not valid: {short(error)}") from None
    b = getattr(cache.seen, "shape", ())[:1]
    if b < (1,):
        raise InputError(f"seen has rows {b}, expected at least one")
    for name in COUNTERS:
        _leaf(name, getattr(cache, name), b, np.int32)
    _is(cache.groups, tuple, "groups")
    stop = 0
    for i, group in enumerate(cache.groups):
        _is(group, LayerCache, f"groups[{i}]")
        same(f"groups[{i}].start", group.start, stop)
        if not stop < group.stop <= config.layers:
            raise InputError(
                f"groups[{i}] ends at layer {group.stop}, expected {stop + 1} to {config.layers}"
            )
        stop = group.stop
        _group(f"groups[{i}]", group, cache, config, b)
    same("layers of all groups", stop, config.layers)
    if _pooled(cache.recipe, config):
        _pool("pool", cache, config, b)
    elif cache.pool is not None:
        raise InputError(f"pool is there, and recipe {cache.recipe.name!r} has none")


def _pooled(recipe, config) -> bool:
    """Whether a pool holds what the recipe keeps."""
    choice = recipe.choice
    return choice is not None and budgets.build(choice.budget).pooled and bool(full_layers(config))


def _group(where, group, cache, config, b):
    kinds = config.pattern[group.start : group.stop]
    same(f"kinds of layers of {where}", kinds, kinds[:1] * len(kinds))
    kind, recipe = config.kinds[kinds[0]], cache.recipe
    same(f"{where}.window", group.window, kind.window)
    _is(group.tail, Tail, f"{where}.tail")
    capacity = (*getattr(group.tail.k, "shape", ()), 0, 0, 0, 0)[3]
    shape = (len(kinds), *b, config.kv_heads, capacity, config.head_dim)
    for side in ("k", "v"):
        _leaf(f"{where}.tail.{side}", getattr(group.tail, side), shape, config.dtype)
    streams = scorers.streams(recipe)
    _stat(f"{where}.tail", group.tail, shape[:4], streams and kind.window is None)
    _is(group.bodies, tuple, f"{where}.bodies")
    full = kind.window is None
    coded, pooled = recipe.store is not None and full, full and _pooled(recipe, config)
    first = full_layers(config).index(group.start) if pooled else None
    same(f"{where}.pooled", group.pooled, first)
    folded = coded and recipe.fold is not None
    bodies = group.bodies[:-1] if folded else group.bodies
    for i, body in enumerate(bodies):
        _is(body, Slots, f"{where}.bodies[{i}]")
    raw = recipe.store is not None and codecs.pair(recipe.store).raw
    kept = coded and not (pooled and raw)  # raw: the tail takes the rest
    reduced = [body.plain for body in bodies]
    made = int(coded and reducers.makes(recipe))
    same(f"{where} has bodies of a reducer", sum(reduced), made)
    kept = kept or any(reduced)
    same(f"{where} has bodies", bool(group.bodies), kept)
    least = cache.max_length
    if coded:
        least = init.tail_capacity(recipe)
        if not takes_more(group):  # joined: closed bodies, and a tail for all that may follow
            least = min(least, cache.max_length)
    elif kind.window is not None:
        least = min(kind.window, cache.max_length)
    if capacity < max(least, 1):
        raise InputError(f"{where}.tail has {capacity} slots, expected at least {max(least, 1)}")
    for i, body in enumerate(bodies):
        _body(f"{where}.bodies[{i}]", body, cache, config, shape[:2])
        if pooled and body.closed and not body.plain:
            raise InputError(f"{where}.bodies[{i}] is closed, and what follows a pool takes tokens")
    if folded:
        _state(f"{where}.bodies[{len(bodies)}]", group.bodies[-1:], recipe, config, shape[:2])


def _state(where, last, recipe, config, lead):
    """The state that ends a chain: as its recipe would make it."""
    n, d = config.kv_heads, config.head_dim
    try:
        want = jax.eval_shape(
            lambda: state.empty(recipe.fold, lead[0], lead[1], n, d, config.scale)
        )
    except InputError:
        raise
    except Exception as error:  # options in a damaged file can be anything
        raise InputError(f"the features {recipe.fold} are not valid: {short(error)}") from None
    same(where, jax.tree.structure(last), jax.tree.structure((want,)))
    for name in ("sums", "mass"):
        _leaf(f"{where}.{name}", getattr(last[0], name), getattr(want, name).shape, np.float32)


def _body(where, body, cache, config, lead):
    recipe, n = cache.recipe, config.kv_heads
    if body.plain:  # the recipe has a reducer
        made = reducers.build(recipe.reducer)
        recipe = dataclasses.replace(recipe, store=Store(page=made.size))
        same(f"{where} has a bias", body.bias is not None and body.pos is not None, True)
    same(f"{where}.page", body.page, recipe.store.page)
    lead = _pages(where, body, (*lead, n), config, recipe)
    _leaf(f"{where}.base", body.base, lead[:2], np.int32)
    if body.pos is not None:
        _leaf(f"{where}.pos", body.pos, (*lead, body.page), pos_dtype(cache.max_length))
        if recipe.choice is None:
            raise InputError(f"{where} has positions, and recipe {recipe.name!r} keeps every token")
    if body.bias is not None:
        _leaf(f"{where}.bias", body.bias, (*lead, body.page), body.bias.dtype)
        if not jax.numpy.issubdtype(body.bias.dtype, np.floating):
            raise InputError(f"{where}.bias has dtype {body.bias.dtype}, expected a float")
    _stat(where, body, (*lead, body.page), scorers.streams(recipe))
    for name in ("temperature", "exponent"):
        if not 0 < getattr(body, name) < math.inf:
            raise InputError(f"{where}.{name} is {getattr(body, name)}, expected above 0")


def _stat(where, part, shape, streams):
    """What a scorer that streams remembers of each slot; nothing of others."""
    same(f"{where} has a stat", part.stat is not None, streams)
    if part.stat is not None:
        _leaf(f"{where}.stat", part.stat, shape, np.float32)


def _pages(where, body, lead, config, recipe, stored=lambda codes: codes):
    """The leading axes of the codes, those of `lead` and the pages; refuses codes of others."""
    leaves = jax.tree.leaves(body.codes)
    if not leaves or len(leaves[0].shape) < 4:
        raise InputError(f"{where}.codes has no leaf with pages")
    pages = leaves[0].shape[3]
    if pages < 1 or pages * body.page >= 1 << 31:
        raise InputError(f"{where} has {pages} pages of {body.page} slots, expected 1 to 2**31")
    lead = (*lead, pages)
    x = jax.ShapeDtypeStruct((*lead, body.page, config.head_dim), np.dtype(config.dtype))
    want = jax.eval_shape(lambda k, v: stored(codecs.pair(recipe.store).write(k, v)), x, x)
    same(f"{where}.codes", str(jax.tree.structure(body.codes)), str(jax.tree.structure(want)))
    held = jax.tree_util.tree_leaves_with_path(body.codes)
    for (at, leaf), like in zip(held, jax.tree.leaves(want), strict=True):
        _leaf(f"{where}.codes{jax.tree_util.keystr(at)}", leaf, like.shape, like.dtype)
    return lead


def _pool(where, cache, config, b):
    pool, layers = cache.pool, len(full_layers(config))
    _is(pool, Pool, where)
    same(f"{where}.page", pool.page, cache.recipe.store.page)
    lead = _pages(where, pool, (1, *b, 1), config, cache.recipe, fold)
    _leaf(f"{where}.pos", pool.pos, (*lead, pool.page), pos_dtype(cache.max_length))
    _leaf(f"{where}.owner", pool.owner, lead, np.int16)
    for name in ("first", "count"):
        _leaf(f"{where}.{name}", getattr(pool, name), (layers, *b), np.int32)
    if not 1 <= pool.most <= lead[3]:
        raise InputError(f"{where}.most is {pool.most}, expected 1 to its {lead[3]} pages")


def _is(x, kind, what):
    if type(x) is not kind:
        raise InputError(f"{what} is a {type(x).__name__}, expected a {kind.__name__}")


def _leaf(what, x, shape, dtype):
    if not hasattr(x, "dtype"):
        raise InputError(f"{what} is a {type(x).__name__}, expected an array")
    same(what, f"{x.dtype}{list(x.shape)}", f"{np.dtype(dtype)}{list(shape)}")
    if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
        raise InputError(
            f"{what} is {x.dtype}, which needs jax_enable_x64; this process has it off"
        )


def check_values(cache: Cache) -> None:
    """Refuses a cache of right shapes whose positions contradict each other."""
    seen, clock, edge, high, budget, flags = (np.asarray(getattr(cache, x)) for x in COUNTERS)
    length = np.full_like(seen, cache.max_length)
    zero = np.zeros_like(seen)
    for low, low_name, x, name in (
        (zero, "0", edge, "edge"), (edge, "edge", seen, "seen"), (seen, "seen", high, "high"),
        (high, "high", length, "max_length"), (zero, "0", clock, "clock"),
        (clock, "clock", length, "max_length"), (zero, "0", budget, "budget"),
        (budget, "budget", length, "max_length"), (zero, "0", flags, "flags"),
        (flags, "flags", np.full_like(flags, FLAGS), "all flags"),
    ):  # fmt: skip
        _order(low_name, low, name, x)
    for i, group in enumerate(cache.groups):
        where = f"groups[{i}]"
        if group.window is None:
            low = zero if group.keeps_all else edge
            room = np.full_like(seen, group.tail.capacity)
            _order(f"tokens in {where}.tail", seen - low, "its slots", room)
        for body in group.bodies:
            if isinstance(body, State):
                continue
            base = np.asarray(body.base)
            _order("0", np.zeros_like(base), f"{where} base", base)
            _order(f"{where} base", base, "edge", np.broadcast_to(edge, base.shape))
            if body.pos is not None:
                _positions(where, np.asarray(body.pos), edge)
    if cache.pool is not None:
        _pool_values(cache.pool, edge, cache.groups[0].tail.k.shape[2])


def _pool_values(pool, edge, heads):
    """Positions and owners, and that layers have stretches of the pool, one after the other."""
    own, first, count = (np.asarray(x) for x in (pool.owner, pool.first, pool.count))
    _positions("pool", np.asarray(pool.pos), edge)
    _order("-1", np.full_like(own, -1), "pool owner", own)
    _order("pool owner", own, "last head", np.full_like(own, heads - 1))
    for name, x in (("pool first", first), ("pool count", count)):
        _order("0", np.zeros_like(x), name, x)
    _order("pool count", count, "most", np.full_like(count, pool.most))
    stop = first.astype(np.int64) + count
    _order("end of a layer in the pool", stop[:-1], "first page of the next", first[1:])
    _order("end of a layer in the pool", stop, "pages", np.full_like(stop, pool.pages))


def _positions(where, pos, edge):
    if pos.dtype == np.uint16:
        pos = np.where(pos == 65535, -1, pos.astype(np.int32))
    _order("-1", np.full_like(pos, -1), f"{where} pos", pos)
    last = (edge - 1)[None, :, None, None, None]
    _order(f"{where} pos", pos, "edge - 1", np.broadcast_to(last, pos.shape))


def _order(low_name, low, name, x):
    """low <= x everywhere, or an error with both values at the first place where not."""
    bad = np.argwhere(low > x)
    if len(bad):
        at = tuple(bad[0])
        raise InputError(f"{low_name} is {low[at]} and {name} is {x[at]}: it must be at least that")
