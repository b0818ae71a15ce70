"""The trainer's folder: resumption to the same bits, stops that save first, what is refused."""

import dataclasses
import importlib.util
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training import CONFIG, START, batches, no_curve, run, same, until, whole_run  # noqa: F401

from kvjax import config as configs
from kvjax.errors import InputError
from kvjax.train import (  # pyright: ignore[reportMissingImports]
    TrainConfig,
    TrainingStopped,
    history,
    plot,
    restore,
)


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


def test_no_curve_without_matplotlib(whole, monkeypatch):
    done, _ = whole
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plot(done.history) is None
