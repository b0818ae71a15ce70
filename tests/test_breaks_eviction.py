"""Faults of eviction that a tester found once: each stays mended."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LENGTHS, MAX, model, random_ids

import kvjax
from kvjax import api, budgets, codecs, scorers
from kvjax.budgets import BUDGETS
from kvjax.cache.spelling import parse, spelled
from kvjax.codecs import CODECS
from kvjax.config import Spec
from kvjax.errors import InputError
from kvjax.scorers import SCORERS

IDS = random_ids(25, "breaks")
LAYERS, HEADS = 2, 2


def made(name, ids=IDS, tables=None, **options):
    recipe = kvjax.recipe(name, **options)
    one = model() if tables is None else dataclasses.replace(model(), tables={name: tables})
    return kvjax.prefill(one, ids, recipe, max_length=MAX, logits="none")[1]


def counts(cache):
    """Entries of each row: of the pool or of the bodies, and the window's."""
    if cache.pool is not None:
        pos = np.asarray(cache.pool.pos)
        body = (pos[0, :, 0] < 65535).sum(axis=(-1, -2))
    else:
        body = sum((np.asarray(g.bodies[0].pos) < 65535).sum(axis=(0, 2, 3, 4))
                   for g in cache.groups)  # fmt: skip
    return body + LAYERS * HEADS * np.asarray(cache.seen - cache.edge)


@pytest.mark.parametrize("options, most", [
    ({"keep": 0.5}, 50), ({"keep": 0.3, "window": 2, "sinks": 1}, 30),
    ({"slots": 5, "window": 2, "sinks": 1}, 20),
])  # fmt: skip
def test_whole_heads_keep_no_more_than_asked(options, most):
    """Sinks and window of duo's defaults are more than a text of 25: it keeps half all the same."""
    assert counts(made("duo", page=4, **options)).max() <= most + (most == 50) * 2


def test_labelled_heads_keep_no_more_than_asked():
    low = {"scorer": {"label": np.zeros((LAYERS, HEADS), np.float32)}}
    cache = made("razor", tables=low, window=4, sinks=10, keep=0.2, page=4)
    assert counts(cache).max() <= 20


def test_slots_count_in_a_papers_arithmetic_too():
    ask = budgets.Ask(25, 0.5, 5, True, 0, 2, 2)
    assert BUDGETS["pyramid"]().wants(ask).sum() <= 10


@pytest.mark.parametrize("page", [1, 32])
def test_sinks_have_room_beside_whole_runs(page):
    few = made("chunkkv", scorer="key_norm", window=3, keep=0.05, sinks=2, count="paper", page=page)
    at = np.asarray(few.groups[0].bodies[0].pos)[:, 0].reshape(LAYERS, HEADS, -1)
    assert all({0, 1} <= set(head[head < 65535]) for layer in at for head in layer)
    assert counts(few).tolist() == counts(made(
        "chunkkv", scorer="key_norm", window=3, keep=0.05, sinks=2, count="paper", page=32
    )).tolist()  # fmt: skip


def test_the_last_query_is_one_whatever_the_window():
    exact = kvjax.prefill(model(), IDS, max_length=MAX, lengths=LENGTHS)[1]
    look = lambda w: api.evidence_of(model(), exact, kvjax.recipe("tova", window=w), tokens=IDS)  # noqa: E731
    one, four = (look(w).groups[0]["sums"] for w in (1, 4))
    np.testing.assert_allclose(four.sum(-1), 1.0, atol=1e-5)
    np.testing.assert_allclose(one, four, atol=1e-5)


@pytest.mark.parametrize("name", kvjax.recipes())
def test_a_word_reads_as_the_recipe_it_was_spelled_from(name):
    """With every scorer, budget and codec in place of its own."""
    plain = kvjax.recipe(name)
    swaps = [{"codec": x} for x in CODECS] + [{}]
    if plain.choice is not None:
        swaps += [{"scorer": x} for x in SCORERS] + [{"budget": x} for x in BUDGETS]
        swaps.append({"scorer": "key_norm", "budget": "pooled", "codec": ("int4", "raw")})
    for swap in swaps:
        recipe = kvjax.recipe(name, **swap)
        assert parse(spelled(recipe)) == recipe, spelled(recipe)


def test_defaults_are_said_or_not():
    assert kvjax.recipe("snapkv", reduce="mean") == kvjax.recipe("snapkv")
    recipe = kvjax.recipe("snapkv", keep=np.float32(0.5), window=np.int64(4))
    assert recipe == kvjax.recipe("snapkv", keep=0.5, window=4)


@pytest.mark.parametrize("words, call", [
    ("window must be a whole number from 0, got -1", lambda: kvjax.recipe("snapkv", window=-1)),
    ("window must be a whole number from 0, got -1", lambda: parse("int8,window=-1")),
    ("looks from its window, which is 0", lambda: made("snapkv", window=0)),
    ("looks from its window, which is 0", lambda: made("kvzip", scorer="window_attention")),
    ("does not look from a question", lambda: kvjax.prefill(
        model(), IDS, kvjax.recipe("kvzip"), max_length=MAX, question=IDS[:, :3])),
    ("does not look from a question", lambda: kvjax.prefill(
        model(), IDS, max_length=MAX, question=IDS[:, :3])),
    ("first=100 leaves nothing of 25 tokens", lambda: made("kvzip", first=100)),
    (r"keep is 0.5 and 0.3; give it once", lambda: parse("snapkv@0.5,keep=0.3")),
    ("codec is 'raw' and 'int8'; give it once", lambda: parse("snapkv+int8,codec=raw")),
    ("unknown option or table of scorer 'window_attention' 'foo'",
     lambda: kvjax.recipe("snapkv", scorer=Spec("window_attention", (("foo", 1),)))),
    ("length must be a whole number", lambda: kvjax.init_cache(
        model().config, kvjax.recipe("snapkv"), 1, 10, length=-3)),
])  # fmt: skip
def test_one_sentence(words, call):
    with pytest.raises(InputError, match=words):
        call()


def _label(x):
    return {"scorer": {"label": x}}


@pytest.mark.parametrize("words, name, tables", [
    ("holds NaN or infinity", "duo", _label(np.full((2, 2), np.nan, np.float32))),
    ("labels of a layer have shape .1,. and the model 2", "duo", _label(np.ones((2, 1)))),
    ("labels of a layer have shape .3,.", "duo", _label(np.ones((2, 3)))),
    ("labels of a layer have shape ..", "duo", _label(np.ones(2))),
    ("has shape .. and the model 2 layers", "duo", _label("none")),
    ("did you mean 'label'", "duo", {"scorer": {"labels": np.ones((2, 2))}}),
    ("holds NaN or infinity", "kvzap", {"scorer": {"weights": {
        "out": np.full((2, 32, 2), np.nan, np.float32), "out_bias": np.zeros((2, 2))}}}),
    ("needs .*'out_bias': .2,.", "kvzap", {"scorer": {"weights": {"out": np.ones((2, 32, 2))}}}),
])  # fmt: skip
def test_tables_of_the_wrong_form(words, name, tables):
    with pytest.raises(InputError, match=words):
        made(name, tables=tables)


def test_evidence_of_another_cache_or_scorer():
    recipe = kvjax.recipe("snapkv", window=4, keep=0.4)
    exact = kvjax.prefill(model(), IDS, max_length=MAX, lengths=LENGTHS)[1]
    one = api.evidence_of(model(), kvjax.select(exact, jnp.array([0])), recipe, tokens=IDS[:1])
    gained = api.evidence_of(model(), exact, kvjax.recipe("h2o", when="after"), tokens=IDS)
    for evidence, words in ((one, "of 1 rows and the cache has 2"), (gained, "'accumulated'"),
                            ((), "is what evidence_of gives, got tuple")):  # fmt: skip
        with pytest.raises(InputError, match=words):
            kvjax.condense(model(), exact, recipe, evidence=evidence)
    small = kvjax.condense(model(), exact, recipe, tokens=IDS)
    with pytest.raises(InputError, match="takes an exact cache"):
        api.evidence_of(model(), small, recipe, tokens=IDS)


def test_rows_are_numbers_or_lists_of_them():
    exact = kvjax.prefill(model(), IDS, max_length=MAX)[1]
    one = kvjax.select(exact, np.array([0]))
    for call in (
        lambda: kvjax.select(exact, 1),
        lambda: kvjax.select(exact, np.array([[0], [1]])),
        lambda: kvjax.insert(exact, np.array([0]), one),
        lambda: kvjax.reset(exact, np.array([0, 1])),
    ):
        with pytest.raises(InputError, match="expected the number of"):
            call()


def test_methods_are_built_by_one_function():
    """Each table refuses a name and an option that it does not know."""
    for build in (scorers.build, budgets.build, lambda spec: codecs.build(spec, "k")):
        with pytest.raises(InputError, match="unknown"):
            build(Spec("no such"))
    with pytest.raises(InputError, match="unknown option or table of codec 'int8'"):
        codecs.build(Spec("int8", (("bits", 4),)), "k")
    assert jax.tree.leaves(scorers.build(Spec("oldest"))) == []
