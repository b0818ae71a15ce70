"""`kvjax bench speed`: its arguments, and the arithmetic of its report. Nothing is timed."""

import json
import os
import shlex
import sys

import pytest

from kvjax import cli
from kvjax.errors import InputError
from kvjax.eval import speed
from kvjax.eval import speed_report as report

BAD = [
    ("--contexts 0", "--contexts takes whole numbers above 0, got '0'"),
    ("--contexts 512,x", "got 'x'"),
    ("--repeats 1.5", "--repeats takes whole numbers above 0, got '1.5'"),
    ("--recipes exact,snapvk", "did you mean 'snapkv'?"),
    ("--recipes snapkv@quarter", "keep is a fraction above 0 and at most 1, got 'quarter'"),
    ("--peer transformer", "did you mean 'transformers'?"),
    ("--peer-python /usr/bin/python3", "--peer-python needs --peer"),
    ("--repeat 3", "did you mean '--repeats'?"),
    ("--model smollm2-135n", "did you mean 'smollm2-135m'?"),
    ("--model missing.gguf", "missing.gguf"),
    ("--out there.jsonl", "there.jsonl exists already; give --force"),
    ("--out nowhere/x.jsonl", "there is no folder nowhere"),
]


@pytest.mark.parametrize("words, says", BAD)
def test_bad_input_is_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("kept\n")
    assert cli.main(["bench", "speed", *shlex.split(words)]) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("kvjax: ") and error.count("\n") == 1
    assert says in error
    assert (tmp_path / "there.jsonl").read_text() == "kept\n"


def test_arguments():
    args = speed.parse(shlex.split("--contexts 64,16,64 --recipes int8,snapkv@0.5"))
    assert args.contexts == [16, 64]
    assert args.recipes == ["exact", "int8", "snapkv@0.5"]  # the exact cache leads
    assert args.peer is None and args.repeats == 3


# A machine of 100 bytes and 1,000 operations a second. Weights of 30 bytes; the exact cache
# has 20 bytes and the compressed one 5.
MACHINE = {"bytes_per_s": 100.0, "flops_per_s": 1000.0}
OURS = {"weight_bytes": 30, "flops_per_token": 10, "flops_per_pair": 2}


def turn(exact_ms, recipe_ms, prefill_s, maxrss, tokens=(1, 2, 3), **compressed):
    """A turn; a peer's decodes with no recipe and has none of our counts."""
    cell = {"context": 4096, "recipe": "exact", "ms": exact_ms, "tokens": list(tokens)}
    cells = [cell | OURS | {"cache_bytes": 20}]
    if recipe_ms:
        cell = {"context": 4096, "recipe": "snapkv@0.25", "ms": recipe_ms, "tokens": list(tokens)}
        cells.append(cell | OURS | {"cache_bytes": 5})
    prefill = {"tokens": 4, "s": {"exact": prefill_s} | compressed}
    return {"decode": cells, "prefill": prefill, "maxrss_bytes": maxrss}


def test_report_by_hand():
    ours = [
        turn([900, 1000, 4000], [800, 800, 800], [0.2, 0.2], 60),  # medians 1000 ms, 800 ms
        turn([1000, 1000, 1000], [1000, 1000, 1000], [0.1, 0.3], 60),
        turn([2000, 2000, 2000], [1000, 1000, 1000], [0.4, 0.4], 60),
    ]
    peer = [
        turn([2000], (), [0.1], 50, tokens=(1, 2, 4)),  # decode 0.5 tokens/s: we are 2.0 times that
        turn([1400], (), [0.3], 40),  # 1.4 times
        turn([3200], (), [0.6], 30),  # 1.6 times
    ]
    decode, prefill, maxrss, recipe, size = report.rows(
        {"kvjax": ours, "transformers": peer}, MACHINE
    )
    # tokens a second: 1, 1, 0.5; against 1/2, 1/1.4, 1/3.2
    assert decode["ours"] == 1.0 and decode["other"] == 0.5
    assert [decode[k] for k in ("ratio", "low", "high")] == pytest.approx([1.6, 1.4, 2.0])
    assert decode["bar"] == ">= 1.5" and decode["met"]
    assert decode["bytes"] == 50 and decode["bound_share"] == 0.5  # 50 bytes a token, 1 token/s
    assert decode["same_tokens"] == "2 of 3"
    # seconds 0.2, 0.2, 0.4 against 0.1, 0.3, 0.6: ratios 0.5, 1.5, 1.5
    assert [prefill[k] for k in ("ratio", "low", "high")] == pytest.approx([1.5, 0.5, 1.5])
    # 4 tokens of 10 operations, 1 + 2 + 3 + 4 pairs of 2; 0.06 s at best, 0.2 s taken
    assert prefill["flops"] == 60 and prefill["bound_share"] == pytest.approx(0.3)
    # 60 / 50, 60 / 40, 60 / 30
    assert [maxrss[k] for k in ("ratio", "low", "high")] == pytest.approx([1.5, 1.2, 2.0])
    assert maxrss["bar"] == "<= 1.3" and not maxrss["met"]
    # 1.25, 1.0, 2.0 times the exact cache of the same turn; 35 bytes a token
    assert [recipe[k] for k in ("ratio", "low", "high")] == pytest.approx([1.25, 1.0, 2.0])
    assert recipe["against"] == "exact" and recipe["bar"] == ">= 1.2" and recipe["met"]
    assert recipe["bytes"] == 35 and recipe["bound_share"] == pytest.approx(0.35)
    assert size["ratio"] == 0.25 and size["bar"] == "<= 0.3" and size["met"]


def test_without_a_peer_nothing_is_compared_with_it(capsys):
    rows = report.rows({"kvjax": [turn([1000], (), [0.2], 60)]}, MACHINE)
    assert [(r["what"], r["against"]) for r in rows] == [
        ("decode", None), ("prefill", None), ("maxrss", None)
    ]  # fmt: skip
    assert not any("ratio" in r or "met" in r for r in rows)
    head = {"hardware": {"cpu": "a cpu", "cores": [0]}, "machine": MACHINE}
    report.show(head, rows, speed.Console(width=120))
    assert "decode 4,096 exact" in capsys.readouterr().out


def test_reading_with_a_recipe_is_compared_where_the_peer_has_it():
    ours = [turn([1000], (), [1], 60, snapkv=[2.0], int8=[4.0])] * 3
    peer = [turn([1000], (), [1], 60, snapkv=[s]) for s in (2.0, 3.0, 5.0)]
    found = {r["recipe"]: r for r in report.rows({"kvjax": ours, "kvpress": peer}, MACHINE)
             if r["what"] == "prefill"}  # fmt: skip
    assert [found["snapkv"][k] for k in ("ratio", "low", "high")] == pytest.approx([1.5, 1, 2.5])
    assert found["snapkv"]["ours"] == 2.0 and found["snapkv"]["bar"] == ">= 1"
    assert found["int8"]["ours"] == 1.0 and found["int8"]["against"] is None


def test_a_peer_is_told_the_recipes_that_it_has():
    job = {"recipes": ["exact", "snapkv@0.5", "int8"], "prefill": 60}
    asked = speed.asked("kvpress", job)
    assert asked["recipes"] == ["exact", "snapkv@0.5"]
    (told,) = asked["told"]
    assert told["name"] == "snapkv" and told["label"] == "snapkv@0.5" and told["kept"] == 30
    assert speed.asked("transformers", job) == {"recipes": ["exact"], "told": []}


def test_agreement_stops_at_the_first_difference():
    assert report.agreement([1, 2, 3, 4], [1, 2, 9, 4]) == "2 of 4"
    assert report.agreement([1, 2], [1, 2]) == "2 of 2"


def test_a_turn_that_fails_is_one_sentence(tmp_path):
    job = {"model": "x", "cores": sorted(os.sched_getaffinity(0)), "task": "speed"}
    with pytest.raises(InputError, match="transformers in .* gave no result: No module named"):
        speed.turn("transformers", _without_torch(tmp_path), job, lambda what: None)
    with pytest.raises(InputError, match="cannot run /nowhere/python"):
        speed.turn("transformers", "/nowhere/python", job, lambda what: None)


def _without_torch(folder):
    """A Python that sees no installed packages."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.full
def test_a_small_run_for_real(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    out = tmp_path / "speed.jsonl"
    words = f"--contexts 128,192 --repeats 1 --recipes snapkv@0.5 --out {out}"
    assert cli.main(["bench", "speed", *words.split()]) == 0
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["run"] + 2 * ["turn"] + 6 * ["row"]
    assert lines[0]["machine"]["bytes_per_s"] > 1e8
    assert all(row["ours"] > 0 for row in lines[3:])
