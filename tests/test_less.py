"""LESS: the state of learned features, its parallel form, and its training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, generator, random_ids

import kvjax
from kvjax.attention import Query, attend_rows
from kvjax.cache import state
from kvjax.cache.learned import LearnedFeatures
from kvjax.config import Spec
from kvjax.data import moby_dick
from kvjax.model import observe
from kvjax.params import init_params
from kvjax.train import TrainConfig, less, loop  # pyright: ignore[reportMissingImports]

ONE = dataclasses.replace(PLAIN, pattern=(0,))
RECIPE = kvjax.recipe("less", slots=12, stride=4)  # four sinks, a window of eight
SPEC = Spec("less")


LOOK = jax.jit(lambda params, ids: kvjax.look(params, PLAIN, None, ids, logits="hidden")[0])


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing the loss takes seconds, and has its own test."""
    monkeypatch.setattr(loop.record, "plot", lambda *args: None)


def weights_of(config, seed=0):
    """Weights that matter: as at the start, but with sizes of one."""
    made = less.start(config, jax.random.key(seed), inner=8)
    return made | {"size": jnp.ones_like(made["size"]), "change": jnp.ones_like(made["change"])}


def model_of(config=PLAIN, weights=None):
    params = init_params(config, jax.random.key(0), std=0.3)
    return kvjax.Model(params, config, None, {"less": {"features": weights or weights_of(config)}})


class Replaced:
    """The parallel form in place of attention, in every layer."""

    def mix(self, query, k, v, pos, tables, use, hidden=None):
        made = LearnedFeatures(**tables["features"])
        return (less.parallel(query, k, v, pos, less.policy(RECIPE, 64), made), None), ()


@jax.jit
def streamed(params, ids, tables):
    """The cache, token by token: hidden states [b t m], and the cache at the end."""

    def one(cache, token):
        out, new = kvjax.look(params, PLAIN, cache, token[:, None], tables=tables, logits="hidden")
        return kvjax.absorb_long(cache, new, tables=tables), out[:, 0]

    cache = kvjax.init_cache(PLAIN, RECIPE, ids.shape[0], 64)
    cache, out = jax.lax.scan(one, cache, ids.T)
    return jnp.swapaxes(out, 0, 1), cache


def test_parallel_form_is_what_the_cache_gives_token_by_token():
    model, ids = model_of(), jnp.asarray(random_ids(40, "less"))
    tables = model.tables["less"]
    got, cache = streamed(model.params, ids, tables)
    want, _ = jax.jit(
        lambda ids: observe(
            model.params, PLAIN, None, ids, Replaced(), tables=tables, logits="hidden"
        )
    )(ids)
    np.testing.assert_allclose(got, want, atol=2e-5)  # states of order 1, float32 sums of forty
    exact = LOOK(model.params, ids)
    assert abs(exact[:, :13] - got[:, :13]).max() < 1e-5  # nothing was dropped
    assert abs(exact - got)[:, 13:].max() > 1e-2
    assert (cache.flags == 0).all() and (cache.groups[0].bodies[1].mass > 0).all()


def test_a_prompt_folds_what_its_tokens_would():
    """One chunk: the prompt sees itself exactly, then is folded; the first layer's keys do not
    depend on attention, so its state is that of token by token."""
    model, ids = model_of(), jnp.asarray(random_ids(40, "less"))
    got, cache = kvjax.prefill(model, ids, RECIPE, max_length=64)
    want = LOOK(model.params, ids)[:, -1] @ model.params.embed.T
    np.testing.assert_allclose(got, want, atol=5e-5)  # logits of order 10
    _, other = streamed(model.params, ids, model.tables["less"])
    one, two = (c.groups[0].bodies[1] for c in (cache, other))
    np.testing.assert_allclose(one.sums[0], two.sums[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(one.mass[0], two.mass[0], rtol=1e-5)


def test_order_of_folding_does_not_matter_and_the_output_is_a_mean():
    rng = generator("fold")
    k, v = (jnp.asarray(rng.normal(size=(1, 1, 2, 10, 16)), jnp.float32) for _ in range(2))
    tables = {"features": weights_of(ONE)}
    arrival = jnp.zeros((1, 1, 2, 10), jnp.int32)
    empty = state.empty(SPEC, 1, 1, 2, 16, 0.25)
    absorb = jax.jit(state.absorb, static_argnums=4)
    once, _ = absorb(empty, k, v, arrival, SPEC, tables)
    order = np.asarray(rng.permutation(10))
    part = empty
    for i in (order[:5], order[5:]):
        part, _ = absorb(part, k[..., i, :], v[..., i, :], arrival[..., i], SPEC, tables)
    np.testing.assert_allclose(once.sums, part.sums, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(once.mass, part.mass, rtol=1e-5)
    q = jnp.asarray(rng.normal(size=(1, 3, 4, 16)), jnp.float32)
    first = lambda x: jax.tree.map(lambda y: y[0], x)  # noqa: E731
    attend = jax.jit(state.attend, static_argnums=2)
    query = Query(q, jnp.full((1, 3), 40), 0.25)
    out, _ = attend(first(once), query, SPEC, first(tables))
    for h in range(4):  # all features are at least 0
        assert (out[0, :, h] >= v[0, 0, h // 2].min(axis=0) - 1e-5).all()
        assert (out[0, :, h] <= v[0, 0, h // 2].max(axis=0) + 1e-5).all()
    small = jax.tree.map(lambda x: x * 1e-9, once)  # a little mass counts as 1e-6
    _, lse = attend(first(small), query, SPEC, first(tables))
    np.testing.assert_allclose(lse, np.log(1e-6), rtol=1e-6)


def test_features_of_the_exact_kernel_give_full_attention():
    """Random features come near exp(q.k): few per cent with 4,096 of them and norms near 1."""
    rng = generator("kernel")
    q, k, v = (jnp.asarray(0.5 * rng.normal(size=s), jnp.float32)
               for s in ((1, 30, 4, 8), (1, 2, 30, 8), (1, 2, 30, 8)))  # fmt: skip
    pos = jnp.arange(30)[None]
    query = Query(q, pos, 8**-0.5)
    want, _ = attend_rows(query, k, v, pos)
    rule = less.Lambda(2, 5)
    run = jax.jit(lambda features: less.parallel(query, k, v, pos, rule, features))
    got, alone = run(state.RandomFeatures(4096)), run(None)
    assert abs(got - want).max() < 0.03 < 0.3 < abs(alone - want).max()


def test_training_beats_the_tokens_that_the_state_is_worth(tmp_path):
    """A state of 8 features is worth 8 * 17 / 32, five tokens. What five more recent tokens mend of
    a random model's attention, which is broad, is less than what the state does."""
    model, tokens = model_of(ONE), random_ids(48, "train", rows=64)
    recipe = kvjax.recipe("less", slots=8)
    tables = less.features(model, recipe, tokens, inner=16, epochs=4, dropout=0.0, batch=6,
                           learning_rate=0.03, out=tmp_path / "run", progress=False)  # fmt: skip
    rule = less.policy(recipe, 48)
    assert rule == less.Lambda(4, 5)
    fresh = jnp.asarray(random_ids(48, "test", rows=8))

    @functools.partial(jax.jit, static_argnums=0)
    def error(rule, weights=None):
        errors = less.Errors(rule, 14)
        return less.layer_errors(model.params, ONE, fresh, errors, weights)["error"][0]

    alone, plus = error(rule), error(less.Lambda(4, 10))
    got = error(rule, tables["features"])
    begin = error(rule, less.start(ONE, jax.random.key(0), inner=16))
    assert abs(begin - alone) < 1e-3 * alone
    assert got < 0.9 * plus < plus < alone
    history = loop.record.history(tmp_path / "run")
    assert history[-1]["evaluate"] < 0.9 and history[-1]["learning_rate"] == pytest.approx(0.03 / 8)


def test_the_rate_halves_in_each_quarter():
    rates = loop.learning_rates(TrainConfig(8, 1.0, schedule="halving"))
    assert [float(rates(i)) for i in range(8)] == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_what_does_not_fit_is_refused():
    ids = random_ids(20, "less")
    bare = dataclasses.replace(model_of(), tables={})
    with pytest.raises(kvjax.InputError, match="needs learned features"):
        kvjax.prefill(bare, ids, RECIPE, max_length=64)
    narrow = less.start(dataclasses.replace(PLAIN, head_dim=8), jax.random.key(0), inner=4)
    with pytest.raises(kvjax.InputError, match=r"\(2, 8, 8\).*\(2, 16, 8\)"):
        kvjax.prefill(model_of(weights=narrow), ids, RECIPE, max_length=64)
    other = kvjax.recipe("key_norm", when="during", fold="less")
    for recipe, words in ((kvjax.recipe("streaming_llm"), "folds nothing"), (other, "'oldest'")):
        with pytest.raises(kvjax.InputError, match=words):
            less.features(bare, recipe, ids)
    with pytest.raises(kvjax.InputError, match="leave no batch"):
        less.features(bare, RECIPE, ids)


@pytest.mark.full
def test_a_real_model_beats_the_tokens_that_the_state_is_worth():
    """The first layer alone, a tenth of 256 tokens kept: its error is below that of 8 * 65 / 128,
    five tokens more."""
    model = kvjax.load()
    config = dataclasses.replace(model.config, pattern=model.config.pattern[:1])
    assert isinstance(model.params.blocks, tuple)
    params = model.params.replace(blocks=model.params.blocks[:1])
    model = dataclasses.replace(model, params=params, config=config)
    recipe = kvjax.recipe("less", slots=26)
    tokens = less.sequences(model, [moby_dick()[20_000:120_000]], 256, 44)
    tables = less.features(model, recipe, tokens[:-4], inner=128, epochs=8, progress=False)
    rule = less.policy(recipe, 256)
    fresh = jnp.asarray(tokens[-4:])

    def error(rule, weights=None):
        errors = less.Errors(rule, 40)
        return float(less.layer_errors(params, config, fresh, errors, weights)["error"][0])

    assert error(rule, tables["features"]) < error(less.Lambda(4, rule.recent + 5)) < error(rule)
