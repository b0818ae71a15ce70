"""The trainer: steps by hand, frozen leaves, resumption to the same bits, stops that save first."""

import dataclasses
import importlib.util
import io
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rich.console
from flax import nnx

from kvjax import config as configs
from kvjax.errors import InputError
from kvjax.train import (  # pyright: ignore[reportMissingImports]
    TrainConfig,
    TrainingStopped,
    history,
    loop,
    plot,
    restore,
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and its folder."""
    out = tmp_path_factory.mktemp("train") / "whole"
    return run(out), out


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Only the whole run draws one."""
    monkeypatch.setattr(loop.record, "plot", lambda *args: None)


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


def test_a_killed_run_goes_on_to_the_same_bits(whole, tmp_path):
    """Killed before the sixth batch, it stands at the fourth update; the fifth is done again."""
    (done, folder), out = whole, tmp_path / "killed"
    with pytest.raises(MemoryError):
        run(out, source=until(5, MemoryError()))
    assert [x["step"] for x in history(out)] == [1, 2, 3, 4, 5]
    with open(out / "log.jsonl", "ab") as log:
        log.write(b'{"kind":"step","st')  # torn
    assert [x["step"] for x in history(out)] == [1, 2, 3, 4, 5]
    asked = []
    again = run(out, source=lambda step: asked.append(step) or batches(step))
    assert asked == [4, 5, 6, 7] and again.step == 8
    assert same(again.params, done.params)
    lines = [json.loads(x) for x in (out / "log.jsonl").read_text().splitlines()]
    assert [(x["kind"], x["step"]) for x in lines if x["kind"] == "run"] == [("run", 0), ("run", 4)]
    timeless = [
        [{k: v for k, v in x.items() if k not in ("s_per_step", "compile_s")} for x in lines]
        for lines in (again.history, history(folder), history(out))
    ]
    assert timeless[0] == timeless[1] == timeless[2]
    finished = run(out, source=until(0, AssertionError("nothing is left to do")))
    assert same(finished.params, done.params) and len(finished.history) == 8


def test_the_log_says_what_ran(whole):
    done, out = whole
    head = json.loads((out / "log.jsonl").read_text().splitlines()[0])
    assert head["config"] == json.loads(configs.to_json(CONFIG))
    assert head["parameters"] == {"b": "float32[2]", "w": "float32[3,2]"}
    assert head["versions"]["jax"] == jax.__version__ and "python" in head["command"]
    assert head["device"].startswith("cpu")
    assert configs.from_json(TrainConfig, configs.to_json(CONFIG)) == CONFIG
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))
    line = history(out)[-1]
    assert done.history[0]["s_per_step"] is None  # the first step is cold
    assert line == done.history[-1] and line["metrics"]["largest"] > 0 and line["s_per_step"] > 0
    assert sorted(x.name for x in (out / "checkpoints").iterdir()) == ["6", "8"]
    assert (out / "loss.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_another_run_is_refused(whole):
    _, out = whole
    before = (out / "log.jsonl").read_bytes()
    for change, words in (
        ({"config": dataclasses.replace(CONFIG, learning_rate=0.2)},
         "made with learning_rate = 0.1 and this run has 0.2; give another folder"),
        ({"frozen": lambda path: path == "b"},
         'made with b = "float32.2." and this run has "frozen float32.2. sha256'),
        ({"resume": False}, "holds checkpoints and resume is False; give another folder"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            run(out, **change)
    assert (out / "log.jsonl").read_bytes() == before
    with pytest.raises(InputError, match="holds log.jsonl but no log|holds 6 but no log.jsonl"):
        run(out / "checkpoints")
    with pytest.raises(InputError, match="has no checkpoint 3; it has .6, 8."):
        restore(out, START, 3)
    with pytest.raises(InputError, match=r"made with w = float32\[3,2\] and params has float32"):
        restore(out, START | {"w": jnp.zeros(3)})
    with pytest.raises(InputError, match="give the folder of a training run"):
        history(out / "nowhere")


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with pytest.raises(InputError, match="another run is writing"):
        run(tmp_path / "run", on_step=lambda step, params: run(tmp_path / "run"))


def test_what_is_no_number_stops_the_run_and_saves_first(tmp_path):
    """Batch 3 has a NaN: the state is that after three updates, in memory and in the folder."""
    seen = {}

    def poisoned(step):
        made = batches(step)
        return made | {"y": made["y"] * np.nan} if step == 3 else made

    out = tmp_path / "run"
    with pytest.raises(
        TrainingStopped, match="batch 3 gave loss nan.* rate 0.0625; .*lower"
    ) as info:
        run(out, source=poisoned, on_step=lambda n, p: seen.update({n: jax.tree.map(np.array, p)}))
    assert f"the state after 3 updates is saved in {out}/checkpoints/3" in str(info.value)
    assert info.value.trained.step == 3 == max(seen)
    assert same(info.value.trained.params, seen[3]) and same(restore(out, START), seen[3])
    assert same(restore(out, START, 2), seen[2])
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["batch"], last["loss"]) == ("stopped", 3, 3, None)
    with pytest.raises(TrainingStopped, match="nothing was saved, as there is no folder"):
        run(source=poisoned)


def test_an_interrupt_saves_and_the_same_call_goes_on(whole, tmp_path, request):
    done, _ = whole

    def pressed(step):
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return batches(step)

    # a shell that starts this in the background has it ignore interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    rarely = dataclasses.replace(CONFIG, save_every=100)
    with pytest.raises(KeyboardInterrupt, match="after 5 updates is saved in .*/5; .*goes on"):
        run(tmp_path / "run", rarely, pressed)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert same(run(tmp_path / "run", rarely).params, done.params)


def test_the_best_is_kept(tmp_path):
    """Values 3, 1, NaN, 2 at updates 2, 4, 6, 8: the last two stay, and 4."""
    values, seen = iter([3.0, 1.0, np.nan, 2.0]), {}
    out = tmp_path / "run"
    run(out, evaluate=lambda params: next(values),
        on_step=lambda n, p: seen.update({n: jax.tree.map(np.array, p)}))  # fmt: skip
    assert sorted(x.name for x in (out / "checkpoints").iterdir()) == ["4", "6", "8"]
    assert same(restore(out, START, "best"), seen[4]) and same(restore(out, START), seen[8])
    found = {x["step"]: x["evaluate"] for x in history(out) if "evaluate" in x}
    assert found == {2: 3.0, 4: 1.0, 6: None, 8: 2.0}


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

    assert not drawn(True, lambda: asks(True))  # over before two seconds
    monkeypatch.setattr(loop, "SHOWN_AFTER_S", 0.0)
    assert "compiling" in drawn(True, lambda: train(loss, START, batches, CONFIG))
    assert not drawn(True, lambda: asks(False)) and not drawn(False, lambda: asks(True))
    assert capfd.readouterr() == ("", "")


def test_no_curve_without_matplotlib(whole, monkeypatch):
    done, _ = whole
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plot(done.history) is None
