"""Key difference: keys unlike the average key."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.scorers.seen import Seen


@struct.dataclass
class KeyDiff:
    """Keeps the keys least similar, by cosine, to the mean direction of all keys.

    The card has no window and no sinks (window=0 is the card); the paper compresses block by block,
    which is when="during".
    Source: Park et al. 2025, arXiv:2504.15364 (KeyDiff), section 4, as in kvpress 0.5.5.
    """

    def __call__(self, seen: Seen):
        k = seen.k.astype(jnp.float32)
        unit = k / jnp.maximum(jnp.linalg.norm(k, axis=-1, keepdims=True), 1e-12)
        real = (seen.pos >= 0)[..., None]
        anchor = jnp.where(real, unit, 0.0).sum(axis=2, keepdims=True)  # its length does not matter
        size = jnp.linalg.norm(anchor, axis=-1)
        return -jnp.sum(unit * anchor, axis=-1) / jnp.maximum(size, 1e-12)  # [b n s]
