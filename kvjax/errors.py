"""The error for what a caller can get wrong, the nearest name to offer, and whole numbers."""

import difflib
from typing import Any

import numpy as np


class InputError(ValueError):
    """One sentence with both values and the remedy; the command line prints it and exits with 2."""


def unknown(what: str, name: str, known) -> InputError:
    """The error for a name that is not among `known`, with the nearest one offered."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name).lower(), known, 1, 0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    return InputError(f"unknown {what} {name!r}; {hint}")


def whole(name: str, value: Any, least: int = 1) -> int:
    """value as an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{name} must be a whole number, at least {least}, got {value!r}")
    return int(value)
