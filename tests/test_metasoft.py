"""Meta-Soft: soft tokens that look at a prompt, values that flow, and mixtures of rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    HYBRID,
    LENGTHS,
    PLAIN,
    TWICE,
    generator,
    model,
    random_ids,
    row_of,
    small,
)
from holding import arrivals, assert_same, entries, in_pool, pool_codes
from tabled import random_probes

import kvjax
from kvjax import api, observing, reducers
from kvjax.config import LayerKind, Rope, Spec
from kvjax.reducers import flow
from kvjax.scorers import probe_attention
from kvjax.train import probes  # pyright: ignore[reportMissingImports]

LONG, MAX, WINDOW = 25, 40, 4
IDS = random_ids(LONG, "metasoft")


@functools.cache
def exact(config=PLAIN):
    return prefilled(None, config)[1]


def prefilled(recipe, config=PLAIN):
    return kvjax.prefill(model(config), IDS, recipe, max_length=MAX, lengths=LENGTHS)


def condensed(recipe, config=PLAIN):
    return kvjax.condense(model(config), exact(config), recipe, tokens=IDS)


def after(cache, config=PLAIN):
    """Logits of three more tokens."""
    ids = random_ids(3, "after")
    return np.asarray(kvjax.extend(model(config), ids, kvjax.fork(cache), logits="all")[0])


def by_hand(k, v, kept, dropped, score, scale):
    """v' [b n s e], and the masses s' [b n s] after it, one dropped token at a time in float64."""
    k, v, score = (np.asarray(x, np.float64) for x in (k, v, score))
    out, mass = v.copy(), np.where(kept, score, 0.0)
    for b, n in np.ndindex(kept.shape[:2]):
        i, top = np.flatnonzero(kept[b, n]), (mass[b, n, :, None] * v[b, n])
        for j in np.flatnonzero(dropped[b, n]) if len(i) else ():
            a = np.exp(k[b, n, i] @ k[b, n, j] * scale)
            share = a / a.sum() * score[b, n, j]
            mass[b, n, i] += share
            top[i] += share[:, None] * v[b, n, j]
        out[b, n, i] = top[i] / mass[b, n, i, None]
    return out, mass


def test_room_for_all_is_exact():
    """Soft tokens are gone, nothing is merged: the same logits, and the same clock."""
    cache = condensed(small("metasoft", keep=1.0))
    for name in ("seen", "clock"):
        np.testing.assert_array_equal(getattr(cache, name), getattr(exact(), name))
    np.testing.assert_allclose(after(cache), after(exact()), rtol=0, atol=3e-5)  # logits of order 9
    out, straight = prefilled(small("metasoft", keep=1.0))
    np.testing.assert_array_equal(out, prefilled(None)[0])
    assert entries(straight) == entries(cache)


def test_soft_tokens_leave_the_cache_alone():
    before = jax.tree.map(np.array, exact())
    cache = condensed(small("metasoft"))
    assert_same(before, exact())
    np.testing.assert_array_equal(cache.seen, LENGTHS)
    np.testing.assert_array_equal(cache.clock, LENGTHS)
    held = [max(x) for x in entries(cache) if x]
    assert held and max(held) < LONG - WINDOW
    assert not any(body.plain for body in cache.groups[0].bodies)


STILL = dataclasses.replace(
    PLAIN, kinds=(LayerKind(rope=Rope(scaling="linear", factor=1e6)),)
)  # positions hardly turn anything


@pytest.mark.parametrize("config,least", [(PLAIN, 0.65), (STILL, 0.85)], ids=["turned", "still"])
def test_tokens_of_the_end_as_soft_tokens_are_nearly_snapkv(config, least):
    """The last six tokens, read a second time after themselves, choose nine of nineteen in a head.

    A direction: six tokens further on rotary positions differ, and each sees itself twice. Where
    positions do not turn keys only the latter is left. By chance 0.47 would be in both.
    """
    size, ids = 6, random_ids(LONG, "snap")
    whole = model(config)
    _, cache = kvjax.prefill(whole, ids, max_length=MAX, logits="none")
    options = dict(window=size, page=4, slots=size + 9, sinks=0)
    snap = kvjax.condense(whole, cache, kvjax.recipe("snapkv", **options), tokens=ids)
    soft = jnp.take(whole.params.embed, ids[:, -size:], axis=0)
    recipe = kvjax.recipe("metasoft", reducer=None, **options)
    watch, count = observing.watcher(recipe), np.full(2, size, np.int32)
    seen = observing._look(whole, cache, soft, count, watch, None)
    seen = observing.Evidence(seen, recipe.choice.scorer)
    made = kvjax.condense(whole, cache, recipe, tokens=ids, evidence=seen)
    pairs = list(zip(entries(snap), entries(made), strict=True))
    pairs = [(set(a), set(b)) for a, b in pairs if a]
    assert len(pairs) == 8 and all(len(a) == len(b) == 9 for a, b in pairs)
    assert np.mean([len(a & b) / 9 for a, b in pairs]) > least


@pytest.mark.parametrize("block", [5, 128])
def test_flow_against_float64(monkeypatch, block):
    """The formula, in blocks and at once; the sum of s' v' over kept is that of s v over all.

    One head keeps nothing and one drops nothing: their values stay, to the bit.
    """
    monkeypatch.setattr(flow, "BLOCK", block)
    rng = generator("flow")
    k, v = rng.normal(size=(2, 2, 2, 12, 8)).astype(np.float32)
    score = rng.random((2, 2, 12)).astype(np.float32)
    kept, real = rng.random((2, 2, 12)) < 0.4, np.arange(12) < 10
    kept[0, 1], kept[1, 0] = False, real
    kept, dropped = kept & real, ~kept & real
    move = reducers.build(Spec("flow")).moved
    got = np.asarray(move(*map(jnp.asarray, (k, v, kept, dropped, score)), 0.4))
    want, mass = by_hand(k, v, kept, dropped, score, 0.4)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    for b, n in ((0, 0), (1, 1)):
        assert abs(got - v)[b, n, kept[b, n]].max() > 0.05
        held = (mass[b, n, :, None] * got[b, n])[kept[b, n]].sum(axis=0)
        whole = (score[b, n, :, None] * v[b, n])[real].sum(axis=0)
        np.testing.assert_allclose(held, whole, rtol=0, atol=1e-5)
        np.testing.assert_allclose(mass[b, n].sum(), score[b, n, real].sum())
    same = np.broadcast_to(~kept[..., None], v.shape).copy()
    same[1, 0] = True
    np.testing.assert_array_equal(got[same], v[same])
    none = move(*map(jnp.asarray, (k, v, kept, dropped, -score)), 0.4)  # no mass, no movement
    np.testing.assert_array_equal(none, v)


@pytest.mark.full
@pytest.mark.parametrize(
    "config,budget", [(HYBRID, "uniform"), (TWICE, "model")], ids=["bodies", "pool"]
)
def test_what_is_kept_has_values_that_flowed(config, budget):
    """Bodies and pools: the entries and keys are those without a reducer, and each value is what
    the formula gives from the exact cache and the scores."""
    recipe = small("metasoft", budget=budget, page=4)
    cache, other = (condensed(dataclasses.replace(recipe, reducer=r), config)
                    for r in (recipe.reducer, None))  # fmt: skip
    assert entries(cache) == entries(other)
    assert abs(after(cache, config) - after(other, config)).max() > 1e-3
    for one, two in zip(jax.tree.leaves(keys(cache)), jax.tree.leaves(keys(other)), strict=True):
        np.testing.assert_array_equal(one, two)
    layer = 0
    for i, group in enumerate(cache.groups):
        if group.window is not None:
            continue
        tail = exact(config).groups[i].tail
        scores = np.asarray(scored(recipe, config)[i])
        for depth in range(group.stop - group.start):
            at, got = held(cache, i, depth, layer)
            slots = scores.shape[-1]
            kept = np.zeros((2, 2, slots), bool)
            for b, n in np.ndindex(kept.shape[:2]):
                kept[b, n] = np.isin(np.arange(slots), at[b, n])
            edge = np.array(LENGTHS)[:, None, None] - WINDOW
            dropped = ~kept & (np.arange(slots) < edge)
            k, v = (np.asarray(x[depth]) for x in (tail.k, tail.v))
            want, _ = by_hand(k, v, kept, dropped, scores[depth], config.scale)
            for b, n in np.ndindex(kept.shape[:2]):
                for a, value in zip(at[b, n], got[b, n], strict=True):
                    if a >= 0:
                        np.testing.assert_allclose(value, want[b, n, a], rtol=0, atol=2e-5)
            layer += 1
    np.testing.assert_array_equal(cache.groups[-1].tail.v, other.groups[-1].tail.v)


def keys(cache):
    """The codes of keys in bodies and pool."""
    bodies = [body.codes[0] for group in cache.groups for body in group.bodies]
    return bodies if cache.pool is None else [*bodies, cache.pool.codes[0]]


def held(cache, group, depth, layer):
    """Arrivals [b n x], -1 where none, and values [b n x e] that a layer keeps."""
    if cache.pool is None:
        body = cache.groups[group].bodies[0]
        at, v = arrivals(cache, cache.groups[group])[1][0][depth], np.asarray(body.codes[1][depth])
        return at.reshape(*at.shape[:2], -1), v.reshape(*v.shape[:2], -1, v.shape[-1])
    whose, owner, pos = in_pool(cache)
    v = np.asarray(pool_codes(cache)[1])[0, :, 0]  # [b p s e]
    wide = np.broadcast_to((whose == layer)[:, None] & (owner[:, None] == [[0], [1]]),
                           (2, 2, pos.shape[1]))  # fmt: skip
    at = np.where(wide[..., None], pos[:, None], -1)
    v = np.broadcast_to(v[:, None], (*at.shape, v.shape[-1]))
    return at.reshape(2, 2, -1), v.reshape(2, 2, -1, v.shape[-1])


def looked(recipe, cache, config=PLAIN, ids=IDS) -> Any:
    """What the soft tokens saw, for each group."""
    return api.evidence_of(model(config), cache, recipe, tokens=ids).groups


def scored(recipe, config):
    """The scorer's [l b n s] for each group, from what its soft tokens saw."""
    seen = looked(recipe, exact(config), config)
    edge = np.array(LENGTHS)[:, None] - WINDOW
    out = []
    for e in seen:
        s = np.asarray(e["sums"], np.float64)  # [l b h s]
        s = np.where((np.arange(s.shape[-1]) < edge)[:, None], s, 0.0)
        s = np.pad(s, [(0, 0)] * 3 + [(2, 2)])
        s = np.mean([s[..., i : s.shape[-1] - 4 + i] for i in range(5)], axis=0)
        out.append(s.reshape(*s.shape[:2], 2, 2, -1).mean(axis=3))
    return out


def test_evidence_is_the_mean_attention_of_the_soft_tokens():
    """Each head gives each soft token 1 in all: over the prompt less, by what they give each other;
    and rows of another length do not disturb."""
    recipe = small("metasoft")
    seen = looked(recipe, exact())[0]["sums"]
    short = np.asarray(seen)[:, 1, :, : LENGTHS[1]]
    assert (short.sum(-1) < 1).all() and (np.asarray(seen).sum(-1) < 1 + 1e-5).all()
    one = row_of(exact(), 1)
    alone = looked(recipe, one, ids=IDS[1:, : LENGTHS[1]])[0]["sums"]
    np.testing.assert_allclose(np.asarray(alone)[:, 0, :, : LENGTHS[1]], short, rtol=0, atol=1e-6)


def test_weights_sum_to_one_and_pick_rows():
    """Hard with a key and without; the gradient with a key is that of the soft weights."""
    table = {name: jnp.asarray(x) for name, x in random_probes().items()}
    x = jnp.take(model().params.embed, IDS, axis=0)
    f = probe_attention.features(x, jnp.array(LENGTHS))
    np.testing.assert_allclose(jnp.mean(f**2, axis=-1), 1.0, rtol=1e-5)
    other = probe_attention.features(x.at[1, LENGTHS[1] :].set(9.0), jnp.array(LENGTHS))
    np.testing.assert_array_equal(f, other)  # padding has no part
    for key in (None, jax.random.key(1)):
        w = np.asarray(probe_attention.weights(table, f, key))
        np.testing.assert_allclose(w.sum(axis=-1), 1.0, atol=1e-6)
        np.testing.assert_allclose(np.sort(w)[..., -1], 1.0, atol=1e-6)
    made = probe_attention.probes(table, x, jnp.array(LENGTHS))
    rows = np.linalg.norm(np.asarray(made)[:, :, None] - np.asarray(table["basis"]), axis=-1)
    assert (rows.min(axis=-1) < 1e-5).all()
    value = lambda b: probe_attention.weights(table | {"bias": b}, f, jax.random.key(1))[..., 0]  # noqa: E731
    assert abs(jax.grad(lambda b: value(b).sum())(table["bias"])).max() > 1e-3


def with_probes(**leaves):
    tables = {"metasoft": {"probes": random_probes() | leaves}}
    return dataclasses.replace(model(), tables=tables)


BAD = {
    "needs probes of this model: train": lambda: kvjax.condense(
        dataclasses.replace(model(), tables={}), exact(), small("metasoft"), tokens=IDS),
    "basis has shape [5, 7], expected [5, 32]": lambda: kvjax.condense(
        with_probes(basis=np.zeros((5, 7))), exact(), small("metasoft"), tokens=IDS),
    "size has shape [2], expected [1]": lambda: kvjax.condense(
        with_probes(size=np.ones(2)), exact(), small("metasoft"), tokens=IDS),
    "pass tokens=": lambda: kvjax.condense(model(), exact(), small("metasoft")),
    "kernel must be at least 1, got 0": lambda: small("metasoft", kernel=0),
    "when='after'": lambda: kvjax.prefill(
        model(), IDS, small("metasoft", when="during"), max_length=MAX),
    "positions='keep'": lambda: condensed(small("metasoft", positions="rerot")),
    "did you mean 'flow'": lambda: small("metasoft", reducer="flew"),
    "rows is 40; give from 1 to": lambda: probes.fit(model(), IDS, length=20, later=5, rows=40),
    "count is 0": lambda: probes.fit(model(), IDS, length=20, later=5, rows=4, count=0),
    "give ids [c, 24]": lambda: probes.fit(model(), IDS, length=20, later=4),
    "must be from 1, got 0, 25, 2": lambda: probes.fit(model(), IDS, length=0, later=25),
    "leave no batch; give 3": lambda: probes.fit(model(), IDS, length=20, later=5, batch=3),
    "temperature is 0": lambda: probes.fit(model(), IDS, length=20, later=5, temperature=0.0),
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input(sentence):
    with pytest.raises(kvjax.InputError) as error:
        BAD[sentence]()
    assert sentence in str(error.value), str(error.value)
