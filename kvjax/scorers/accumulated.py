"""Accumulated attention: what all queries so far have looked at."""

import jax.numpy as jnp
from einops import rearrange, reduce

from kvjax import struct
from kvjax.errors import InputError, unknown
from kvjax.evidence import Gained, Mass
from kvjax.scorers.seen import Seen


@struct.dataclass
class AccumulatedAttention:
    """Keeps the heavy hitters: what most attention has gone to, over all queries so far.

    The sums favour early tokens, which more queries can see; per_query=True divides by how many
    (kvpress's "observed attention"). The paper keeps a set for each query head; here the heads of a
    kv head are reduced.
    With when="during" a token's sum is remembered beside it, grows by each look, and leaves with
    it. A prompt in one chunk is then the card's prefill, and stride=1 its one eviction a step; at a
    larger stride up to stride - 1 tokens more are held in between. The card's window is half of
    what is kept: set it. reduce="max" is of the sums, so it cannot be added up as tokens arrive.
    Source: Zhang et al. 2023, arXiv:2306.14048 (H2O), section 4 and its code.
    """

    reduce: str = struct.static("mean")  # mean | max | sum, over the group
    per_query: bool = struct.static(False)

    reads = "prompt"
    decay = 1.0

    def check(self):
        """Refuses options that mean nothing."""
        if self.reduce not in ("mean", "max", "sum"):
            raise unknown("value of reduce", self.reduce, ("mean", "max", "sum"))

    def watch(self):
        return Mass()

    def streams(self):
        if self.reduce == "max":
            raise InputError(
                "reduce='max' cannot be added up as tokens arrive: use 'mean' or 'sum'"
            )
        return Gained(reduce=self.reduce)

    def __call__(self, seen: Seen):
        score = seen.stat
        if score is None:
            assert seen.evidence is not None, "its observer has not looked"
            sums = rearrange(seen.evidence["sums"], "b (n g) s -> b n g s", n=seen.k.shape[1])
            score = reduce(sums, "b n g s -> b n s", self.reduce)
        if self.per_query:
            score = score / jnp.maximum(seen.length[:, None, None] - seen.pos, 1)
        return score
