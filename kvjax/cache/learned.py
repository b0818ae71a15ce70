"""Learned features of a state body: two small networks a kv head, for queries and for keys."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax import struct
from kvjax.errors import InputError
from kvjax.shapes import Array, Float


@struct.dataclass
class LearnedFeatures:
    """LESS: phi(q).psi(k) stands for exp(q.k) of the tokens that an eviction policy drops.

    phi(q) = |gelu(gelu(q q_in) q_out)|. With a = |size| * gelu(gelu(k k_in) k_out),
    psi(k) = |a + (a mix) * change|. Queries and keys are those after RoPE, not scaled; gelu is the
    exact one. The weights fit one model, policy and budget: `kvjax.train.less` trains them, and
    they come in `model.tables[recipe.name] = {"features": ...}`, each [l n ...].
    The authors' models have as many kv heads as heads; here the query heads of a kv head share its
    phi, which is our choice.
    Source: Dong et al. 2024, arXiv:2402.09398 (LESS), section 3, and its code.
    """

    q_in: Float[Array, "n d f"] | None = None  # of one layer
    q_out: Float[Array, "n f r"] | None = None
    k_in: Float[Array, "n d f"] | None = None
    k_out: Float[Array, "n f r"] | None = None
    mix: Float[Array, "n r r"] | None = None
    size: Float[Array, "n r"] | None = None
    change: Float[Array, "n r"] | None = None
    count: int = struct.static(8)

    floor = 1e-6  # least mass of a state that has taken anything, as the card's

    def queries(self, q: Float[Array, "b n q d"], scale: float, drop: Any = None):
        """phi, [b n q r]. drop: what is done to the inner units, in training."""
        self._trained(q)
        return jnp.abs(_network(q, self.q_in, self.q_out, drop))

    def keys(self, k: Float[Array, "b n s d"], scale: float, drop: Any = None):
        """psi, [b n s r]."""
        self._trained(k)
        a = _network(k, self.k_in, self.k_out, drop) * jnp.abs(_wide(self.size))
        return jnp.abs(a + jnp.einsum("bnsr,nrz->bnsz", a, self.mix) * _wide(self.change))

    def _trained(self, x):
        if self.q_in is None:
            raise InputError(
                "this recipe needs learned features: train them with kvjax.train.less and put them "
                "into model.tables"
            )
        assert self.q_out is not None
        want, found = (
            (x.shape[1], x.shape[3], self.count),
            (*self.q_in.shape[:2], self.q_out.shape[2]),
        )
        if found != want:
            raise InputError(
                f"the learned features are of (kv heads, head dim, count) = {found} and this cache "
                f"has {want}; use those that were trained for this model and recipe"
            )


def _network(x, inner, outer, drop):
    y = jax.nn.gelu(jnp.einsum("bnsd,ndf->bnsf", x, inner), approximate=False)
    y = y if drop is None else drop(y)
    return jax.nn.gelu(jnp.einsum("bnsf,nfr->bnsr", y, outer), approximate=False)


def _wide(x):
    """[n r] to broadcast against [b n s r]."""
    return x[:, None]
