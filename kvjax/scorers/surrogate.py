"""Surrogate: a small function of the hidden state, trained to predict another scorer's scores."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax import struct
from kvjax.errors import InputError
from kvjax.evidence import Looked
from kvjax.scorers.seen import Seen

REMEDY = "train one with kvjax.train.kvzap.surrogate(model) and put it into model.tables by the \
recipe's name"


def predict(weights, x):
    """Scores [.. n], float32, from hidden states x [.. m].

    weights: {"out": [m n], "out_bias": [n]}, or with "inner" [m f] and "inner_bias" [f] before them
    and out [f n]: an MLP with exact GELU.
    """
    x = x.astype(jnp.float32)
    if "inner" in weights:
        x = jax.nn.gelu(x @ weights["inner"] + weights["inner_bias"], approximate=False)
    return x @ weights["out"] + weights["out_bias"]


def scores(looked: Looked):
    """The surrogate's scores of the new tokens [b n t], from what enters their attention."""
    weights = looked.tables and looked.tables.get("scorer", {}).get("weights")
    if not weights:
        raise InputError(f"this recipe needs a surrogate of this model: {REMEDY}")
    width, heads = looked.hidden.shape[-1], looked.k.shape[1]
    between = weights["inner"].shape[-1] if "inner" in weights else width
    want = {"out": (between, heads), "out_bias": (heads,)}
    if "inner" in weights:
        want |= {"inner": (width, between), "inner_bias": (between,)}
    if (got := {name: x.shape for name, x in weights.items()}) != want:
        raise InputError(f"the surrogate has {got} and this model needs {want}: {REMEDY}")
    # a barrier: no fusion with it may change the bits of the model's own layer
    hidden = jax.lax.optimization_barrier(looked.hidden)
    return jnp.swapaxes(predict(weights, hidden), 1, 2)


@struct.dataclass
class Predicted:
    """Scores at the slots of an exact cache, {"scores": [b n c]}.

    Nothing is read twice: each token is scored once, by itself.
    """

    def __call__(self, looked: Looked):
        return {"scores": looked.placed(scores(looked))}

    def merge(self, one, two):
        return jax.tree.map(jnp.add, one, two)


@struct.dataclass
class Remembered:
    """What each new token of a cache that streams starts with, {"here": [b t n]}."""

    def __call__(self, looked: Looked):
        mine = jnp.swapaxes(scores(looked), 1, 2)
        if looked.apart:  # each token's own query brings it: [b t n t]
            mine = mine[..., None] * jnp.eye(mine.shape[1])[:, None]
        return {"here": mine}


@struct.dataclass
class Surrogate:
    """Keeps what a small function of each token's hidden state scores highest.

    It is trained to predict log KVzip+ scores of all kv heads (kvjax/train/kvzap.py) and scores
    tokens as they are read: no second pass. With when="during" (budget="uniform") a token's score
    is remembered beside it. Weights come in model.tables[recipe.name] =
    {"scorer": {"weights": {name: [l ...]}}}. Scores depend on the length of the texts it was
    trained on, and a threshold on the model.
    Source: KVzap 2026, arXiv:2601.07891, and kvpress's kvzap. Not here: a threshold while decoding.
    """

    weights: Any = None  # of one layer; only the observers read them

    reads = "prompt"
    decay = 1.0

    def watch(self):
        return Predicted()

    def streams(self):
        return Remembered()

    def __call__(self, seen: Seen):
        if seen.stat is not None:
            return seen.stat
        assert seen.evidence is not None, "its observer has not looked"
        return seen.evidence["scores"]
