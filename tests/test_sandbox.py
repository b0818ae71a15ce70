"""Programs that a model wrote, run within limits."""

import os
import time

import pytest

from kvjax.eval import sandbox

LIMITS = sandbox.Limits(wall_s=5, cpu_s=1, memory_bytes=256 << 20, file_bytes=1 << 16)


@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("assert 1 + 1 == 2", True),
        ("assert 1 + 1 == 3", False),
        ("import sys; sys.exit(0)", False),  # it left before its tests
        ("while True: pass", False),
        ("x = bytearray(1 << 30)", False),
        ("open('big', 'wb', buffering=0).write(bytes(1 << 20)) == 1 << 20 or 1 / 0", False),
        ("import os; assert not set(os.environ) - {'LC_CTYPE'}", True),  # Python sets this one
        ("import os, sys; assert os.listdir() == ['program.py'] and not sys.stdin.read()", True),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(9)", False),
    ],
)
def test_programs_are_run_within_limits(program, passes):
    if passes:  # on a busy machine even a short program takes its time
        limits = sandbox.Limits(wall_s=120, cpu_s=30, memory_bytes=256 << 20, file_bytes=1 << 16)
    else:
        limits = LIMITS if "sleep" not in program else sandbox.Limits(wall_s=0.5)
    assert sandbox.passes(program, limits) is passes


def test_a_program_leaves_no_process_behind(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = f"""
import subprocess, sys
code = "import time; file = open({str(pipe)!r}, 'w'); print('on', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
assert child.stdout.readline()
"""
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # the child opens it while it is read
    assert sandbox.passes(program, sandbox.Limits(processes=4096))
    os.set_blocking(reader, True)
    started = time.monotonic()
    assert os.read(reader, 1) == b""  # the child, which held the other end, has ended
    assert time.monotonic() - started < 30
    os.close(reader)
