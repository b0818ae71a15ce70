"""Oldest: the first tokens of a row, the attention sinks."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.scorers.seen import Seen


@struct.dataclass
class Oldest:
    """Keeps the tokens that came first; with a window, StreamingLLM's choice.

    Source: Xiao et al. 2023, arXiv:2309.17453, section 3.2.
    """

    def __call__(self, seen: Seen):
        return -seen.pos.astype(jnp.float32)  # [b n s]
