"""What a scorer learns from queries: observers, which look along while a layer attends.

An observer is a small frozen pytree. Called with `Looked` inside the layer scan it returns a pytree
of arrays [b ...]; scorers find it, stacked over layers and sliced again, as `seen.evidence`. An
observer that needs a softmax of its own (KVzip) calls `attend_rows` on the keys it wants.
"""

from kvjax import struct
from kvjax.attention import Query, mass
from kvjax.shapes import Array, Float, Int


@struct.dataclass
class Looked:
    """One layer, after it has attended."""

    query: Query
    k: Float[Array, "b n c d"]  # keys of the tail, rotated
    pos: Int[Array, "b c"]
    here: Float[Array, "b n t d"]  # keys of the new tokens, rotated
    lse: Float[Array, "b t h"]  # total, over all memory
    hidden: Float[Array, "b t m"]  # input of the attention, after its norm


@struct.dataclass
class Mass:
    """Attention that each slot of the tail gets from the new queries: sums and maxima [b h c]."""

    def __call__(self, looked: Looked):
        sums, maxima = mass(looked.query, looked.k, looked.pos, looked.lse)
        return {"sums": sums, "maxima": maxima}


OBSERVERS = {"mass": Mass}
