"""Chunks: neighbouring tokens share a fate."""

import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import top
from kvjax.errors import InputError


@struct.dataclass
class Chunks:
    """Runs of `size` neighbouring tokens are kept or dropped together, alike in all heads.

    A run's score is the mean over its tokens of the sum over heads; what is left of the budget goes
    to the first tokens of the next run. count="paper" keeps whole runs, int(keep * runs) of them.
    reuse: every layer whose number it does not divide takes over the choice of the one before.
    Source: Liu et al. 2025, arXiv:2502.00299 (ChunkKV), algorithms 1 and 2; kvpress 0.5.5 (which
    has no reuse).
    """

    size: int = struct.static(10)
    reuse: int = struct.static(2)

    pooled = False
    streams = False

    def check(self):
        """Refuses runs of no tokens."""
        if self.size < 1 or self.reuse < 1:
            raise InputError(f"size and reuse must be at least 1, got {self.size}, {self.reuse}")

    def wants(self, ask: Ask):
        """[3]: entries per head beyond the window; whole runs, or -1 for entries; the run that the
        window cuts, which the card's arithmetic keeps whole, or -1."""
        if not ask.paper or ask.slots is not None or ask.length < self.size:
            return np.array([ask.each - ask.recent, -1, -1], np.int32)
        runs, edge = -(-ask.length // self.size), ask.length - ask.recent
        touched = runs - edge // self.size if ask.recent else 0
        whole = max(max(1, int(runs * ask.keep)) - touched, 0)
        part = edge % self.size if ask.recent else 0
        cut = edge // self.size if part else -1
        most = whole * self.size + part + ask.sinks  # sinks may lie in runs that are not chosen
        return np.array([min(most, edge), whole, cut], np.int32)

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, the entries of a head."""
        return int(want[0])

    def __call__(self, scores, valid, protected, pos, count):
        s = scores.shape[-1]
        runs = -(-s // self.size)
        pad = [(0, 0)] * (scores.ndim - 2) + [(0, runs * self.size - s)]
        cut = lambda x: jnp.pad(x, pad).reshape(*x.shape[:-1], runs, self.size)  # noqa: E731
        total = jnp.where(valid, scores, 0.0).sum(axis=-2)
        many = cut(valid.any(axis=-2)).sum(axis=-1)
        mean = cut(total).sum(axis=-1) / jnp.maximum(many, 1)  # [l b runs]
        mean = mean[jnp.arange(len(mean)) // self.reuse * self.reuse]
        wide = lambda x: jnp.repeat(x, self.size, axis=-1)[..., None, :s]  # noqa: E731
        score = jnp.broadcast_to(wide(mean), scores.shape)
        index = jnp.broadcast_to(jnp.arange(runs), mean.shape)
        part = index == count[2][:, None]
        some = (many > 0) & ~part
        whole = top(mean, some, jnp.zeros_like(some), index, jnp.maximum(count[1], 0)) | part
        entries = top(score, valid, protected, pos, count[0][..., None])
        return jnp.where((count[1] < 0)[:, None, None], entries, valid & (wide(whole) | protected))
