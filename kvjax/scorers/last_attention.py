"""Last attention: what the newest query looks at, all heads together."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.evidence import Gained, Mass
from kvjax.scorers.seen import Seen


@struct.dataclass
class LastAttention:
    """Keeps what the newest query attends to, averaged over all heads: one set for a layer.

    The recipe's window of 1 protects the newest token itself, as kvpress does; in the paper it
    competes. With when="after" window=0 looks from no query: leave it at 1. With when="during" the
    row of the last query is remembered beside the tokens; window=0, stride=1 is the card, which
    evicts one token a step.
    Source: Oren et al. 2024, arXiv:2401.06104 (TOVA), section 3.2 and its code.
    """

    reads = "window"
    decay = 0.0

    def watch(self):
        return Mass(last=True)

    def streams(self):
        return Gained(last=True, reduce="all")

    def __call__(self, seen: Seen):
        if seen.stat is not None:
            return seen.stat
        assert seen.evidence is not None, "its observer has not looked"
        mean = jnp.mean(seen.evidence["sums"], axis=1, keepdims=True)  # [b 1 s]
        return jnp.broadcast_to(mean, seen.pos.shape)
