"""Mean: one token that counts as many."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.shapes import EMPTY, Array, Bool, Float, Int


@struct.dataclass
class Mean:
    """One entry for each kv head: the mean key and mean value of all that is dropped there.

    Its bias is the log of their number, its arrival that of the last of them. Exact where the
    dropped keys are equal; otherwise its weight is at most theirs (the mean of exp is at least the
    exp of the mean), the less the more rotary positions pull equal keys apart.
    Source: Tang et al. 2024, arXiv:2407.15891 (RazorAttention), compensation token. The logarithm
    in the bias is taken from Huawei's kernel, not re-read in the paper.
    """

    size = 1

    def __call__(
        self,
        k: Float[Array, "b n s d"],
        v: Float[Array, "b n s e"],
        pos: Int[Array, "b n s"],
        dropped: Bool[Array, "b n s"],
    ):
        weight = dropped.astype(jnp.float32)
        count = weight.sum(axis=-1, keepdims=True)  # [b n 1]
        some = count > 0
        safe = jnp.where(some, count, 1.0)
        mean = lambda x: (  # noqa: E731
            jnp.einsum("bns,bnsd->bnd", weight, x, preferred_element_type=jnp.float32)[:, :, None]
            / safe[..., None]
        ).astype(x.dtype)
        last = jnp.where(dropped, pos, -1).max(axis=-1, keepdims=True)
        return mean(k), mean(v), last, jnp.where(some, jnp.log(safe), EMPTY)
