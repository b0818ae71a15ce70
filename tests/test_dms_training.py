"""DMS: the training mask, the divergence, the target, and a run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MAX, generator, model, random_ids, small
from gating import M, gate_of
from hard import held

import kvjax
from kvjax.attention import Query
from kvjax.train import TrainConfig, dms, loop  # pyright: ignore[reportMissingImports]

W, T = 4, 24


def test_the_soft_mask_is_the_dense_one():
    """Two kv heads of two query heads, in float64: log sigmoid of minus the noisy logit beyond the
    window, nothing within."""
    rng, s, w = generator("soft"), 12, 3
    q, k, v = (rng.normal(size=x).astype(np.float32) for x in ((1, s, 4, 8), *[(1, 2, s, 8)] * 2))
    hidden = rng.normal(size=(1, s, M)).astype(np.float32)
    gate = {name: x[0] * (0.01 if name == "weight" else 1) for name, x in gate_of().items()}
    pos, key = jnp.arange(s)[None], jax.random.key(3)
    mixer, query = dms.Masked(w, 0.5), Query(jnp.asarray(q), pos, 8**-0.5)
    (out, _), seen = mixer.mix(query, jnp.asarray(k), jnp.asarray(v), pos,
                               {"gate": gate, "key": key}, None, jnp.asarray(hidden))  # fmt: skip
    x = hidden[0].astype(np.float64)
    x = x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + 1e-6) * np.asarray(gate["norm"])
    said = (100 * (x @ np.asarray(gate["weight"], np.float64)) - 5).T  # [n t]
    said = (said + np.asarray(jax.random.logistic(key, (1, 2, s)))[0]) / 0.5
    at, soft = np.arange(s), -np.logaddexp(0.0, said)
    for h in range(4):
        bias = np.where(at[:, None] - at > w, np.roll(soft[h // 2], -1), 0.0)
        weight = q[0, :, h].astype(np.float64) @ k[0, h // 2].T * 8**-0.5 + bias
        weight = np.where(at <= at[:, None], np.exp(weight), 0.0)
        want = weight @ v[0, h // 2] / weight.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[0, :, h], want, atol=1e-5)
    assert float(seen["tokens"]) == 2 * (s - 1)
    shut = (1 / (1 + np.exp(-said[:, 1:]))).sum()
    assert float(seen["closed"]) == pytest.approx(shut, rel=1e-4)


def test_the_divergence_is_that_of_the_student():
    """sum p_student (log p_student - log p_teacher), a mean over tokens, here in two blocks."""
    rng = generator("kl")
    one_, two = (jnp.asarray(rng.normal(size=(2, 70, M)), jnp.float32) for _ in range(2))
    logs = [jax.nn.log_softmax(x @ model().params.embed.T) for x in (one_, two)]
    want = jnp.mean(jnp.sum(jnp.exp(logs[0]) * (logs[0] - logs[1]), axis=-1))
    np.testing.assert_allclose(dms.divergence(model().params, one_, two), want, rtol=1e-4)


def test_the_target_is_the_cards():
    """1 to 16 over 510 steps: 8 at step 238."""
    assert dms.target(0, 510, 16.0) == 0.0
    assert dms.target(238, 510, 16.0) == pytest.approx(1 - 1 / 8)
    assert dms.target(900, 510, 16.0) == pytest.approx(1 - 1 / 16)


def test_training_closes_gates(monkeypatch):
    """From almost none to near the target of one half; the model stays; and the tables work."""
    monkeypatch.setattr(loop.record, "plot", lambda *args: None)
    config = TrainConfig(40, 3e-3, clip=1.0, log_every=1)
    texts = random_ids(T, "train", rows=4)
    done = dms.gates(model(), texts, window=W, ratio=2.0, ramp=20, batch=2, config=config,
                     progress=False)  # fmt: skip
    closed = [x["metrics"]["closed"] for x in done.history]
    assert closed[0] < 0.05 and np.mean(closed[-5:]) > 0.35
    assert all(np.isfinite(x["metrics"]["divergence"]) for x in done.history)
    assert (
        done.history[0]["metrics"]["target"] == 0 and done.history[-1]["metrics"]["target"] == 0.5
    )
    assert (done.params["model"].embed == model().params.embed).all()
    one_ = dms.put(model(), dms.tables(done))
    logits, cache = kvjax.prefill(one_, texts, small("dms", keep=1.0), max_length=MAX)
    assert np.isfinite(logits).all()
    assert min(len(x) for heads in held(cache) for x in heads) < T
