"""Where, when and with what a result was made: the head of every result file."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import jax


def head(command: str, config: dict) -> dict:
    """Command, configuration, date, commit, versions and hardware."""
    return {
        "command": command,
        "config": config,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def versions() -> dict[str, str]:
    """Versions of what computes."""
    names = ("kvjax", "jax", "jaxlib", "numpy", "tokenizers")
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in names
    }


def hardware() -> dict:
    """Processor, cores and accelerator."""
    return {
        "cpu": cpu(),
        "cores": len(cores()),
        "system": platform.platform(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
    }


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def commit() -> str | None:
    """The commit of the checkout this runs from, with "+" if it was changed since."""
    here = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        found = subprocess.run([*here, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*here, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    if found.returncode:
        return None
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def cpu() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
