"""Means with bootstrap intervals over items, and what may be claimed from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
ENOUGH = 150  # paired asks that a headline needs
MARGINS = {"accuracy": 0.03, "loss": 0.01}  # of accuracy in points, of loss relative to exact


@dataclass(frozen=True)
class Mean:
    """A mean over asks with its 95% interval over items."""

    mean: float
    low: float
    high: float
    asks: int
    items: int


def mean(
    sums: Sequence[int | float], counts: Sequence[int | float], asks: int | None = None
) -> Mean:
    """The ratio of sums, one pair for each item; items are resampled, whatever they hold.

    The asks (or tokens) of an item share a context and are not independent: to resample them
    would give intervals that are too narrow.
    """
    s, c = np.asarray(sums, float), np.asarray(counts, float)
    s, c = s[c > 0], c[c > 0]
    if not len(s):
        return Mean(float("nan"), float("nan"), float("nan"), 0, 0)
    low, high = np.quantile(_resampled(s) / _resampled(c), (0.025, 0.975))
    count = int(c.sum()) if asks is None else asks
    return Mean(float(s.sum() / c.sum()), float(low), float(high), count, len(s))


def _resampled(values):
    """Sums over resamples of the items: the same resamples for every array of one length."""
    picks = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    return values[picks].sum(1)


def ratio(sums: Sequence[int | float], base: Sequence[int | float]) -> Mean:
    """sum(sums) / sum(base) - 1, paired by item: a relative difference with its interval."""
    s, b = np.asarray(sums, float), np.asarray(base, float)
    if not len(s) or not b.all():
        return Mean(float("nan"), float("nan"), float("nan"), 0, 0)
    low, high = np.quantile(_resampled(s) / _resampled(b) - 1, (0.025, 0.975))
    return Mean(float(s.sum() / b.sum() - 1), float(low), float(high), len(s), len(s))


def near_chance(exact: Mean, chance: float) -> bool:
    """Whether the interval of the exact cache's accuracy reaches down to chance."""
    return not exact.low > chance


def claim(kind: str, difference: Mean, asks: int) -> str:
    """What a paired difference from the exact cache allows to say.

    kind "accuracy" (higher is better) or "loss" (relative, lower is better). "equal": not worse by
    the margin, with 95% confidence; "worse": worse by more than the margin; "open": neither;
    "few": fewer than 150 paired asks, so nothing is claimed.
    """
    margin = MARGINS[kind]
    worst, best = (
        (-difference.low, -difference.high)
        if kind == "accuracy"
        else (difference.high, difference.low)
    )
    if asks < ENOUGH:
        return "few"
    if worst <= margin:
        return "equal"
    return "worse" if best > margin else "open"
