"""Training of the soft tokens of metasoft."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    generator,
    model,
    random_ids,
    small,
)
from training import no_curve  # noqa: F401

import kvjax
from kvjax.tables import load_tables, save_tables
from kvjax.train import TrainConfig, probes  # pyright: ignore[reportMissingImports]

IDS = random_ids(25, "metasoft")


def test_basis_becomes_orthonormal():
    """Rows of length 1 at right angles; the first keeps its direction; a good basis stays."""
    raw = jnp.asarray(generator("basis").normal(size=(5, 32)), jnp.float32)
    basis = np.asarray(probes.orthonormal(raw))
    np.testing.assert_allclose(basis @ basis.T, np.eye(5), atol=1e-6)
    assert basis[0] @ np.asarray(raw[0]) > 0.999 * np.linalg.norm(raw[0])
    np.testing.assert_allclose(probes.orthonormal(jnp.asarray(basis)), basis, atol=1e-6)


@pytest.mark.full
def test_training_lowers_the_loss_and_its_tables_work(tmp_path):
    """A tiny run, on the mean of the loss over sampled rows; the model and the size stay."""
    whole = dataclasses.replace(model(), tables={})
    texts = random_ids(20, "texts", rows=4)
    config = TrainConfig(30, learning_rate=0.02, log_every=1)
    run = probes.fit(whole, texts, length=16, later=4, count=2, rows=6, batch=4, config=config,
                     progress=False)  # fmt: skip
    losses = [line["loss"] for line in run.history]
    assert np.mean(losses[-6:]) < 0.9 * np.mean(losses[:6])
    begun = probes.start(whole, texts, 2, 6)
    np.testing.assert_array_equal(run.params["probes"]["size"], begun["size"])
    assert run.params["model"].embed is whole.params.embed
    assert abs(run.params["probes"]["basis"] - begun["basis"]).max() > 0.05
    made = probes.tables(run)
    basis = np.asarray(made["probes"]["basis"])
    np.testing.assert_allclose(basis @ basis.T, np.eye(6), atol=1e-5)
    save_tables(tmp_path / "metasoft.tables", made, whole)
    _, cache = kvjax.prefill(whole, IDS, max_length=40)
    back = load_tables(tmp_path / "metasoft.tables", whole)
    for tables in (made, back):
        mine = dataclasses.replace(whole, tables={"metasoft": tables})
        assert kvjax.condense(mine, cache, small("metasoft"), tokens=IDS).flags.sum() == 0


def test_divergence():
    want = jnp.asarray([[[[0.2, 0.6]]]])
    assert abs(probes.divergence(want, want * 3)) < 1e-6
    expected = 0.25 * np.log(0.25 / 0.5) + 0.75 * np.log(0.75 / 0.5)
    np.testing.assert_allclose(probes.divergence(want, want * 0 + 1), expected, rtol=1e-5)
