"""WHAT stands for the tokens that condense drops: a few made entries in their place.

A reducer is built from its spec, with static `size`, the entries it makes for each kv head. Called
once for each layer, with all tokens of the exact cache, it gives what goes into a closed body of
its own, beside what is kept:

    (k, v [b n s d], pos [b n s], dropped [b n s]) -> k, v [b n x d], pos [b n x], bias [b n x]

pos is -1 for slots that hold no token or whose token stays in the tail. bias is added to the logits
of the entry: log m for one that stands for m tokens. The arrival of an entry is that of one of the
dropped it stands for: below the edge, so that every later query sees it, and of no other entry of
its head. An entry that stands for none has arrival -1 and bias EMPTY.

One of size 0 makes no entries: it changes the values of those that are kept, in the same slots.
score is the scorer's, scale that of query-key products:

    moved(k, v [b n s d], kept [b n s], dropped [b n s], score [b n s], scale) -> v [b n s e]
"""

from kvjax import struct
from kvjax.config import CacheRecipe, Spec
from kvjax.reducers.flow import Flow
from kvjax.reducers.mean import Mean

__all__ = ["REDUCERS", "build", "makes"]

REDUCERS = {
    "mean": Mean,
    "flow": Flow,
}


def makes(recipe: CacheRecipe) -> bool:
    """Whether what condense drops becomes entries in a body of their own."""
    return recipe.reducer is not None and build(recipe.reducer).size > 0


def build(spec: Spec, tables=None):
    """The reducer that `spec` names, with its tables (of one layer) if it has any."""
    return struct.build("reducer", REDUCERS, spec, tables)
