"""Window attention: what the newest queries look at."""

import jax
import jax.numpy as jnp
from einops import rearrange, reduce

from kvjax import struct
from kvjax.errors import InputError, unknown
from kvjax.scorers.seen import Seen


@struct.dataclass
class WindowAttention:
    """Keeps what the last `window` queries attend to, smoothed along the text.

    Attention weights are summed over the window's queries, pooled over `kernel` neighbours (zeros
    beyond the ends; "avg" divides by the whole kernel), then reduced over the query heads of a kv
    head (the paper keeps one set per query head; kvpress takes the mean).
    Source: Li et al. 2024, arXiv:2404.14469 (SnapKV), section 4 and its code.
    """

    kernel: int = struct.static(5)
    pool: str = struct.static("avg")  # avg | max
    reduce: str = struct.static("mean")  # mean | max | sum, over the group

    observe = "mass"

    def check(self):
        """Refuses options that mean nothing."""
        if self.kernel < 1:
            raise InputError(f"kernel must be at least 1, got {self.kernel}")
        if self.pool not in ("avg", "max"):
            raise unknown("value of pool", self.pool, ("avg", "max"))
        if self.reduce not in ("mean", "max", "sum"):
            raise unknown("value of reduce", self.reduce, ("mean", "max", "sum"))

    def __call__(self, seen: Seen):
        assert seen.evidence is not None, "its observer has not looked"
        n, sums = seen.k.shape[1], seen.evidence["sums"]  # [b h s]
        shape, half = (1, 1, self.kernel), self.kernel // 2
        pad = ((0, 0), (0, 0), (half, self.kernel - 1 - half))
        if self.pool == "max":
            s = jax.lax.reduce_window(sums, -jnp.inf, jax.lax.max, shape, (1, 1, 1), pad)
        else:
            s = jax.lax.reduce_window(sums, 0.0, jax.lax.add, shape, (1, 1, 1), pad) / self.kernel
        return reduce(rearrange(s, "b (n g) s -> b n g s", n=n), "b n g s -> b n s", self.reduce)
