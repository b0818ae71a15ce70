"""Pooled: one budget for the heads of a layer."""

import numpy as np

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import shared, top
from kvjax.errors import InputError, unknown


@struct.dataclass
class Pooled:
    """One pool per layer: the best of all heads together, with a floor for each head.

    Each head keeps its best `floor(alpha * count)`; the rest goes to the highest scores of all.
    floor="beyond" counts what is kept beyond the window; floor="whole" counts the window in, as
    kvpress does. (The authors instead shrink each head's pooled count by 1 - alpha.)
    Source: Feng et al. 2024, arXiv:2407.11550 (Ada-KV), algorithm 1.
    """

    alpha: float = struct.static(0.2)
    floor: str = struct.static("beyond")  # beyond | whole

    pooled = True
    streams = False

    def check(self):
        """Refuses a floor that is no fraction."""
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha is a fraction from 0 to 1, got {self.alpha}")
        if self.floor not in ("beyond", "whole"):
            raise unknown("value of floor", self.floor, ("beyond", "whole"))

    def wants(self, ask: Ask):
        """[2]: entries per head beyond the window on average, and at least."""
        rest = ask.each - ask.recent
        whole = int(self.alpha * ask.each) - ask.recent
        least = int(self.alpha * rest) if self.floor == "beyond" else max(whole, 0)
        return np.array([rest, least], np.int32)

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, those of the whole pool."""
        return int(want[0]) * layers * heads

    def __call__(self, scores, valid, protected, pos, count):
        n = scores.shape[-2]
        safe = top(scores, valid, protected, pos, count[1][..., None]) | (protected & valid)
        return shared(scores, valid, safe, pos, n * count[0], 2)
