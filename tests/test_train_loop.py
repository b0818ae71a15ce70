"""The trainer: steps by hand, frozen leaves, resumption to the same bits, stops that save first."""

import dataclasses
import io
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rich.console
from flax import nnx
from training import CONFIG, START, WEIGHTS, batches, loss, no_curve, run, same, whole_run  # noqa: F401

from kvjax.errors import InputError
from kvjax.train import (  # pyright: ignore[reportMissingImports]
    TrainConfig,
    TrainingStopped,
    loop,
    restore,
    train,
)


def test_the_first_steps_by_hand():
    """Adam's first step is the learning rate against the sign; adamw decays the parameter besides.

    The loss 3a - 4b has the gradient (3, -4) of norm 5 wherever one stands. Adam divides by the
    root of 1 - 0.999, which float32 holds to 1e-5 of itself.
    """
    params = {"a": jnp.float32(2), "b": jnp.float32(-1)}

    def slope(params, batch, key):
        return 3 * params["a"] - 4 * params["b"]

    one = TrainConfig(1, learning_rate=0.5)
    done = train(slope, params, lambda step: 0, one)
    assert done.params == {"a": pytest.approx(1.5, rel=1e-5), "b": pytest.approx(-0.5, rel=1e-5)}
    line = done.history[0]
    assert (line["loss"], line["grad_norm"], line["learning_rate"]) == (10, 5, 0.5)
    decayed = dataclasses.replace(one, optimizer="adamw", weight_decay=0.1, clip=1.0)
    done = train(slope, params, lambda step: 0, decayed)
    assert float(done.params["a"]) == pytest.approx(2 - 0.5 - 0.1, rel=1e-5)
    assert float(done.params["b"]) == pytest.approx(-1 + 0.5 + 0.05, rel=1e-5)


def test_learning_rates_by_hand():
    """Four steps up to 1, then down over four: the fifth is the highest, a ninth would be zero."""
    rates = {
        name: [
            float(loop.learning_rates(TrainConfig(8, 1.0, warmup=4, schedule=name))(i))
            for i in range(9)
        ]
        for name in ("constant", "linear", "cosine")
    }
    rise = [0.2, 0.4, 0.6, 0.8]
    half = 0.5**0.5 / 2
    assert rates["constant"] == pytest.approx([*rise, 1, 1, 1, 1, 1])
    assert rates["linear"] == pytest.approx([*rise, 1, 0.75, 0.5, 0.25, 0])
    assert rates["cosine"] == pytest.approx([*rise, 1, 0.5 + half, 0.5, 0.5 - half, 0], abs=1e-7)
    assert float(loop.learning_rates(TrainConfig(8, 0.3))(0)) == np.float32(0.3)


def test_regression_finds_the_weights_and_compiles_once():
    traces = []

    def counted(*args):
        traces.append(1)
        return loss(*args)

    done = train(counted, START, batches, TrainConfig(300, 0.1, schedule="cosine"))
    np.testing.assert_allclose(done.params["w"], WEIGHTS, atol=1e-3)  # seen: 1e-5
    np.testing.assert_allclose(done.params["b"], 1, atol=1e-3)
    assert len(traces) == 1
    assert [x["step"] for x in done.history] == list(range(10, 301, 10))
    assert [x["learning_rate"] for x in done.history][0] > done.history[-1]["learning_rate"]
    assert "compile_s" in done.history[0] and "compile_s" not in done.history[1]
    assert not START["w"].any()  # the caller's arrays are not donated


def test_frozen_leaves_have_no_gradient_and_no_optimizer_state(tmp_path):
    """The gradient of a root at zero is infinite, and would stop the run if it were taken."""
    params = {
        "gate": jnp.ones(2),
        "base": {"root": jnp.zeros(2), "order": jnp.arange(2)},
        "none": jnp.zeros((0, 3)),
    }

    def root(params, batch, key):
        base = params["base"]
        return jnp.sum((params["gate"] + jnp.sqrt(base["root"]) - base["order"]) ** 2)

    def frozen(path):
        return path == "base.root"

    tree = {"gate": False, "base": {"root": True, "order": False}, "none": False}
    for given in (frozen, tree):
        trained, rest = loop.split(params, given)
        assert [*trained, *rest] == ["gate", "base.order", "base.root", "none"]
    with pytest.raises(TrainingStopped, match="gradient norm (nan|inf)"):
        train(root, params, lambda step: 0, CONFIG)
    config = dataclasses.replace(CONFIG, save_every=8)
    done = train(root, params, lambda step: 0, config, frozen=frozen, out=tmp_path / "run")
    assert same(done.params["base"], params["base"]) and done.params["none"].shape == (0, 3)
    assert not np.array_equal(done.params["gate"], params["gate"])
    saved = ocp.StandardCheckpointer().restore(tmp_path / "run/checkpoints/8/optimizer")
    held = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(saved)[0]]
    assert [x for x in held if "gate" in x] and not [x for x in held if "base" in x]
    assert same(restore(tmp_path / "run", params), done.params)
    changed = params | {"base": params["base"] | {"order": jnp.ones(2, int)}}
    with pytest.raises(InputError, match='made with base.order = "frozen int32.2. sha256 .* has'):
        train(root, changed, lambda step: 0, config, frozen=frozen, out=tmp_path / "run")


def test_modules_and_half_precision_train():
    """What nnx exports, in bfloat16, with keys among the leaves."""
    gate = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    state = nnx.state(gate)
    params = {"gate": nnx.to_pure_dict(state), "key": jax.random.key(0)}

    def noisy(params, batch, key):
        noise = jax.random.uniform(key)
        found = batch["x"] @ params["gate"]["kernel"] + params["gate"]["bias"]
        wrong = jnp.abs(found + noise - batch["y"]).astype(jnp.bfloat16)
        return jnp.mean(wrong), {"noise": noise}

    done = train(noisy, params, batches, dataclasses.replace(CONFIG, clip=1.0, seed=3))
    assert done.params["gate"]["kernel"].dtype == jnp.bfloat16
    assert done.history[-1]["loss"] < done.history[0]["loss"]
    for i in (0, 7):  # each step has a key of its own
        drawn = jax.random.uniform(jax.random.fold_in(jax.random.key(3), i))
        assert done.history[i]["metrics"]["noise"] == float(drawn)


@pytest.mark.parametrize("change, words", [
    ({"steps": 0}, "steps is 0; give a whole number, 1 or more"),
    ({"steps": 1e3}, "steps is 1000.0; give a whole number, 1 or more"),
    ({"learning_rate": 0.0}, "learning_rate is 0.0; give a finite number above 0"),
    ({"clip": -1.0}, "clip is -1.0; give a finite number above 0"),
    ({"warmup": 8}, "warmup is 8 of 8 steps; give fewer"),
    ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
    ({"optimizer": "adamx"}, "unknown optimizer 'adamx'; did you mean 'adam'?"),
    ({"weight_decay": 0.1}, "weight_decay is 0.1; give 0, or more to 'adamw'"),
])  # fmt: skip
def test_wrong_settings(change, words):
    with pytest.raises(InputError) as error:
        dataclasses.replace(CONFIG, **change)
    assert str(error.value) == words


def test_wrong_arguments():
    def smaller(step):
        return jax.tree.map(lambda x: x[: 16 - step], batches(step))

    with pytest.raises(InputError, match=r"batch 1 has x = float32\[15,3\] and the first one had "
                       r"float32\[16,3\]; pad it, or leave a smaller last batch out"):  # fmt: skip
        run(source=smaller)
    with pytest.raises(InputError, match="batches is a list; give a function of the step"):
        run(source=[batches(0)])
    with pytest.raises(InputError, match="all 2 parameters are frozen; leave one to train"):
        run(frozen=lambda path: True)
    with pytest.raises(InputError, match="only one of params and frozen has 'b'"):
        run(frozen={"w": True})
    with pytest.raises(InputError, match=r"the loss is float32\[2\]; give a scalar"):
        train(lambda params, batch, key: params["b"], START, batches, CONFIG)
    with pytest.raises(InputError, match="two parameters are called 'a.b'"):
        train(loss, {"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}, batches, CONFIG)


def test_progress_is_for_terminals(monkeypatch, capfd):
    def drawn(terminal, begun):
        text = io.StringIO()
        console = rich.console.Console(file=text, force_terminal=terminal)
        monkeypatch.setattr(loop, "Console", lambda stderr: console)
        begun()
        return text.getvalue()

    def asks(progress):
        with loop._bar(0, 9, progress) as tick:
            tick(1, "loss 2")

    def slow(*args):  # as a model's is: a bar draws itself every tenth of a second
        time.sleep(0.5)
        return loss(*args)

    assert not drawn(True, lambda: asks(True))  # over before two seconds
    monkeypatch.setattr(loop, "SHOWN_AFTER_S", 0.0)
    assert "compiling" in drawn(True, lambda: train(slow, START, batches, CONFIG))
    assert not drawn(True, lambda: asks(False)) and not drawn(False, lambda: asks(True))
    assert capfd.readouterr() == ("", "")
