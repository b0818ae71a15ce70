"""Types, as pyright sees them: no error anywhere, and public names typed completely."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[1]


def pyright(*args):
    """The report of a run, with this interpreter's packages and the checkout in the path."""
    folder = str(Path(sys.executable).parent)
    env = dict(os.environ, PYTHONPATH=str(ROOT), PATH=os.pathsep.join([folder, os.environ["PATH"]]))
    command = [sys.executable, "-m", "pyright", "--outputjson", *args]
    return json.loads(subprocess.run(command, cwd=ROOT, env=env, capture_output=True).stdout)


def test_no_errors():
    found = pyright("--pythonpath", sys.executable)
    assert found["summary"]["filesAnalyzed"] > 50
    said = [f"{d['file']}: {d['message']}" for d in found["generalDiagnostics"]]
    assert not said, "\n".join(said)


def test_public_names_have_complete_types():
    found = pyright("--verifytypes", "kvjax", "--ignoreexternal")["typeCompleteness"]["symbols"]
    public = {f"{getattr(kvjax, n).__module__}.{n}" for n in kvjax.__all__ if not n.isupper()}
    known = {s["name"]: s["isTypeKnown"] for s in found}
    assert public <= set(known)
    mine = [n for n in known if n in public or n.rpartition(".")[0] in public]
    assert [n for n in mine if not known[n]] == []
