"""Expected attention: what future queries will look at, if they are like those of the prompt."""

import jax
import jax.numpy as jnp
from einops import rearrange, reduce

from kvjax import struct
from kvjax.errors import InputError
from kvjax.evidence import QueryMoments
from kvjax.layers import angles
from kvjax.scorers.seen import Seen
from kvjax.shapes import EMPTY


@struct.dataclass
class ExpectedAttention:
    """Keeps what Gaussian queries with the prompt's mean and covariance would attend to.

    The queries before RoPE are rotated by the mean rotation of the next `future` positions (an
    approximation in the covariance: mean of R S R' is not the product of means), the expectation of
    exp(q.k) is then closed. Tokens below `first` are not counted: the recipe keeps them as sinks.
    Source: Devoto et al. 2025, arXiv:2510.00636 (ExpectedAttention), section 3, as in kvpress.
    """

    future: int = struct.static(512)
    first: int = struct.static(4)
    covariance: bool = struct.static(True)
    value_norm: bool = struct.static(True)
    epsilon: float = struct.static(0.0)

    reads = "prompt"

    def check(self):
        """Refuses a range of no positions."""
        if self.future < 1 or self.first < 0:
            raise InputError(
                f"future must be from 1 and first from 0, got {self.future}, {self.first}"
            )

    def watch(self):
        return QueryMoments(self.first)

    def __call__(self, seen: Seen):
        assert seen.evidence is not None, "its observer has not looked"
        n = seen.k.shape[1]
        turn = mean_rotation(seen, self.future)  # [b d d]
        mean = jnp.einsum("bhj,bij->bhi", seen.evidence["mean"], turn) * seen.scale
        k = seen.k.astype(jnp.float32)
        mean = rearrange(mean, "b (n g) d -> b n g d", n=n)
        z = jnp.einsum("bngd,bnsd->bngs", mean, k)
        if self.covariance:
            count = jnp.maximum(seen.evidence["count"], 1.0)[:, None, None, None]
            spread = jnp.einsum("bij,bhjk,blk->bhil", turn, seen.evidence["spread"] / count, turn)
            spread = rearrange(spread, "b (n g) i j -> b n g i j", n=n) * seen.scale**2
            half = jax.lax.map(lambda s: _quadratic(k, s), jnp.moveaxis(spread, 2, 0))
            z = z + 0.5 * jnp.moveaxis(half, 0, 2)
        counted = (seen.pos >= self.first)[:, :, None]
        weight = jax.nn.softmax(jnp.where(counted, z, EMPTY), axis=-1)
        score = reduce(weight, "b n g s -> b n s", "mean")
        if self.value_norm:
            score = (score + self.epsilon) * jnp.linalg.norm(seen.v.astype(jnp.float32), axis=-1)
        return score


def _quadratic(k, spread):
    """k' S k of keys [b n s d] and one query head's S [b n d d], a head of each group at a time."""
    return jnp.einsum("bnsi,bnsi->bns", jnp.einsum("bnsj,bnij->bnsi", k, spread), k)


def mean_rotation(seen: Seen, future: int):
    """The mean of the rotations to positions length .. length + future - 1, [b d d]."""
    d = seen.k.shape[3]
    at = seen.length[:, None] + jnp.arange(future)
    cos, sin = (x.mean(axis=1) for x in angles(seen.rope, d, at))  # [b d/2]
    both = lambda x: jnp.concatenate([x, x], axis=-1)  # noqa: E731
    eye, half = jnp.eye(d), jnp.eye(d // 2)
    zero = jnp.zeros((d // 2, d // 2))
    swap = jnp.block([[zero, -half], [half, zero]])
    return both(cos)[:, :, None] * eye + both(sin)[:, :, None] * swap
