"""State: a body of fixed size, a sum over all tokens it has taken, with non-negative features.

It attends as softmax attention with the kernel phi(q).psi(k): out = phi(q) S / phi(q) z and
lse = log phi(q) z, which merges with other pieces like any softmax. As the last body of a chain it
takes what eviction lets go.

Features are a frozen pytree with `queries(q, scale)` (phi) and `keys(k, scale)` (psi), of [b n s d]
to [b n s r], static `count` (r) and `floor`, the least mass of a state that has taken anything.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from kvjax import struct
from kvjax.attention import Query
from kvjax.cache.learned import LearnedFeatures
from kvjax.config import Spec
from kvjax.shapes import EMPTY, Array, Float


@struct.dataclass
class RandomFeatures:
    """Positive random features of the softmax kernel: the mean of phi(q).phi(k) is exp(q.k).

    Unbiased for any count, with a variance that grows with exp of the norms: a state made of them
    is rough for large keys; LESS learns its features instead.
    Source: Choromanski et al. 2021, arXiv:2009.14794, lemma 1, with orthogonal directions.
    """

    count: int = struct.static(64)
    seed: int = struct.static(0)

    floor = 0.0

    def queries(self, q: Float[Array, "b n q d"], scale: float):
        return self(q * scale**0.5)

    def keys(self, k: Float[Array, "b n s d"], scale: float):
        return self(k * scale**0.5)

    def __call__(self, x: Float[Array, "*s d"]) -> Float[Array, "*s r"]:
        w = jnp.asarray(directions(self.count, x.shape[-1], self.seed))
        half = 0.5 * jnp.sum(x * x, axis=-1, keepdims=True)
        return jnp.exp(x @ w.T - half) * self.count**-0.5


@functools.lru_cache
def directions(count: int, dim: int, seed: int) -> np.ndarray:
    """Gaussian directions [count, dim], orthogonal within each block of dim."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(-(-count // dim)):
        q, r = np.linalg.qr(rng.standard_normal((dim, dim)))
        blocks.append(q * np.sign(np.diag(r)))  # uniform over rotations; QR alone is not
    length = np.linalg.norm(rng.standard_normal((count, dim)), axis=1, keepdims=True)
    return (np.concatenate(blocks)[:count] * length).astype(np.float32)


FEATURES = {"random_features": RandomFeatures, "less": LearnedFeatures}


def build(spec: Spec, tables=None):
    """The features that `spec` names, with their tables (of one layer) if any."""
    return struct.build("features", FEATURES, spec, tables)


@struct.dataclass
class State(struct.Record):
    """Sums in float32: they add up over any number of tokens."""

    sums: Float[Array, "l b n r e"]  # of psi(k) v
    mass: Float[Array, "l b n r"]  # of psi(k)
    scale: float = struct.static(1.0)  # of query-key products

    closed = False


def empty(features: Spec, depth, batch, kv_heads, head_dim, scale: float) -> State:
    """A state that has taken nothing."""
    shape = (depth, batch, kv_heads, build(features).count)
    return State(jnp.zeros((*shape, head_dim)), jnp.zeros(shape), scale)


def attend(body: State, query: Query, features: Spec, tables=None):
    """Attends to one layer's state (leaves without layer axis): all it has taken is visible."""
    n, t = body.mass.shape[1], query.q.shape[1]
    q = rearrange(query.q.astype(jnp.float32), "b t (n g) d -> b n (g t) d", n=n)
    made = build(features, (tables or {}).get("features"))
    f = made.queries(q, body.scale)
    total = jnp.einsum("bnqr,bnr->bnq", f, body.mass)
    real = rearrange(query.pos >= 0, "b t -> b 1 1 t")
    some = (total > 0) & jnp.broadcast_to(real, (*f.shape[:2], f.shape[2] // t, t)).reshape(
        total.shape
    )
    safe = jnp.where(some, total, 1.0)
    out = jnp.einsum("bnqr,bnre->bnqe", f, body.sums) / safe[..., None]
    lse = jnp.log(jnp.maximum(safe, made.floor))
    out, lse = jnp.where(some[..., None], out, 0.0), jnp.where(some, lse, EMPTY)
    return (rearrange(out, "b n (g t) e -> b t (n g) e", t=t),
            rearrange(lse, "b n (g t) -> b t (n g)", t=t))  # fmt: skip


def absorb(body: State, k, v, arrival, features: Spec, tables=None):
    """Adds arriving tokens k, v [l b n a d] where arrival [l b n a] is not -1; lets nothing go."""

    def layer(x):  # one at a time: inner units of all layers would be many
        k, table = x
        return build(features, table).keys(k.astype(jnp.float32), body.scale)

    f = jax.lax.map(layer, (k, (tables or {}).get("features")))
    f = jnp.where((arrival >= 0)[..., None], f, 0.0)
    body = body.replace(
        sums=body.sums + jnp.einsum("lbnar,lbnae->lbnre", f, v.astype(jnp.float32)),
        mass=body.mass + f.sum(axis=3),
    )
    return body, (k, v, jnp.full_like(arrival, -1))
