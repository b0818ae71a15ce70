"""Question attention: what the tokens of a question look at."""

import jax
import jax.numpy as jnp
from einops import rearrange, reduce

from kvjax import struct
from kvjax.attention import mass
from kvjax.errors import unknown
from kvjax.evidence import Looked
from kvjax.scorers.seen import Seen


@struct.dataclass
class QuestionMass:
    """Attention that each slot gets from the question: {"sums": [b h c]}.

    normalise: each query's row is multiplied by the share of all keys that it sees. A row over n
    keys gives each about 1/n, so that the rows of a question then weigh alike. To be used on an
    exact cache, whose queries see all that came before them.
    """

    normalise: bool = struct.static(True)

    def __call__(self, looked: Looked):
        lse = looked.lse
        if self.normalise:
            sees = jnp.maximum(looked.query.pos + 1, 1)  # [b t]; padding sees nothing in any case
            share = sees / sees.max(axis=1, keepdims=True)
            lse = lse - jnp.log(share)[..., None]  # exp(s - lse) times share
        before, _ = mass(looked.query, looked.k, looked.pos, lse)
        own, _ = mass(looked.query, looked.here, looked.query.pos, lse)
        return {"sums": before + looked.placed(own)}

    def merge(self, one, two):
        return jax.tree.map(jnp.add, one, two)


@struct.dataclass
class QuestionAttention:
    """Keeps what the question attends to, one set for all heads of a layer.

    Attention weights of the question's tokens, each row times the number of keys it sees over the
    number of all (normalise=False: as they are, which is what the released code comes to), summed
    over tokens and heads. share="head" chooses for each kv head, as kvpress does. `prefill` with
    question= reads chunk by chunk (finch.py); `condense` with question= is kvpress's one pass.
    Without a question the recipe's window is it, the end of the text, as in kvpress.
    Source: Corallo and Papotti 2024, arXiv:2408.00167 (Finch), its code, and kvpress 0.5.5.
    """

    normalise: bool = struct.static(True)
    share: str = struct.static("layer")  # layer | head

    reads = "question"

    def check(self):
        """Refuses options that mean nothing."""
        if self.share not in ("layer", "head"):
            raise unknown("value of share", self.share, ("layer", "head"))

    def watch(self):
        return QuestionMass(self.normalise)

    def __call__(self, seen: Seen):
        assert seen.evidence is not None, "its observer has not looked"
        sums = rearrange(seen.evidence["sums"], "b (n g) s -> b n g s", n=seen.k.shape[1])
        score = reduce(sums, "b n g s -> b n s", "sum")
        if self.share == "layer":
            score = jnp.broadcast_to(score.sum(axis=1, keepdims=True), score.shape)
        return score
