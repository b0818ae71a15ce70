"""Heads: some keep everything."""

import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import top


@struct.dataclass
class Heads:
    """Whole heads: those of the highest scores keep everything, the others only what is protected.

    A head's score is the highest of its entries (labels are constant along a text). As many heads
    are whole as fit in keep: the sum is at most round(keep * entries), in steps of a head; where
    window and sinks are more than that already, there are fewer sinks.
    Source: KVzip's head level, arXiv:2505.23416, section 4.3; DuoAttention, arXiv:2410.10819.
    """

    pooled = True
    streams = False

    def wants(self, ask: Ask):
        """[]: entries of the model beyond the windows."""
        heads = ask.layers * ask.heads
        total = round(ask.keep * heads * ask.length) if ask.slots is None else ask.each * heads
        return np.int32(max(total - ask.recent * heads, 0))

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, those of the whole pool."""
        return int(want)

    def __call__(self, scores, valid, protected, pos, count):
        l, b, n, s = scores.shape  # noqa: E741
        best = jnp.where(valid, scores, -jnp.inf).max(axis=-1)
        best = jnp.moveaxis(best, 1, 0).reshape(b, l * n)
        size = valid.sum(axis=-1)
        protected = protected & (pos < (count // (l * n))[:, None, None])  # as many as have room
        least = (protected & valid).sum(axis=-1)
        extra = jnp.moveaxis(size - least, 1, 0).reshape(b, l * n)[:, 0]  # alike in all heads
        room = count - least.sum(axis=(0, 2))
        whole = jnp.clip(room // jnp.maximum(extra, 1), 0, l * n)
        index = jnp.broadcast_to(jnp.arange(l * n), best.shape)
        full = top(best, jnp.ones_like(best, bool), jnp.zeros_like(best, bool), index, whole)
        full = jnp.moveaxis(full.reshape(b, l, n), 0, 1)[..., None]
        return valid & (full | protected)
