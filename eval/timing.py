"""Seconds of work, with the seconds that the compiler took told apart."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax

COMPILED_S = 0.05  # a run with more of tracing and compiling than this is not warm
_compiling = [0.0]


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        _compiling[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_listen)


@dataclass
class Span:
    """A stretch of work: `s` without, `compile_s` for tracing and compiling."""

    s: float = 0.0
    compile_s: float = 0.0


@contextlib.contextmanager
def timed(span: Span | None = None) -> Iterator[Span]:
    """Adds to a span; wait for the work inside the block."""
    span = Span() if span is None else span
    before, started = _compiling[0], time.perf_counter()
    try:
        yield span
    finally:
        compiled = _compiling[0] - before
        took = max(time.perf_counter() - started - compiled, 0.0)
        span.compile_s = round(span.compile_s + compiled, 4)
        span.s = round(span.s + took, 4)
