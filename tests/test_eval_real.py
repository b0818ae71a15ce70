"""`kvjax eval` with SmolLM2 itself: killed and resumed, checked, quick. Long: `pytest -m full`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvjax.eval import Results

pytestmark = pytest.mark.full

KVJAX = [sys.executable, "-m", "kvjax", "eval"]
RUN = [*KVJAX, "--task", "key_values@512", "--task", "prose_loss@512", "--recipe", "snapkv@0.5",
       "--recipe", "snapkv@1", "--recipe", "int8", "--items", "3", "--no-plot"]  # fmt: skip


def rows(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if '"kind":"row"' in line]


def run(words, folder):
    made = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run([*RUN, "--out", "whole.jsonl"], folder)
    return folder / "whole.jsonl"


def test_smollm2_answers_and_a_recipe_that_keeps_all_changes_nothing(whole):
    by = {(s.task, s.recipe): s for s in Results.read(whole).summary}
    assert by["key_values@512", "exact"].value.mean > 0.5
    for task in ("key_values@512", "prose_loss@512"):
        assert abs(by[task, "snapkv@1"].logprob_change.mean) < 1e-4
    assert by["prose_loss@512", "int8"].kl < 1e-3 < by["prose_loss@512", "snapkv@0.5"].kl


@pytest.mark.parametrize("after", [2, 9, 17])
def test_a_run_that_is_killed_resumes_to_the_same_file(whole, tmp_path, after):
    out = tmp_path / "part.jsonl"
    process = subprocess.Popen(
        [*RUN, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(rows(out)) < after and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert after <= len(rows(out)) < len(rows(whole))
    run([*RUN, "--out", str(out)], tmp_path)
    assert rows(out) == rows(whole)


def test_a_check_runs_it_again(whole, tmp_path):
    found = json.loads(run([*KVJAX, "--check", str(whole), "--items", "2", "--json"], tmp_path))
    assert found["rows"] == 2 * 2 * 4 and not found["different"]
    lines = whole.read_text().splitlines()
    first = json.loads(next(line for line in lines if '"kind":"row"' in line))
    first["asks"][0]["lp"] -= 1.0
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join([lines[0], json.dumps(first)]) + "\n")
    made = subprocess.run([*KVJAX, "--check", str(other), "--items", "1"], capture_output=True,
                          text=True, timeout=900)  # fmt: skip
    assert made.returncode == 1 and "key_values@512 item 0, exact" in made.stdout


def test_quick_is_a_whole_run(tmp_path):
    out = run([*KVJAX, "--quick"], tmp_path)
    assert "niah_multikey" in out and "against the exact cache" in out
    folder = tmp_path / "kvjax-eval"
    names = sorted(p.name for p in folder.iterdir())
    assert all(name.startswith("smollm2-135m-quick-") for name in names)
    assert [name.rpartition(".")[2] for name in names] == ["jsonl", "png"]


def test_the_programs_of_the_document_run(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, "evaluation.md", "exec"), names)
    assert names["frame"].groupby("recipe").size().to_dict() == {
        "exact": 4, "snapkv@0.5": 4, "int8": 4,
    }  # fmt: skip
    assert (tmp_path / "invoices.png").exists()
