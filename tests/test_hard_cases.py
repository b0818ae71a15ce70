"""Hard cases 1 and 2 of other projects: protected tokens, two counters."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, model, tables_of
from hard import (  # noqa: F401
    APART,
    BUDGET,
    CHOOSING,
    FIRST,
    IDS,
    RAW,
    REFUSED,
    TIERS,
    VARIANTS,
    Dense,
    fast_compile,
    held,
    longer,
    small,
)

import kvjax
from kvjax import budgets, scorers
from kvjax.cache.absorb import choose
from kvjax.cache.recipes import RECIPES, REST
from kvjax.cache.select import top
from kvjax.config import Spec
from kvjax.errors import InputError
from kvjax.scorers import Seen

NAN, INF = float("nan"), float("inf")
INT8 = 0.5  # a key or value moves by up to 0.4% of its largest entry, in two layers


# --- case 1: NVIDIA/kvpress#226, protection expressed as a score ---


@pytest.mark.parametrize(
    "scores, fourth",
    [
        ([1.0] * 8, 0),
        ([5, 5, 5, 5, 0, 0, 0, 0], 0),
        ([1, 1, NAN, 1, 1, 1, 1, 1], 0),
        ([NAN, 1, 1, 1, 1, 1, 1, 1], 1),
        ([NAN, NAN, 3, NAN, 4, NAN, NAN, NAN], 4),
        ([NAN] * 8, 0),
        ([-INF] * 8, 0),
        ([INF] * 8, 0),
        ([-INF, -INF, -3e38, -INF, -INF, INF, INF, INF], 2),
    ],
)
def test_protected_are_kept_whatever_the_scores(scores, fourth):
    protected = jnp.arange(8) >= 5
    keep = top(jnp.array(scores), jnp.ones(8, bool), protected, jnp.arange(8), jnp.int32(4))
    assert np.flatnonzero(keep).tolist() == [fourth, 5, 6, 7]


def test_ties_go_to_the_lowest_position_in_any_slot_order():
    order = np.array([6, 2, 7, 0, 5, 3, 1, 4])  # position of each slot
    every = jnp.ones(8, bool)
    keep = top(jnp.ones(8), every, jnp.asarray(order >= 5), jnp.asarray(order), jnp.int32(4))
    assert sorted(order[np.asarray(keep)].tolist()) == [0, 5, 6, 7]


@pytest.mark.parametrize("count, kept", [(0, []), (2, [5, 6]), (3, [5, 6, 7]), (9, list(range(8)))])
def test_a_budget_below_the_protected_keeps_their_lowest(count, kept):
    """The rule that `top` documents; nothing outside the protected can take their place."""
    keep = top(jnp.ones(8), jnp.ones(8, bool), jnp.arange(8) >= 5, jnp.arange(8), jnp.int32(count))
    assert np.flatnonzero(keep).tolist() == kept


SHARED = {  # budgets that deal over layers too: options, and entries of 2 layers of 2 heads
    "uniform": ({}, [[4, 4], [4, 4]]),
    "pooled": ({}, [[4, 4], [4, 4]]),
    "model": ({}, [[4, 4], [4, 4]]),
    "threshold": ({"tau": -1e30}, [[4, 4], [4, 4]]),
    "chunks": ({"size": 1, "reuse": 1}, [[4, 4], [4, 4]]),
    "pyramid": ({}, [[6, 6], [2, 2]]),  # the lowest layer gets all there is
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("score", [1.0, NAN, INF])
def test_no_budget_loses_a_sink_or_prefers_nan(name, score):
    """Slots 6 and 7 are empty; every score is equal, but that of slot 3 may be NaN or infinite."""
    options, many = SHARED[name]
    budget = budgets.build(Spec(name, tuple(options.items())))
    pos = jnp.broadcast_to(jnp.arange(8), (2, 1, 2, 8))
    valid, scores = pos < 6, jnp.ones(pos.shape).at[..., 3].set(score)
    wants = budget.wants(budgets.Ask(6, slots=4, layers=2, heads=2))[..., None]
    keep = jax.jit(budget)(scores, valid, valid & (pos < 2), pos, jnp.asarray(wants))
    rank = [0, 1, 2, 3, 4, 5] if score == score else [0, 1, 2, 4, 5, 3]
    for layer, head in np.ndindex(2, 2):
        kept = np.flatnonzero(keep[layer, 0, head]).tolist()
        assert kept == sorted(rank[: many[layer][head]])


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("score", [1.0, NAN, INF])
def test_choosing_protects_sinks_and_never_prefers_nan(name, score):
    """Slots 6 and 7 are empty; every score is equal, but that of slot 3 may be NaN or infinite."""
    recipe = small(name, slots=4, sinks=2, window=0, kernel=1)
    k = jnp.ones((1, 2, 8, 4)).at[:, :, 3].set(score)
    sums = jnp.ones((1, 4, 8)).at[:, :, 3].set(score if score == score else NAN)
    pos = jnp.where(jnp.arange(8) < 6, jnp.arange(8), -1)
    looked = {"sums": sums, "maxima": sums[:, :2]}
    seen = Seen(k, k, jnp.broadcast_to(pos, (1, 2, 8)), jnp.array([6]), looked)
    kept = choose(seen, jnp.array([4]), recipe)
    by_mass = scorers.reads(RECIPES[name].recipe.choice) is not None
    for head in np.asarray(kept[0]):
        ids = np.flatnonzero(head).tolist()
        assert len(ids) == 4 and ids[:2] == [0, 1] and max(ids) < 6
        if name == "streaming_llm":  # the scores are the positions
            assert ids == [0, 1, 2, 3]
        elif score == 1.0:
            assert ids == [0, 1, 2, 3]
        elif score != score or not by_mass:  # an infinite norm is the worst, like NaN
            assert ids == [0, 1, 2, 4]
        else:  # infinite attention is the best
            assert ids == [0, 1, 2, 3]


@functools.cache
def constant_keys():
    """A model whose keys are all zero: all norms tie, and attention is uniform."""
    made = model(PLAIN)
    blocks = made.params.blocks
    params = made.params.replace(blocks=blocks.replace(k=jnp.zeros_like(blocks.k)))
    return dataclasses.replace(made, params=params)


@pytest.mark.parametrize("name, when, positions", longer([v for v in FIRST if v[0] in CHOOSING]))
def test_constant_keys_keep_the_window(name, when, positions):
    """T 8, budget 4, window 3: {5, 6, 7}, and the lowest index of those that tie."""
    recipe = small(name, when=when, positions=positions, slots=4, sinks=1, window=3,
                   kernel=1, stride=2, page=4)  # fmt: skip
    ids = np.arange(8)[None]
    _, cache = kvjax.prefill(constant_keys(), ids, recipe, max_length=16, logits="none")
    want = [[[0, 5, 6, 7]] * 2] * 2
    if BUDGET[name] == "pyramid":  # one entry beyond the window: 1.95 and 0.05 are 2 and 0
        want = [[[0, 1, 5, 6, 7]] * 2, [[5, 6, 7]] * 2]
    assert held(cache) == want


@pytest.mark.parametrize("name", [v[0] for v in VARIANTS if v[:2] == (v[0], "during")])
def test_more_protected_than_room_is_refused(name):
    if name not in CHOOSING:
        pytest.skip("keeps every token")
    recipe = small(name, when="during", positions="keep", slots=6, sinks=4, window=3)
    if RECIPES[name].recipe.window == REST:  # the window is what the sinks leave
        recipe = small(name, slots=4, sinks=4)
    with pytest.raises(InputError, match="sinks"):
        kvjax.init_cache(PLAIN, recipe, 1, 64)


# --- case 2: VeloxQuant-MLX#171, rows stored and next position in one counter ---


@functools.partial(jax.jit, donate_argnums=0)
def _one(cache, token):
    made = model(PLAIN)
    tables = tables_of(cache)
    logits, cache = kvjax.step(made.params, PLAIN, cache, token, tables=tables)
    return logits[0, 0], kvjax.compress(cache, tables=tables)


def feed(cache, tokens, dense, renumber):
    """Reads one token at a time with both; the reference sees what the cache holds just then."""
    for token in tokens:
        kept = held(cache)
        logits, cache = _one(cache, jnp.full((1, 1), token, jnp.int32))
        expected = dense.read(token, kept, renumber)
    return cache, logits, expected


@functools.cache
def read_exactly():
    dense = Dense(model(PLAIN).params, PLAIN)
    cache = kvjax.init_cache(PLAIN, kvjax.recipe("exact"), 1, 64)
    return *feed(cache, IDS[:40], dense, False), dense


def copy_of(dense):
    made = Dense(dense.w, dense.config)
    made.k, made.v = ([list(layer) for layer in x] for x in (dense.k, dense.v))
    return made


def best_norms(dense, layer, head, newest, count):
    """Sinks 0..3, and the smallest key norms of 4..newest."""
    norms = dense.norms(layer, head)[4 : newest + 1]
    return sorted([*range(4), *(4 + np.argsort(norms)[:count]).tolist()])


def _tiers():
    """Each recipe and time once, a pool and a body renumbered; the rest in the full suite."""
    short = {v for v in FIRST if v in TIERS} | {("streaming_llm", "during", "read")}
    short |= {("key_norm", "after", "rerot"), ("ada_snapkv", "after", "rerot")}
    return [v if v in short else pytest.param(*v, marks=pytest.mark.full) for v in VARIANTS]


@pytest.mark.parametrize("name, when, positions", _tiers())
def test_next_position_and_rows_are_two_numbers(name, when, positions):
    recipe = small(name, when=when, positions=positions, slots=12, sinks=4, window=4,
                   stride=1, page=4)  # fmt: skip
    choice, renumber = RECIPES[name].recipe.choice, positions != "keep"
    if when == "after":
        exact, *_, dense = read_exactly()
        dense = copy_of(dense)
        cache = kvjax.condense(model(PLAIN), exact, recipe, tokens=IDS[None, :40])
    else:
        dense = Dense(model(PLAIN).params, PLAIN)
        cache = kvjax.init_cache(PLAIN, recipe, 1, 64)
        cache, *_ = feed(cache, IDS[:40], dense, renumber)
    kept = held(cache)
    rows = 40 if choice is None else 12
    assert int(cache.seen[0]) == 40
    assert int(cache.clock[0]) == (rows if renumber else 40)
    each = np.array([[len(arrivals) for arrivals in heads] for heads in kept])
    alike = BUDGET.get(name, "uniform") in ("uniform", "chunks")
    if BUDGET.get(name) not in ("heads", "labelled"):  # those keep whole heads, whatever slots say
        assert each.mean() == rows and (each == rows).all() | (not alike)
    assert BUDGET.get(name) != "pooled" or (each.mean(axis=1) == rows).all()
    for heads in kept:
        for arrivals in heads:
            assert len(set(arrivals)) == len(arrivals) and arrivals[-4:] == [36, 37, 38, 39]
    for layer, head in itertools.product(range(2), range(2)):
        if name == "streaming_llm" and when == "during":
            assert kept[layer][head] == [0, 1, 2, 3, *range(32, 40)]
        if name == "key_norm":
            best = best_norms(dense, layer, head, 35, 4)
            assert kept[layer][head] == [*best, 36, 37, 38, 39]
    # token 41 and five more, which after-condense recipes keep in addition
    tolerance = RAW if recipe.store is None or recipe.store.k.name == "raw" else INT8
    for token in IDS[40:46]:
        cache, logits, expected = feed(cache, [token], dense, renumber)
        np.testing.assert_allclose(logits, expected, atol=tolerance)


@pytest.mark.parametrize("name, when, positions", REFUSED)
def test_what_cannot_renumber_is_refused(name, when, positions):
    recipe = small(name, when=when, positions=positions, slots=12, sinks=4, window=4)
    with pytest.raises(InputError):
        kvjax.prefill(model(PLAIN), IDS[None, :8], recipe, max_length=64)
