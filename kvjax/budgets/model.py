"""Model: one budget for all layers and heads."""

import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.best import shared


@struct.dataclass
class Model:
    """One pool for all layers and heads: the best entries of the whole model.

    With count="exact" round(keep * entries) are kept in all, protected ones included; "paper" is
    KVzip's own arithmetic, one less (a strict threshold at the last one kept). Windows stay, though
    each rounds keep * length for itself where they are all that is kept.
    Source: Kim et al. 2025, arXiv:2505.23416 (KVzip), section 3.3 and its code.
    """

    pooled = True
    streams = False

    def wants(self, ask: Ask):
        """[]: entries of the model beyond the windows."""
        heads = ask.layers * ask.heads
        if ask.slots is not None:
            total = ask.each * heads
        elif ask.paper:
            total = max(int(ask.keep * heads * ask.length) - 1, 0)
        else:
            total = round(ask.keep * heads * ask.length)
        return np.int32(max(total - ask.recent * heads, 0))

    def entries(self, want, layers: int, heads: int) -> int:
        """Of what is wanted, those of the whole pool."""
        return int(want)

    def __call__(self, scores, valid, protected, pos, count):
        move = lambda x: jnp.moveaxis(x, 1, 0)  # noqa: E731
        scores, valid, protected, pos = map(move, (scores, valid, protected, pos))  # [b l n s]
        return jnp.moveaxis(shared(scores, valid, protected, pos, count, 3), 0, 1)
