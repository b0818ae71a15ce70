"""What the parent of a peer makes of its lines, with children that have no peer in them."""

import os
import sys
import time

import pytest

from kvjax.errors import InputError
from kvjax.eval import peers

CHILD = """
import json, os, sys, time
job = json.load(open(sys.argv[1]))
say = lambda **line: print(json.dumps(line), flush=True)
say(doing="loading")
say(versions={"fake": "1"})
say(note="no such option", recipe="b")
print("a library has something to say", flush=True)
for item in map(json.loads, open(job["items"])):
    for recipe in job["recipes"]:
        say(id=item["id"], recipe=recipe["label"])
"""
ENDS = {
    "well": 'say(result={"rows": 4})',
    "error": 'say(error="no such recipe"); raise ValueError("a traceback")',
    "dies": 'print("out of memory", file=sys.stderr); os._exit(3)',
    "silent": "os._exit(3)",
    "torn": """sys.stdout.write('{"id": "x/2", "rec'); sys.stdout.flush(); os._exit(9)""",
    "inside": """print('{"id": "x/2", Loading{"a": 1}'); say(result={"rows": 5})""",
    "early": "pass",
    "never": 'open(job["pid"], "w").write(str(os.getpid())); time.sleep(600)',
}
JOB = {"recipes": [{"label": "a"}, {"label": "b"}]}
ITEMS = [{"id": "x/0"}, {"id": "x/1"}]


@pytest.fixture
def said(tmp_path, monkeypatch):
    """A function: how the child ends -> (iterator of its rows, what it was doing)."""

    def run(end, **more):
        file = tmp_path / "child.py"
        file.write_text(CHILD + ENDS[end])
        monkeypatch.setattr(peers, "script", lambda peer: file)
        doing = []
        return peers.rows("kvpress", sys.executable, JOB | more, ITEMS, doing.append), doing

    return run


def test_rows_come_in_order(said):
    rows, doing = said("well")
    rows = list(rows)
    assert rows[:2] == [{"versions": {"fake": "1"}}, {"note": "no such option", "recipe": "b"}]
    assert [(row["id"], row["recipe"]) for row in rows[2:]] == [
        ("x/0", "a"), ("x/0", "b"), ("x/1", "a"), ("x/1", "b")
    ]  # fmt: skip
    assert doing == ["kvpress: loading"]


ERRORS = [
    ("error", "gave no result: no such recipe$"),
    ("dies", "gave no result: out of memory$"),
    ("silent", "gave no result: exit code 3$"),
    ("torn", "gave no result: exit code 9$"),
    ("early", "gave no result: exit code 0$"),
    ("inside", "made 5 rows and 4 could be read$"),
]


@pytest.mark.parametrize("end, says", ERRORS)
def test_a_child_that_fails_is_one_sentence_after_its_rows(said, end, says):
    rows, _ = said(end)
    for _ in range(6):
        next(rows)
    with pytest.raises(InputError, match=f"^kvpress in .*{says}"):
        next(rows)


def test_a_python_that_is_not_there():
    with pytest.raises(InputError, match="^cannot run /nowhere/python"):
        next(peers.rows("kvpress", "/nowhere/python", JOB, ITEMS, lambda what: None))


def test_closing_ends_the_child(said, tmp_path):
    rows, _ = said("never", pid=str(tmp_path / "pid"))
    for _ in range(6):
        next(rows)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    started = time.monotonic()
    rows.close()
    assert time.monotonic() - started < 2
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_environment_is_made_once(tmp_path, monkeypatch):
    made = []

    class Done:
        returncode, stdout, stderr = 0, "", "no network"

    def run(command, **more):
        made.append(command)
        (tmp_path / "peer-quality").mkdir(exist_ok=True)
        return Done

    monkeypatch.setattr(peers.fetch, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(peers.subprocess, "run", run)
    python = str(tmp_path / "peer-quality" / "bin" / "python")
    assert peers.python("kvpress") == peers.python("hf-quant") == python  # they share it
    assert len(made) == 2 and "kvpress==0.5.5" in made[1]
    (tmp_path / "peer-quality" / "ready").write_text("kvpress==0.1.0")  # of an older kvjax
    Done.returncode = 1
    with pytest.raises(InputError, match="could not make .*no network.*give --peer-python"):
        peers.python("kvpress")


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_has_a_script(name):
    assert peers.script(name).is_file()
