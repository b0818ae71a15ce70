"""Labelled: heads with a label keep everything, the others a recent buffer."""

import math

import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import top
from kvjax.errors import InputError


@struct.dataclass
class Labelled:
    """Heads of a label above 0.5 keep everything; the others the sinks and their newest tokens.

    The labelled heads are whole whatever keep says. count="exact": the others share what
    round(keep * entries) leaves, alike; sinks that do not fit are left out. count="paper" is the
    card's: max(least, length / part) newest tokens, whatever keep says; `share` is then the part of
    all heads that may be labelled, and one more, for which there is room. Where more are labelled
    than there is room for, the first by label and number are whole and the TRIMMED flag is set:
    raise keep, or share.
    Source: Tang et al. 2024, arXiv:2407.15891 (RazorAttention), algorithm 1; least and part are
    from secondary sources, not re-read in the paper.
    """

    share: float = struct.static(0.15)
    least: int = struct.static(4000)
    part: float = struct.static(5.0)

    pooled = True
    streams = False

    def check(self):
        """Refuses a share that is no fraction, and buffers of no tokens."""
        if not 0 <= self.share <= 1:
            raise InputError(f"share is a fraction from 0 to 1, got {self.share}")
        if self.least < 0 or not self.part >= 1:
            raise InputError(
                f"least must be from 0 and part from 1, got {self.least} and {self.part}"
            )

    def wants(self, ask: Ask):
        """[2]: entries of the model beyond the windows, at most; newest ones of a head that is not
        whole, beyond the window, or -1 for what is left."""
        heads, rest = ask.layers * ask.heads, ask.length - ask.recent
        if ask.slots is not None or not ask.paper:
            total = round(ask.keep * heads * ask.length) if ask.slots is None else ask.each * heads
            return np.array([max(total - ask.recent * heads, 0), -1], np.int32)
        newest = max(self.least, int(ask.length / self.part))
        newest = min(max(newest - ask.recent, 0), rest)
        whole = min(math.ceil(self.share * heads - 1e-9) + 1, heads)
        total = whole * rest + (heads - whole) * min(ask.sinks + newest, rest)
        return np.array([total, newest], np.int32)

    def over(self, scores, valid, protected, pos, count):
        """[b]: rows with more labelled heads than there is room for."""
        protected = _with_room(protected, pos, count)
        _, labelled, fits, extra, _ = self._room(scores, valid, protected, count)
        return (labelled > fits) & (extra > 0)

    def _room(self, scores, valid, protected, count):
        """Label of each head [l b n]; and [b]: labelled heads, whole ones that there is room for,
        entries that a whole one has beyond the protected, and room for such entries in all."""
        l, _, n, _ = scores.shape  # noqa: E741
        label = jnp.where(valid, scores, -jnp.inf).max(axis=-1)
        least = (protected & valid).sum(axis=-1)
        extra = (valid.sum(axis=-1) - least)[0, :, 0]  # alike in all heads
        room = count[0] - least.sum(axis=(0, 2))
        fits = jnp.clip(room // jnp.maximum(extra, 1), 0, l * n)
        return label, (label > 0.5).sum(axis=(0, 2)), fits, extra, room

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, those of the whole pool."""
        return int(want[0])

    def __call__(self, scores, valid, protected, pos, count):
        l, b, n, _ = scores.shape  # noqa: E741
        protected = _with_room(protected, pos, count)
        label, labelled, fits, extra, room = self._room(scores, valid, protected, count)
        whole = jnp.minimum(labelled, fits)
        flat = jnp.moveaxis(label, 1, 0).reshape(b, l * n)
        index = jnp.broadcast_to(jnp.arange(l * n), flat.shape)
        full = top(flat, jnp.ones_like(flat, bool), jnp.zeros_like(flat, bool), index, whole)
        full = jnp.moveaxis(full.reshape(b, l, n), 0, 1)[..., None]
        left = jnp.maximum(room - whole * extra, 0) // jnp.maximum(l * n - whole, 1)
        newest = jnp.where(count[1] < 0, left, jnp.minimum(count[1], left))
        recent = pos >= valid.sum(axis=-1, keepdims=True) - newest[:, None, None]
        return valid & (full | protected | recent)


def _with_room(protected, pos, count):
    """As many sinks of each head as there is room for."""
    l, _, n, _ = protected.shape  # noqa: E741
    return protected & (pos < (count[0] // (l * n))[:, None, None])
