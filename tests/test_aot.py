"""Laws of memory on TPUs, from libtpu's compiler: a donated cache is updated in place.

For a v5e, at head sizes 64 and 128, in bfloat16, 8,192 tokens of 4 rows and 32 layers.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("aot_program.py")
KINDS = ("exact", "int8", "scored", "streaming", "snapkv", "snapkv_int8", "pooled", "pooled_wide")
FAST = [
    "exact:64:decode:1", "exact:128:decode:1", "int8:64:step:1", "int8:128:compress:1",
    "int8:128:append:1", "exact:128:step:4", "snapkv:64:decode:1", "scored:128:compress:1",
    "int8:64:step:4", "pooled_wide:64:decode:1",
]  # fmt: skip
ALL = [
    f"{kind}:{head_dim}:{function}:{chips}"
    for kind in KINDS
    for head_dim in (64, 128)
    for function, chips in (("step", 1), ("decode", 1), ("append", 1), ("compress", 1), ("step", 4))
]

# Temporaries over the cache that exceed the law, with the reason; held to what was measured.
KNOWN = {
    # The scales of the condensed body, 28 pages a row, are laid out anew once a call, padded to 32
    # (2.5%), beside one layer's codes.
    "snapkv_int8:64:decode:1": 0.059,
    "snapkv_int8:128:decode:1": 0.054,
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the TPU compiler, is not installed: pip install 'kvjax[test]' on Linux x86-64",
)


def check(cases):
    """All laws for each case; every case that breaks one is named with its figures."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), *cases], capture_output=True, text=True, timeout=2400
    )
    assert run.returncode == 0, run.stderr[-2000:]
    made = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(made) == len(cases)
    broken = []
    for case in made:
        most = KNOWN.get(case["case"], 0.05)
        laws = {
            "every leaf is aliased": case["aliased_leaves"] == case["leaves"],
            # a device layout may pad a leaf, so at least
            "aliased bytes are the donated bytes": case["alias"] >= case["cache"],
            "temporaries under 5% of the cache": case["temporary"] < most * case["cache"],
            "no leaf is gathered": not case["gathers"],
        }
        failed = [law for law, holds in laws.items() if not holds]
        if failed:
            broken.append((case, failed))
    assert not broken, "\n".join(map(str, broken))


@needs_libtpu
def test_donated_caches_stay_in_place_on_v5e():
    check(FAST)


@needs_libtpu
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_stays_in_place_on_v5e(kind):
    check([case for case in ALL if case.split(":")[0] == kind])
