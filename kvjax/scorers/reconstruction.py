"""Reconstruction: what the model looks at while it repeats the context."""

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import struct
from kvjax.errors import InputError
from kvjax.evidence import Looked
from kvjax.scorers import smoothing
from kvjax.scorers.seen import Seen
from kvjax.shapes import EMPTY, Array, Int

BLOCK = 128
"""Queries at once: [heads, BLOCK, sinks + chunk + input] weights are the most that is ever held."""


@struct.dataclass
class Repeating:
    """The most attention that each key of a chunk gets while the chunk is repeated.

    The softmax is the card's own: over the sinks, the chunk and the scoring input, not the whole
    context; the maximum is over the input's tokens and the heads of a kv head. {"maxima": [b n c]}.
    """

    first: Int[Array, ""]  # arrival of the chunk's first token
    size: int = struct.static(2048)
    sinks: int = struct.static(4)
    plus: bool = struct.static(False)

    def __call__(self, looked: Looked):
        q, (b, n, c, _) = looked.query, looked.k.shape
        size, sinks = min(self.size, c), min(self.sinks, c)
        start = jnp.minimum(self.first, c - size)
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, size, axis)  # noqa: E731
        mine = (cut(looked.pos, 1) >= 0) & (start + jnp.arange(size) >= self.first)  # [b size]
        early = (looked.pos[:, :sinks] >= 0) & (jnp.arange(sinks) < self.first)
        keys = jnp.concatenate([looked.k[:, :, :sinks], cut(looked.k, 2), looked.here], axis=2)
        known = jnp.concatenate([early, mine], axis=1)  # [b sinks+size]: seen by every query
        weight = self._weights(looked, cut)
        lengths = jnp.linalg.norm(looked.hidden.astype(jnp.float32), axis=-1)

        def step(best, x):
            rows, at, lengths = x  # a block of queries
            own = (q.pos[:, None] >= 0) & (q.pos[:, None] <= at[..., None])  # [b t t']
            wide = jnp.broadcast_to(known[:, None], (*at.shape, known.shape[1]))
            see = jnp.concatenate([wide, own], axis=-1) & (at >= 0)[..., None]
            p = _softmax(rows * q.scale, keys, see)[..., sinks : sinks + size]  # [b n g t size]
            if self.plus:
                p = p * weight[:, :, :, None] / jnp.maximum(lengths, 1e-30)[:, None, None, :, None]
            return jnp.maximum(best, p.max(axis=(2, 3))), None

        blocks = _blocks(q.q, 0.0), _blocks(q.pos, -1), _blocks(lengths, 1.0)
        best, _ = jax.lax.scan(step, jnp.zeros((b, n, size), jnp.float32), blocks)
        best = jnp.where(mine[:, None], best, 0.0)
        whole = jnp.zeros((b, n, c), jnp.float32)
        return {"maxima": jax.lax.dynamic_update_slice_in_dim(whole, best, start, 2)}

    def _weights(self, looked, cut):
        """||W_O v|| of the chunk's values for each query head, [b n g size]; 1 unless KVzip+."""
        if not self.plus:
            return jnp.ones((1, 1, 1, 1))
        v = cut(looked.v, 2).astype(jnp.float32)

        def norm(block, v):
            o = rearrange(block.o.astype(jnp.float32), "m (n g) e -> n g m e", n=v.shape[1])
            gram = jnp.einsum("ngme,ngmf->ngef", o, o)  # |o v|^2 = v' (o' o) v
            squared = jnp.einsum("bnse,ngef,bnsf->bngs", v, gram, v)
            return jnp.sqrt(jnp.maximum(squared, 0.0))

        return looked.use(norm, v)

    def merge(self, one, two):
        return jax.tree.map(jnp.maximum, one, two)


def _blocks(x, fill):
    """x [b t ..] in blocks of queries [i b t' ..], the last one filled up."""
    block = min(BLOCK, x.shape[1])
    pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad, constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def _softmax(rows, keys, see):
    """Weights [b n g t s] of queries [b t h d] over keys [b n s d], where see [b t s]."""
    n, t = keys.shape[1], rows.shape[1]
    rows = rearrange(rows, "b t (n g) d -> b n (g t) d", n=n)
    s = jnp.einsum("bnqd,bnsd->bnqs", rows, keys, preferred_element_type=jnp.float32)
    s = rearrange(s, "b n (g t) s -> b n g t s", t=t)
    see = see[:, None, None]
    return jnp.where(see, jax.nn.softmax(jnp.where(see, s, EMPTY), axis=-1), 0.0)


@struct.dataclass
class Reconstruction:
    """Keeps what the model attends to while it repeats the context, `part` tokens at a time.

    The scoring input is a request to repeat, the chat template's turn to the assistant, and the
    chunk (kvjax/repeating.py). Tokens before `first` (a system prompt) are not repeated: keep them
    as sinks, which are the first keys of the softmax too. plus=True is KVzip+: attention times the
    norm of what a value writes, over the norm of the scoring token's hidden state. kernel above 1
    gives a token the highest score of `kernel` neighbours, as SnapKV does: ours, not the card's.
    The question is never looked at, and one compressed cache serves many.
    Source: Kim et al. 2025, arXiv:2505.23416 (KVzip), section 3 and its code; plus: kvpress 0.5.5.
    """

    part: int = struct.static(2048)
    first: int = struct.static(0)
    plus: bool = struct.static(False)
    kernel: int = struct.static(1)

    reads = "repeat"

    def check(self):
        """Refuses parts of no tokens, and no neighbours."""
        smoothing.check(self.kernel, "max", "max")
        if self.part < 1 or self.first < 0:
            raise InputError(f"part must be from 1, first from 0, got {self.part}, {self.first}")

    def watch(self):
        return Repeating(jnp.int32(0), self.part, plus=self.plus)

    def __call__(self, seen: Seen):
        assert seen.evidence is not None, "its observer has not looked"
        scores = seen.evidence["maxima"]  # [b n s]
        if self.kernel == 1:
            return scores
        return smoothing.smoothed(scores, seen.competes, self.kernel, "max", "max")
