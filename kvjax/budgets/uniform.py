"""Uniform: every head gets the same."""

import numpy as np

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import top


@struct.dataclass
class Uniform:
    """The same number of entries for every head."""

    pooled = False
    streams = True

    def wants(self, ask: Ask):
        """[]: entries per head beyond the window."""
        return np.int32(ask.each - ask.recent)

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, the entries of a head."""
        return int(want)

    def __call__(self, scores, valid, protected, pos, count):
        return top(scores, valid, protected, pos, count[..., None])
