"""Window attention: what the newest queries look at."""

from kvjax import struct
from kvjax.evidence import Mass
from kvjax.scorers import smoothing
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

    reads = "window"

    def watch(self):
        return Mass()

    def check(self):
        """Refuses options that mean nothing."""
        smoothing.check(self.kernel, self.pool, self.reduce)

    def __call__(self, seen: Seen):
        assert seen.evidence is not None, "its observer has not looked"
        sums = seen.evidence["sums"]  # [b h s]
        return smoothing.smoothed(sums, seen.competes, self.kernel, self.pool, self.reduce)
