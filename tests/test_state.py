"""The state body: what eviction drops, as a sum of features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import Query
from kvjax.cache import state
from kvjax.config import LayerKind, ModelConfig, Spec
from kvjax.params import init_params

CONFIG = ModelConfig("llama", 50, 32, 48, 4, 2, 8, (LayerKind(),), (0, 0), 256)
FOLDED = kvjax.recipe("key_norm", when="during", slots=12, window=4, stride=2, page=8,
                      fold="random_features")  # fmt: skip

SPEC = Spec("random_features")


def tokens(key, shape):
    return 0.5 * jax.random.normal(jax.random.key(key), shape)


def test_many_features_come_near_exact_attention():
    """Unbiased features: with R = 4,096 and norms near 1 the output's error is a few per cent of
    the values' deviation, sqrt(var / R); with R = 64 it is some eight times that."""
    k, v, q = tokens(0, (1, 1, 2, 30, 8)), tokens(1, (1, 1, 2, 30, 8)), tokens(2, (1, 3, 4, 8))
    query = Query(q, jnp.full((1, 3), 40), 8**-0.5)
    logits = np.einsum("thd,hsd->ths", q[0], np.repeat(k[0, 0], 2, axis=0)) * 8**-0.5
    p = np.exp(logits)
    want = np.einsum("ths,hse->the", p, np.repeat(v[0, 0], 2, axis=0)) / p.sum(-1)[..., None]
    errors = []
    for count in (64, 4096):
        spec = Spec("random_features", (("count", count),))
        body = state.empty(spec, 1, 1, 2, 8, 8**-0.5)
        body, left = state.absorb(body, k, v, jnp.zeros((1, 1, 2, 30), jnp.int32), spec)
        out, lse = state.attend(jax.tree.map(lambda x: x[0], body), query, spec)
        errors.append((abs(out[0] - want).max(), abs(lse[0] - np.log(p.sum(-1))).max()))
        assert (left[2] == -1).all()
    assert errors[1][0] < 0.03 and errors[1][1] < 0.03
    assert errors[1][0] < errors[0][0]


def test_order_and_batching_of_arrivals_do_not_matter():
    k, v = tokens(3, (2, 1, 2, 10, 8)), tokens(4, (2, 1, 2, 10, 8))
    start = state.empty(SPEC, 2, 1, 2, 8, 1.0)
    arrival = jnp.zeros((2, 1, 2, 10), jnp.int32)
    once, _ = state.absorb(start, k, v, arrival, SPEC)
    part = start
    for i in (7, 2, 9, 0, 1, 3, 8, 4, 6, 5):
        one = slice(i, i + 1)
        part, _ = state.absorb(part, k[..., one, :], v[..., one, :], arrival[..., :1], SPEC)
    np.testing.assert_allclose(once.sums, part.sums, rtol=1e-5, atol=1e-6)  # float32 sums of ten
    np.testing.assert_allclose(once.mass, part.mass, rtol=1e-5)


def test_output_is_a_mean_of_what_was_taken_and_nothing_before():
    k, v = tokens(5, (1, 2, 2, 6, 8)), tokens(6, (1, 2, 2, 6, 8))
    query = Query(tokens(7, (2, 1, 4, 8)), jnp.array([[9], [9]]), 1.0)
    arrival = jnp.broadcast_to(
        jnp.array([0, -1])[None, :, None, None], (1, 2, 2, 6)
    )  # one row only
    body, _ = state.absorb(state.empty(SPEC, 1, 2, 2, 8, 1.0), k, v, arrival, SPEC)
    out, lse = state.attend(jax.tree.map(lambda x: x[0], body), query, SPEC)
    low, high = (np.repeat(f(v[0, 0], axis=1), 2, axis=0) for f in (np.min, np.max))
    assert (out[0, 0] >= low - 1e-5).all() and (out[0, 0] <= high + 1e-5).all()
    assert (out[1] == 0).all() and (lse[1] < -1e29).all()


def test_chain_takes_exactly_what_eviction_drops():
    params = init_params(CONFIG, jax.random.key(0), std=0.3)
    ids = jax.random.randint(jax.random.key(1), (2, 40), 0, 50)
    cache = kvjax.init_cache(CONFIG, FOLDED, 2, 64)
    _, new = kvjax.look(params, CONFIG, None, ids)
    cache = jax.jit(kvjax.absorb_long)(cache, new)
    body, folded = cache.groups[0].bodies
    held = np.where(body.pos[..., :] == 65535, -1, body.pos.astype(jnp.int32)).reshape(2, 2, 2, -1)
    phi = state.RandomFeatures()
    k = np.moveaxis(new.k, 3, 2)  # [l b n t d]
    f = np.asarray(phi(jnp.asarray(k) * CONFIG.scale**0.5))
    for layer, row, head in np.ndindex(2, 2, 2):
        kept = set(held[layer, row, head].tolist()) | set(range(36, 40))
        dropped = [t for t in range(40) if t not in kept]
        assert len(dropped) == 40 - 12
        want = f[layer, row, head, dropped].sum(0)
        np.testing.assert_allclose(folded.mass[layer, row, head], want, rtol=1e-4)


def test_nothing_dropped_is_exact_and_a_reset_row_is_empty():
    params = init_params(CONFIG, jax.random.key(0), std=0.3)
    ids = jax.random.randint(jax.random.key(1), (2, 12), 0, 50)
    want, _ = kvjax.look(params, CONFIG, None, ids)
    cache = kvjax.init_cache(CONFIG, FOLDED, 2, 64)
    look = jax.jit(lambda cache, ids: kvjax.look(params, CONFIG, cache, ids))
    absorb = jax.jit(kvjax.absorb_long)
    cache = absorb(cache, look(cache, ids[:, :11])[1])
    got, new = look(cache, ids[:, 11:])
    np.testing.assert_allclose(got[:, 0], want[:, 11], atol=1e-4)  # logits of order 10
    for _ in range(4):
        cache = absorb(cache, new)
    folded = kvjax.reset(cache, 0).groups[0].bodies[1]
    assert (folded.mass[:, 0] == 0).all() and (folded.mass[:, 1] > 0).any()


def test_fold_without_a_streaming_scorer_is_refused():
    for bad in (kvjax.recipe("key_norm", fold="random_features"),):
        with pytest.raises(kvjax.InputError, match="when='during'"):
            kvjax.init_cache(CONFIG, bad, 1, 64)
    with pytest.raises(kvjax.InputError, match="random_features"):
        kvjax.recipe("key_norm", fold="random_feature")


def test_saved_and_loaded_bit_for_bit(tmp_path):
    params = init_params(CONFIG, jax.random.key(0), std=0.3)
    model = kvjax.Model(params, CONFIG, None)
    ids = np.asarray(jax.random.randint(jax.random.key(1), (2, 40), 0, 50))
    _, cache = kvjax.prefill(model, ids, FOLDED, max_length=64)
    kvjax.save_cache(tmp_path / "c", cache, model)
    back = kvjax.load_cache(tmp_path / "c", model, recipe=FOLDED)
    assert jax.tree.structure(back) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(cache), strict=True):
        np.testing.assert_array_equal(a, b)
