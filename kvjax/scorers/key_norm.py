"""Key norm: small keys draw attention."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.scorers.seen import Seen


@struct.dataclass
class KeyNorm:
    """Keeps the keys of smallest Euclidean norm, which tend to draw the most attention.

    The card has no window and no sinks; kvjax adds a window by default (window=0 is the card).
    Source: Devoto et al. 2024, arXiv:2406.11430.
    """

    def __call__(self, seen: Seen):
        return -jnp.linalg.norm(seen.k.astype(jnp.float32), axis=-1)  # [b n s]
