"""Threshold: what scores at least tau, however much that is."""

import math

import jax.numpy as jnp

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import shared, top
from kvjax.budgets.model import Model
from kvjax.budgets.uniform import Uniform
from kvjax.errors import InputError, unknown


@struct.dataclass
class Threshold:
    """Keeps what scores at least `tau`: how much that is depends on the text, head by head.

    There is room for as many entries of all layers and heads as the budget "model" keeps; with
    room="head" each head has its own, of as many as "uniform" keeps, and it streams. Where more
    reach tau, the lowest scores go and the row's TRIMMED flag is set (cache.flags): raise keep or
    tau. NaN scores as -inf. The default tau is the card's example for log KVzip+ scores.
    Source: KVzap, arXiv:2601.07891, and kvpress 0.5.5 (dms_press), whose storage has no limit.
    """

    tau: float = struct.static(-4.0)
    room: str = struct.static("model")  # model | head

    @property
    def pooled(self) -> bool:
        """Whether heads share their room."""
        return self.room == "model"

    @property
    def streams(self) -> bool:
        """Whether it can drop entries as tokens arrive."""
        return self.room == "head"

    def check(self):
        """Refuses a threshold that no file could hold."""
        if self.room not in ("model", "head"):
            raise unknown("value of room", self.room, ("model", "head"))
        if not math.isfinite(self.tau):
            raise InputError(f"tau is {self.tau}; give a finite score, such as -1e30 to keep all")

    def wants(self, ask: Ask):
        """[]: entries of the model, or of a head, beyond the windows, at most."""
        return (Model() if self.pooled else Uniform()).wants(ask)

    def reaches(self, scores, valid, protected):
        """Who stays if there is room, [.. b n s]."""
        high = jnp.where(jnp.isnan(scores), -jnp.inf, scores) >= self.tau
        return valid & (protected | high)

    def over(self, scores, valid, protected, pos, count):
        """[b]: rows of which more reach tau than there is room for."""
        stays = self.reaches(scores, valid, protected)
        if self.pooled:
            return stays.sum(axis=(0, 2, 3)) > count
        more = (stays.sum(axis=-1) > count[..., None]).any(axis=-1)  # [l b], or [b] streaming
        return more.any(axis=tuple(range(more.ndim - 1)))

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, those of the pool, or of a head."""
        return int(want)

    def __call__(self, scores, valid, protected, pos, count):
        stays = self.reaches(scores, valid, protected)
        if not self.pooled:
            return top(scores, stays, protected, pos, count[..., None])
        move = lambda x: jnp.moveaxis(x, 1, 0)  # noqa: E731
        scores, stays, protected, pos = map(move, (scores, stays, protected, pos))  # [b l n s]
        return jnp.moveaxis(shared(scores, stays, protected, pos, count, 3), 0, 1)
