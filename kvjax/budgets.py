"""How many entries each head gets: uniform, or pooled over the heads of a layer.

A budget maps scores `[b n s]`, who competes `valid [b n s]`, and `count [b]` entries per head to
the mask of what is kept, with `count[b]` entries per head (uniform) or `n * count[b]` in all
(pooled).
"""

import jax.numpy as jnp

from kvjax import struct
from kvjax.cache.select import top
from kvjax.config import Spec
from kvjax.errors import InputError, unknown


@struct.dataclass
class Uniform:
    """The same number of entries for every head."""

    pooled = False

    def __call__(self, scores, valid, protected, pos, count):
        return top(scores, valid, protected, pos, count[:, None])


@struct.dataclass
class Pooled:
    """One pool per layer: the best of all heads together, with a floor for each head.

    Each head keeps its best `floor(alpha * count)`; the rest goes to the highest scores of all.
    (The authors instead shrink each head's pooled count by 1 - alpha; kvpress floors as here, but
    alpha of the whole count, where here a protected window comes on top of the floor.)
    Source: Feng et al. 2024, arXiv:2407.11550 (Ada-KV), algorithm 1.
    """

    alpha: float = struct.static(0.2)

    pooled = True

    def check(self):
        """Refuses a floor that is no fraction."""
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha is a fraction from 0 to 1, got {self.alpha}")

    def __call__(self, scores, valid, protected, pos, count):
        b, n, s = scores.shape
        floor = jnp.floor(self.alpha * count).astype(count.dtype)
        safe = top(scores, valid, protected, pos, floor[:, None]) | (protected & valid)
        flat = lambda x: x.reshape(b, 1, n * s)  # noqa: E731
        order = flat(pos * n + jnp.arange(n)[:, None])  # unique over the pool, by position first
        keep = top(flat(scores), flat(valid), flat(safe), order, (n * count)[:, None])
        return keep.reshape(b, n, s)


BUDGETS = {"uniform": Uniform, "pooled": Pooled}


def build(spec: Spec):
    """The budget that `spec` names."""
    if spec.name not in BUDGETS:
        raise unknown("budget", spec.name, BUDGETS)
    return BUDGETS[spec.name](**dict(spec.options))
