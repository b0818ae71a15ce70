"""What rows amount to: bootstrap, paired differences, calibration, claims, tables, plots."""

import json

import numpy as np
import pytest

from kvjax import cli
from kvjax.errors import InputError
from kvjax.eval import check, rows, stats, tables
from kvjax.eval.items import Ask, Item
from kvjax.eval.results import Results
from kvjax.eval.score import Heard

HEADER = {
    "kind": "run", "format": 1, "command": "kvjax eval", "date": "2026-11-30", "commit": None,
    "config": {"models": ["m"], "recipes": {}, "tasks": {}, "seed": 0, "query": "agnostic",
               "peers": {}},
    "versions": {"jax": "1"}, "hardware": {"cpu": "x"},
}  # fmt: skip


def line(task, item, recipe, asks, held=100, model="m"):
    return {"kind": "row", "model": model, "task": task, "item": item, "recipe": recipe,
            "hash": "h", "code": "c", "held": held, "live": held / 2, "entries": 8.0,
            "asks": asks}  # fmt: skip


def right(*values):
    return [{"lp": -1.0 - (1 - x), "n": 2, "right": x} for x in values]


def test_intervals_resample_items_and_not_asks():
    rng = np.random.default_rng(1)
    hits = rng.integers(0, 2, 60).astype(float)
    apart = stats.mean(hits.tolist(), [1] * 60)
    together = stats.mean((5 * hits[:12]).tolist(), [5] * 12)  # five equal asks on each of twelve
    assert apart.asks == together.asks == 60 and together.items == 12
    assert together.high - together.low > 1.8 * (apart.high - apart.low)


def test_the_interval_of_a_mean_is_the_one_of_theory():
    values = np.random.default_rng(2).normal(3.0, 2.0, 400)
    found = stats.mean(values.tolist(), [1] * 400)
    half = 1.96 * values.std() / np.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    # the bootstrap of 2,000 resamples knows its quantiles to about 3%
    assert [found.low, found.high] == pytest.approx(
        [found.mean - half, found.mean + half], abs=0.02
    )


def test_pairing_narrows_a_difference():
    base = np.random.default_rng(3).normal(5.0, 3.0, 50)
    paired = stats.ratio((1.02 * base).tolist(), base.tolist())
    assert [paired.mean, paired.low, paired.high] == pytest.approx([0.02] * 3)


@pytest.mark.parametrize("kind, low, high, asks, says", [
    ("accuracy", -0.02, 0.01, 150, "equal"), ("accuracy", -0.04, 0.01, 150, "open"),
    ("accuracy", -0.20, -0.05, 150, "worse"), ("accuracy", -0.20, -0.05, 149, "few"),
    ("accuracy", 0.04, 0.10, 150, "equal"), ("loss", -0.01, 0.009, 150, "equal"),
    ("loss", 0.02, 0.05, 150, "worse"), ("loss", 0.005, 0.02, 150, "open"),
])  # fmt: skip
def test_claims(kind, low, high, asks, says):
    assert stats.claim(kind, stats.Mean(0.0, low, high, asks, asks), asks) == says


def test_accuracy_is_paired_by_item():
    lines = [line("t", i, "exact", right(1, 1)) for i in range(4)]
    lines += [line("t", i, "r", right(1, 0), held=25) for i in (0, 1, 3)]  # item 2 is not there yet
    exact, made = Results(HEADER, lines).summary
    assert (exact.value.mean, made.value.mean, made.change.mean) == (1.0, 0.5, -0.5)
    assert (made.items, made.asks, made.share, made.claim) == (3, 6, 0.25, "few")
    assert made.logprob_change.mean == -0.5
    assert (made.live, made.entries) == (12.5, 8.0)


def test_asks_that_need_no_far_text_do_not_count():
    needs = [{"lp": -1.0, "n": 1, "right": 1.0, "needs": True},
             {"lp": -1.0, "n": 1, "right": 1.0, "needs": False}]  # fmt: skip
    lines = [line("t", 0, "exact", needs), line("t", 0, "r", right(0, 1))]
    made = Results(HEADER, lines).summary[1]
    assert (made.value.mean, made.asks) == (0.0, 1)
    assert made.logprob_change.mean == -1.0


def test_two_recipes_are_compared_on_the_same_items():
    lines = [line("t", i, "exact", right(1)) for i in range(4)]
    lines += [line("t", i, "r", right(float(i > 0))) for i in range(4)]
    lines += [line("t", i, "s", right(float(i > 1))) for i in (3, 2, 1)]
    found = {s.recipe: s for s in Results(HEADER, lines).against("r").summary}
    assert found["s"].change.mean == pytest.approx(-1 / 3) and found["s"].items == 3
    assert (found["r"].change.mean, found["r"].claim, found["exact"].change.mean) == (0, "", 0.25)
    assert tables.matrix(Results(HEADER, lines).against("r"), "change")[0].startswith("against r:")
    with pytest.raises(InputError, match="unknown recipe in these results"):
        Results(HEADER, lines).against("snapkv")


def test_options_are_calibrated_without_labels():
    """A recipe that always prefers one option is still right where that option gains most."""
    heard = [("a", -1.0, -3.0), ("b", -1.5, -2.5), ("a", -0.9, -3.1), ("b", -1.4, -2.4)] * 3
    asks = [[{"lp": -1.0, "n": 1, "options": {"a": a, "b": b}, "answer": answer}]
            for answer, a, b in heard]  # fmt: skip
    lines = [line("t", i, "exact", ask) for i, ask in enumerate(asks)]
    found = Results(HEADER, lines)
    assert found.summary[0].value.mean == 1.0  # the raw choice would be "a" always: one half
    assert found.summary[0].chance == 0.5
    few = Results(HEADER, lines[:4])
    assert few.summary[0].value.mean == 0.5  # four asks say too little about what it prefers


@pytest.mark.parametrize("answer, right", [("x", 1.0), ("y", 0.0)])
def test_options_that_do_not_recur_are_not_calibrated(answer, right):
    """Each option's mean would be its own log-probability, and the first one would win."""
    lines = []
    for i in range(20):
        options = {f"{i}y": -3.0, f"{i}x": -1.0}
        ask = {"lp": -1.0, "n": 1, "options": options, "answer": f"{i}{answer}"}
        lines.append(line("t", i, "exact", [ask]))
    assert Results(HEADER, lines).summary[0].value.mean == right


@pytest.mark.parametrize("gain, dropped", [(3.0, []), (0.0, [("m", "t")])])
def test_a_task_with_far_answers_is_judged_by_what_the_far_text_tells(gain, dropped):
    """A small model may be right seldom and still know more with the far text than without."""
    noise = np.random.default_rng(6).normal(0.0, 1.0, 30).tolist()
    asks = [{"lp": -5.0, "n": 1, "right": 0.0, "needs": True, "lp_recent": -5.0 - gain + x}
            for x in noise]  # fmt: skip
    assert (
        Results(HEADER, [line("t", i, "exact", [a]) for i, a in enumerate(asks)]).dropped == dropped
    )


def test_chance_is_of_the_asks_that_count():
    asks = [{"lp": -1.0, "n": 1, "options": {"a": -1.0, "b": -2.0}, "answer": "a", "needs": True},
            {"lp": -1.0, "n": 1, "options": dict.fromkeys("abcdefghij", -1.0), "answer": "a",
             "needs": False},
            {"lp": -1.0, "n": 1}]  # fmt: skip
    assert Results(HEADER, [line("t", 0, "exact", asks)]).summary[0].chance == 0.5


def test_files_that_do_not_belong_together_are_not_shown_together(tmp_path):
    def file(name, head, lines):
        path = tmp_path / name
        path.write_text("".join(json.dumps(x) + "\n" for x in [head, *lines]))
        return path

    one = file("one", HEADER, [line("t", 0, "exact", right(1))])
    aware = HEADER | {"config": HEADER["config"] | {"query": "aware"}}
    two = file("two", aware, [line("t", 0, "r", right(1))])
    with pytest.raises(InputError, match="query-aware and query-agnostic"):
        Results.read(one, two)
    other = file("other", HEADER, [line("t", 0, "r", right(1)) | {"hash": "another"}])
    with pytest.raises(InputError, match="different items 0 of t"):
        Results.read(one, other)
    assert len(Results.read(one, file("more", HEADER, [line("t", 0, "r", right(0))])).rows) == 2


def test_losses_split_into_tokens_that_need_the_prefix():
    exact, recent = Heard([-1.0, -0.5, -3.0], [True] * 3), Heard([-1.5, -4.0, -6.0], [True] * 3)
    assert rows.keys(exact, recent) == [False, True, False]  # gains .5; 3.5; 3, but unlikely still
    item = Item((1, 2), (Ask((1,), (2, 3, 4), "loss"),), recent=1)
    row = rows.exact(item, [exact], None, [recent])["asks"][0]
    assert (row["lp"], row["lp_recent"], row["lp_key"], row["n_key"]) == (-4.5, -11.5, -0.5, 1)
    assert rows.masks({"asks": [row]}) == [[False, True, False]]
    other = Heard([-1.1, -2.0, -3.0], [True] * 3, kl=[0.1, 0.2, 0.3], top1=[True, False, True])
    made = rows.row(item, [other], None, rows.masks({"asks": [row]}))["asks"][0]
    assert (made["lp_key"], made["kl"], made["top1"]) == (-2.0, 0.2, 0.666667)
    found = Results(HEADER, [line("t", 0, "exact", [row]), line("t", 0, "r", [made])]).summary
    assert (found[0].kind, found[0].value.mean, found[0].chance) == ("loss", 1.5, 11.5 / 3)
    assert found[1].change.mean == pytest.approx(6.1 / 4.5 - 1)
    assert (found[0].key_loss.mean, found[1].key_loss.mean) == (0.5, 2.0)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 256])
def test_masks_are_packed(count):
    mask = (np.random.default_rng(count).random(count) < 0.5).tolist()
    assert rows.unpack(rows.pack(mask), count) == mask


def test_only_warm_runs_are_timed():
    lines = [line("t", 0, "exact", right(1)), line("t", 0, "r", right(1))]
    for s, compile_s in ((9.0, 3.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)):
        lines.append({"kind": "time", "model": "m", "task": "t", "item": 0, "recipe": "r",
                      "compress": {"s": s, "compile_s": compile_s}})  # fmt: skip
    assert Results(HEADER, lines).summary[1].compress_s == (2.0, 1.5, 2.5)


def some(count=30):
    rng = np.random.default_rng(5)
    lines = []
    for i in range(count):
        lines.append(line("niah@64", i, "exact", right(1, float(i % 4 > 0))))
        for keep in (0.25, 0.5):
            hits = (rng.random(2) < 0.9 * keep + 0.4).astype(float)
            lines.append(line("niah@64", i, f"snapkv@{keep}", right(*hits), held=100 * keep))
            lines.append(
                line("niah@64", i, f"kvpress:snapkv@{keep}", right(*hits), held=100 * keep)
            )
    return Results(HEADER, lines)


def test_tables_and_markdown():
    title, head, body = tables.matrix(some(), "change")
    assert head == ["recipe", "bytes", "niah"] and "query-agnostic" in title
    assert body[0][:2] == ["exact", "100%"] and body[1][:2] == ["snapkv@0.25", "25%"]
    text = tables.markdown(title, head, body)
    assert text.splitlines()[3] == "| --- | ---: | ---: |" and text.count("\n| ") == 7
    assert "[" in tables.details(some())[2][1][5]
    with pytest.raises(InputError, match="did you mean 'value'"):
        tables.matrix(some(), "values")


def test_plots_are_pictures_or_refused(tmp_path):
    some().plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert [p.name for p in tmp_path.iterdir()] == ["x.png"]
    with pytest.raises(InputError, match="unknown kind of picture"):
        some().plot(tmp_path / "x.pngg")
    with pytest.raises(InputError, match="there is no folder|cannot write"):
        some().plot(tmp_path / "no" / "x.png")


def test_frames_have_a_row_for_each_ask():
    frame = some(3).to_pandas()
    assert len(frame) == 3 * 5 * 2
    assert frame.groupby("recipe")["right"].mean()["exact"] == pytest.approx(5 / 6)


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "found.jsonl"
    found = some()
    path.write_text("".join(json.dumps(x) + "\n" for x in [HEADER, *found.lines]))
    return path


@pytest.mark.parametrize("flags", [[], ["--details"], ["--markdown"], ["--json"]])
def test_files_are_shown(results, flags, capsys):
    assert cli.main(["eval", "--show", str(results), *flags]) == 0
    out = capsys.readouterr().out
    assert "snapkv@0.25" in out
    assert results.with_suffix(".png").exists() == (flags in ([], ["--details"]))
    if flags == ["--json"]:
        assert [json.loads(x)["kind"] for x in out.splitlines()] == ["run"] + ["summary"] * 5


def test_a_check_finds_what_differs():
    old = some(2)
    lines = json.loads(json.dumps(old.lines))
    lines[1]["asks"][0]["lp"] -= 0.01
    lines[2]["hash"] = "other"
    lines[3]["asks"][0]["right"] = 1.0 - lines[3]["asks"][0]["right"]
    lines[4]["held"] += 1
    found = check.compare("f", HEADER | {"versions": {"jax": "0"}}, lines, old)
    assert (found.rows, found.same) == (10, 6) and found.worst == 1.0
    said = ("0.005 nats a token", "another item", "1 nats a token", "other bytes")
    assert all(text in line for text, line in zip(said, found.different, strict=True))
    assert found.changed == ["jax: 0 then, 1 now"]
    assert check.say(found, True) == 1
    assert check.say(check.compare("f", HEADER, old.lines, old), False) == 0


@pytest.mark.parametrize("words, says", [
    ("--recipe snapvk", "did you mean 'snapkv'?"),
    ("--task niah", "unknown task 'niah'"),
    ("--suit qwen", "did you mean '--suite'?"),
    ("--keep 0.5,2", "above 0 and at most 1, got '2'"),
    ("--keep half", "got 'half'"),
    ("--items 1.5", "expected a whole number above 0, got '1.5'"),
    ("--window 4", "option --window belongs to one recipe"),
    ("--show none.jsonl", "cannot read none.jsonl"),
    ("--check none.jsonl", "cannot read none.jsonl"),
    ("--model smollm2-135n", "did you mean 'smollm2-135m'?"),
    ("extra", "'extra' is one argument too many"),
    ("--quick --suite qwen", "leave out --quick or --suite"),
    ("--against snapkv@0.6", "did you mean 'snapkv@0.5'?"),
    ("--task niah_single,depth=high", "niah_single: depth must be of type float, got 'high'"),
    ("--task niah_single,depth=true", "niah_single: depth must be of type float, got True"),
    ("--task langid,path=5 --quick", "cannot read 5"),
    ("--task asked", "give it as asked,path=FILE"),
])  # fmt: skip
def test_bad_commands_are_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", *words.split()]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("kvjax: ") and error.count("\n") == 1
    assert not list(tmp_path.rglob("*.jsonl"))


def test_tasks_are_listed(capsys):
    assert cli.main(["eval", "--list"]) == 0
    out = capsys.readouterr().out
    assert "niah_single" in out and "suite smollm2" in out
