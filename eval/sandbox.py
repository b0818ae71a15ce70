"""Runs a program that a model wrote, apart from this process and within limits.

The limits stop accidents: endless loops, full memory, large files, processes left behind. They are
no wall against a program that means harm, which can read what this user can read and use the
network. Nothing comes here unless a task was told to run code.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from kvjax.errors import InputError

PASSED, REFUSED = 93, 94  # exit codes: it ran to its end (exit() in it gives another); no limits
# The child limits itself: work between fork and exec can hang where other threads hold locks.
LAUNCHER = f"""
import os, resource, sys
path, *limits = sys.argv[1:]
for limit in limits:
    name, value = limit.split("=")
    kind, value = getattr(resource, name), int(value)
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(kind, (value, value))
    except (OSError, ValueError):
        os._exit({REFUSED})
with open(path, encoding="utf-8") as file:
    program = compile(file.read(), "program", "exec")
sys.argv = ["program"]
exec(program, {{"__name__": "program", "__builtins__": __builtins__}})
os._exit({PASSED})
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_bytes: int = 1 << 30  # addresses, not pages in use
    file_bytes: int = 1 << 20  # of any one file
    files: int = 64  # open at once
    processes: int = 0  # of this user; the system does not hold root to it

    def arguments(self) -> list[str]:
        limits = {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.files,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_CORE": 0,
        }
        return [f"{name}={value}" for name, value in limits.items()]


DEFAULT = Limits()


def passes(program: str, limits: Limits = DEFAULT) -> bool:
    """Whether a Python program ends in time, without an error and without calling exit.

    It runs in a temporary folder, with an empty environment and closed input and output.
    """
    if not hasattr(os, "waitid"):
        raise InputError(f"programs cannot be limited on {sys.platform}; run without run_code")
    with tempfile.TemporaryDirectory(prefix="kvjax-", ignore_cleanup_errors=True) as folder:
        path = pathlib.Path(folder, "program.py")
        path.write_text(program, "utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", LAUNCHER, str(path), *limits.arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            ended = _ends(process.pid, limits.wall_s)
        finally:  # with what it started; until it is waited for, no other group has its number
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    if ended and code == REFUSED:
        raise InputError(f"{sys.platform} refuses the limits {limits}; run without run_code")
    return ended and code == PASSED


def _ends(pid, seconds) -> bool:
    """Whether a child ends in time; it is not waited for."""
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
