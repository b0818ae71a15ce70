"""Evaluation: the same items for every recipe and every peer, paired with the exact cache."""

from kvjax.eval.items import Ask, Item
from kvjax.eval.results import Results
from kvjax.eval.run import run

__all__ = ["Ask", "Item", "Results", "run"]
