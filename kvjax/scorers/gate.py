"""Gate: one trained bit per token and kv head, said by the token that comes after it."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax import struct
from kvjax.errors import InputError
from kvjax.evidence import Looked
from kvjax.scorers.seen import Seen

GAIN, OFFSET = 100.0, -5.0
REMEDY = "train one with kvjax.train.dms.gates(model) and put it into model.tables by the \
recipe's name"


def logits(gate, hidden):
    """[.. t n] float32, above 0 to drop the token before, from hidden states [.. t m].

    gate: {"norm": [m], "weight": [m n], "bias": [n]}.
    """
    x = hidden.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gate["norm"]
    return GAIN * (x @ gate["weight"] + gate["bias"]) + OFFSET


def scores(looked: Looked):
    """What the new tokens say, as scores: of the newest token before them [b n], and of themselves
    [b n t], where the last real one has none yet: 0."""
    gate = (looked.tables or {}).get("scorer", {})
    if "weight" not in gate:
        raise InputError(f"this recipe needs gates of this model: {REMEDY}")
    want, got = (looked.hidden.shape[-1], looked.k.shape[1]), gate["weight"].shape
    if got != want:
        raise InputError(
            f"the gate maps {got[0]} numbers to {got[1]} kv heads and this model has {want[0]} "
            f"and {want[1]}: {REMEDY}"
        )
    # a barrier: no fusion with it may change the bits of the model's own layer
    said = -logits(gate, jax.lax.optimization_barrier(looked.hidden))
    said = jnp.swapaxes(jnp.where((looked.query.pos >= 0)[..., None], said, 0.0), 1, 2)
    return said[..., 0], jnp.pad(said[..., 1:], ((0, 0), (0, 0), (0, 1)))


def _newest(looked: Looked):
    """Mask [b 1 c] of the slot of the newest token before the new ones."""
    before = looked.query.pos[:, :1] - 1
    return ((looked.pos == before) & (before >= 0))[:, None]


@struct.dataclass
class Placed:
    """Scores at the slots of an exact cache, {"scores": [b n c]}; 0 at the newest token."""

    def __call__(self, looked: Looked):
        before, own = scores(looked)
        earlier = jnp.where(_newest(looked), before[..., None], 0.0)
        return {"scores": looked.placed(own) + earlier}

    def merge(self, one, two):
        return jax.tree.map(jnp.add, one, two)


@struct.dataclass
class Decided:
    """Scores of a cache that streams: {"here": [b t n]}, and {"tail": [b c n]} by which that of the
    newest token before changes: from 0, or from what a token that was taken back has said."""

    def __call__(self, looked: Looked):
        assert looked.stat is not None, "only a cache that streams remembers"
        before, own = scores(looked)
        change = jnp.where(_newest(looked), before[..., None] - looked.stat, 0.0)
        here, tail = jnp.swapaxes(own, 1, 2), jnp.swapaxes(change, 1, 2)
        if looked.apart:  # what each query says: [b t n t], [b c n t]
            t = here.shape[1]
            here = here[..., None] * jnp.eye(t, k=1)[:, None]
            tail = tail[..., None] * jnp.eye(t)[0]
        return {"here": here, "tail": tail}


@struct.dataclass
class Gate:
    """Keeps what the next token does not mark: a trained bit for each token and kv head.

    A bit drops its token once that leaves the window, which is why later tokens can take up what it
    held. Scores are minus the gate's logits, so budget "threshold" with tau=0 obeys the bits. With
    when="during" and room="head" that holds while reading and while decoding: what is marked never
    gets a slot, where the authors overwrite one; the same entries stay. With "after" the prompt is
    read exactly and pruned once. A chunk of a prompt sees itself whole, and tokens leave `stride`
    at a time: chunk=1 and stride=1 see exactly what the training mask shows, larger ones somewhat
    more. Tables: {"scorer": {"norm": [l m], "weight":
    [l m n], "bias": [l n]}}. The authors' gates read the hidden state before the attention norm,
    these what comes out of it: a fill-in, and published gates do not fit.
    Source: Lancucki et al. 2025, arXiv:2506.05345 (DMS), and NVIDIA's Model-Optimizer.
    """

    norm: Any = None  # of one layer, as the others; only the observers read them
    weight: Any = None
    bias: Any = None

    reads = "prompt"
    decay = 1.0
    late = True  # a token's score comes with the next token

    def watch(self):
        return Placed()

    def streams(self):
        return Decided()

    def __call__(self, seen: Seen):
        if seen.stat is not None:
            return seen.stat
        assert seen.evidence is not None, "its observer has not looked"
        return seen.evidence["scores"]
