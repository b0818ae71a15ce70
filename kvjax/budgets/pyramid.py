"""Pyramid: more for low layers, less for high ones."""

import numpy as np

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import top
from kvjax.errors import InputError, unknown


@struct.dataclass
class Pyramid:
    """More entries in low layers, fewer in high ones, on a line.

    The highest layer gets base / beta beyond the window and the lowest 2 * base less that, both
    pulled together where the lowest would exceed the text; base is what a head keeps on average.
    count="exact" spreads round(keep * length) of every head so that the sum is exact.
    count="paper" is kvpress's arithmetic (base is all of keep * length, the window within a layer's
    number, and all layers equal where the least would fall below the window); steps="whole" is the
    authors' whole steps, for which the mean is not quite base.
    Source: Cai et al. 2024, arXiv:2406.02069 (PyramidKV), section 3.2, its code, and kvpress 0.5.5.
    """

    beta: int = struct.static(20)
    steps: str = struct.static("exact")  # exact | whole

    pooled = True
    streams = False

    def check(self):
        """Refuses a pyramid that would stand on its head."""
        if self.beta < 1:
            raise InputError(f"beta must be at least 1, got {self.beta}")
        if self.steps not in ("exact", "whole"):
            raise unknown("value of steps", self.steps, ("exact", "whole"))

    def wants(self, ask: Ask):
        """[l]: entries per head of each layer beyond the window."""
        layers, window = ask.layers, ask.recent
        most = ask.length - window
        if ask.paper:
            return self._kvpress(ask)
        base = ask.each - window
        low = base // self.beta if self.steps == "whole" else base / self.beta
        high = 2 * base - low
        if high > most:
            high, low = most, 2 * base - most
        if self.steps == "whole":
            step = (high - low) // max(layers - 1, 1)
            return np.array([high - i * step for i in range(layers)], np.int32)
        line = np.linspace(high, low, layers) if layers > 1 else np.array([float(base)])
        return _rounded(line, base * layers)

    def _kvpress(self, ask: Ask):
        kept = ask.length * ask.keep if ask.slots is None else ask.each
        window, layers = ask.window, ask.layers
        low = kept / self.beta
        high = kept * 2 - low
        if high >= ask.length - window:
            high = ask.length - window
            low = kept * 2 - high
        if not ask.length >= high >= low >= window:
            return np.full(layers, max(1, round(kept)) - window, np.int32).clip(0)
        step = (high - low) / max(layers - 1, 1)
        return np.array([round(high - i * step) - window for i in range(layers)], np.int32).clip(0)

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, those of the whole pool."""
        return int(want.sum()) * heads

    def __call__(self, scores, valid, protected, pos, count):
        return top(scores, valid, protected, pos, count[..., None])


def _rounded(line, total: int):
    """Whole numbers near `line` that add up to `total`, largest remainders first."""
    low = np.floor(line + 1e-9).astype(np.int32)
    order = np.argsort(-(line - low), kind="stable")
    low[order[: total - int(low.sum())]] += 1
    return low
