"""How far a run is and how long it will take: a bar on a terminal, else lines now and then."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.progress import TimeRemainingColumn

from kvjax import commands

EVERY_S = 20.0  # between two lines where stderr is no terminal


def silent(what: str, done: float, total: float) -> None:
    """For callers who want no progress."""


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str, float, float], None]]:
    """A function of (what is being done, work done, work in all)."""
    started, last = time.monotonic(), 0.0
    first = None
    with commands.progress(TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=None)

        def tick(what: str, done: float, total: float) -> None:
            nonlocal last, first
            if not bar.disable:
                bar.update(task, description=what, completed=done, total=total)
                return
            now = time.monotonic()
            first = (now, done) if first is None else first  # what a resumed file holds is no work
            if now - last < EVERY_S:
                return
            last, worked = now, done - first[1]
            left = (now - first[0]) / worked * (total - done) if worked > 0 else None
            ends = "" if left is None else f", about {_minutes(left)} left"
            print(f"kvjax: {what} ({done / total:.0%}{ends})", file=sys.stderr, flush=True)

        yield tick
        if bar.disable:
            took = _minutes(time.monotonic() - started)
            print(f"kvjax: done in {took}", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
