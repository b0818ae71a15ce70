"""Flow: values of what is dropped, in those of what is kept."""

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import struct
from kvjax.shapes import EMPTY, Array, Bool, Float

BLOCK = 128
"""Dropped tokens at once: [b n BLOCK s] weights are the most that is ever held."""


@struct.dataclass
class Flow:
    """Each dropped token gives its value to the kept ones, as its key attends to theirs.

    a[j, i], the softmax over kept i of k_j . k_i * scale, is the share of dropped j that i takes,
    and with the scores s (below 0: 0) v_i becomes (s_i v_i + sum_j a[j, i] s_j v_j) / s'_i, where
    s'_i = s_i + sum_j a[j, i] s_j. So the sum of s'_i v_i over the kept is that of s v over all.
    s' is not stored: keys and the weight of an entry in attention stay as they were. Entries of the
    recent window take nothing. Meant for scores that are shares of attention. Costs T^2 products of
    keys a head, as reading the prompt does.
    Not a reproduction: the paper's formula is unknown and this one is a FILL-IN; so is the use of
    keys as stored, after RoPE, by which near tokens take more.
    Source: Meta-Soft 2026, arXiv:2605.22337 (its abstract).
    """

    size = 0

    def moved(
        self,
        k: Float[Array, "b n s d"],
        v: Float[Array, "b n s e"],
        kept: Bool[Array, "b n s"],
        dropped: Bool[Array, "b n s"],
        score: Float[Array, "b n s"],
        scale: float,
    ) -> Float[Array, "b n s e"]:
        size = min(BLOCK, k.shape[2])
        mass = jnp.maximum(score.astype(jnp.float32), 0.0)
        gives = jnp.where(dropped, mass, 0.0)
        wide = v.astype(jnp.float32)

        def blocks(x):
            pad = [(0, 0), (0, 0), (0, -x.shape[2] % size)] + [(0, 0)] * (x.ndim - 3)
            return rearrange(jnp.pad(x, pad), "b n (i q) ... -> i b n q ...", q=size)

        def step(carry, x):
            got, values = carry
            kj, vj, sj = x
            a = jnp.einsum("bnqd,bnsd->bnqs", kj, k, preferred_element_type=jnp.float32) * scale
            a = jax.nn.softmax(jnp.where(kept[:, :, None], a, EMPTY), axis=-1)
            a = jnp.where(kept[:, :, None], a * sj[..., None], 0.0)  # none kept: none takes
            more = jnp.einsum("bnqs,bnqe->bnse", a, vj)
            return (got + a.sum(axis=2), values + more), None

        start = jnp.zeros(mass.shape, jnp.float32), jnp.zeros(wide.shape, jnp.float32)
        (got, values), _ = jax.lax.scan(step, start, (blocks(k), blocks(wide), blocks(gives)))
        total = mass + got
        change = (values - got[..., None] * wide) / jnp.where(total > 0, total, 1.0)[..., None]
        return jnp.where(kept[..., None], wide + change, wide).astype(v.dtype)
