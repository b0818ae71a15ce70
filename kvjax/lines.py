"""Appending to files of lines, so that a crash or a full disk leaves no half of one."""

import contextlib
import os


def append(stream: int, data: bytes) -> None:
    """Writes all of `data` to an open file or, where that fails with OSError, nothing of it."""
    before, written = os.fstat(stream).st_size, 0
    try:
        while written < len(data):
            written += os.write(stream, data[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(stream, before)
        raise
