"""A line without noise to train on, for tests of the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.train import (  # pyright: ignore[reportMissingImports]
    TrainConfig,
    loop,
    train,
)

CONFIG = TrainConfig(8, learning_rate=0.1, schedule="linear", log_every=1, save_every=2)
WEIGHTS = np.asarray([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]], np.float32)
START = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}


def batches(step):
    """Sixteen points of a line without noise, by the step."""
    x = np.random.default_rng(step).standard_normal((16, 3)).astype(np.float32)
    return {"x": x, "y": x @ WEIGHTS + 1}


def loss(params, batch, key):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2), {"largest": jnp.max(jnp.abs(error))}


def run(out=None, config=CONFIG, source=batches, **options):
    return train(loss, START, source, config, out=out, progress=False, **options)


def same(a, b):
    """Whether two trees are equal bit for bit."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def until(step, error):
    """The batches, of which one raises."""

    def source(i):
        if i == step:
            raise error
        return batches(i)

    return source


@pytest.fixture(scope="module", name="whole")
def whole_run(tmp_path_factory):
    """An uninterrupted run, and its folder."""
    out = tmp_path_factory.mktemp("train") / "whole"
    return run(out), out


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Only the whole run draws one."""
    monkeypatch.setattr(loop.record, "plot", lambda *args: None)
