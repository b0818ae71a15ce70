"""Probe attention: what a few soft tokens look at, which are made for each prompt."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax import struct
from kvjax.errors import InputError
from kvjax.evidence import Mass
from kvjax.scorers import smoothing
from kvjax.scorers.seen import Seen
from kvjax.shapes import Array, Float, Int

PROBES = "probes"
"""The tables of soft tokens, of the whole model: {"basis" [c m], orthonormal rows; "weight"
[m j c] and "bias" [j c] of the selector; "size" [1], the length of a soft token}, of j soft tokens
that are each one of c rows."""

LEAVES = ("basis", "weight", "bias", "size")


@struct.dataclass
class ProbeAttention:
    """Keeps what a few trained soft tokens, looked at after the prompt, attend to.

    They are rows of an orthonormal basis, picked for each prompt by a selector, and stay neither in
    the cache nor in its clock. Attention weights are averaged over them, pooled over `kernel`
    neighbours as in window_attention and reduced over the query heads of a kv head. Probes come in
    model.tables[recipe.name] = {"probes": ...}, from `kvjax.train.probes`.
    Not a reproduction: of the paper only the abstract and summaries were read. FILL-IN, ours:
    every size, the features of a prompt, the selector, the reduction over soft tokens and heads,
    the pooling (SnapKV's), window and sinks, and the training.
    Source: Meta-Soft 2026, arXiv:2605.22337 (its abstract); Judge Q 2025, arXiv:2509.10798.
    """

    kernel: int = struct.static(5)
    pool: str = struct.static("avg")  # avg | max
    reduce: str = struct.static("mean")  # mean | max | sum, over the group

    reads = "probes"

    def watch(self):
        return Mass()

    def check(self):
        """Refuses options that mean nothing."""
        smoothing.check(self.kernel, self.pool, self.reduce)

    def __call__(self, seen: Seen):
        assert seen.evidence is not None, "its observer has not looked"
        sums = seen.evidence["sums"]  # [b h s]
        return smoothing.smoothed(sums, seen.competes, self.kernel, self.pool, self.reduce)


def features(x: Float[Array, "b t m"], count: Int[Array, "b"]) -> Float[Array, "b m"]:
    """A prompt as one vector: the mean of its count[b] embeddings, over its root mean square.

    FILL-IN: the paper's features are unknown; these need no reading of the prompt.
    """
    real = (jnp.arange(x.shape[1]) < count[:, None])[..., None]
    mean = jnp.where(real, x.astype(jnp.float32), 0.0).sum(axis=1) / jnp.maximum(count, 1)[:, None]
    return mean / jnp.sqrt(jnp.mean(mean**2, axis=-1, keepdims=True) + 1e-12)


def weights(
    table: dict[str, Any], x: Float[Array, "b m"], key: Any = None, temperature: float = 1.0
) -> Float[Array, "b j c"]:
    """How much of each basis row a soft token is: rows sum to 1, and one weight is 1.

    With a key, for training: a sample (Gumbel), whose gradient is that of the softmax at the
    temperature (straight-through). Without: the likeliest row. FILL-IN: a linear selector.
    """
    logits = jnp.einsum("bm,mjc->bjc", x, table["weight"]) + table["bias"]
    if key is not None:
        logits = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    hard = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    if key is None:
        return hard
    soft = jax.nn.softmax(logits / temperature, axis=-1)
    return hard + soft - jax.lax.stop_gradient(soft)


def probes(
    table: dict[str, Any], x: Float[Array, "b t m"], count: Int[Array, "b"], key: Any = None,
    temperature: float = 1.0,
) -> Float[Array, "b j m"]:  # fmt: skip
    """The soft tokens of prompts, as embeddings, from the embeddings of their tokens."""
    mixed = weights(table, features(x, count), key, temperature)
    return table["size"] * jnp.einsum("bjc,cm->bjm", mixed, table["basis"])


def checked(tables: Any, name: str, width: int) -> dict[str, Any]:
    """The probes of a recipe's tables; InputError if there are none, or not of this model."""
    table = (tables or {}).get(PROBES)
    if table is None:
        raise InputError(
            f"{name} needs probes of this model: train them with kvjax.train.probes and put them "
            f"into model.tables[{name!r}]"
        )
    got = {x: tuple(jnp.shape(table[x])) if x in table else () for x in LEAVES}
    m, j, c = (*got["weight"], 0, 0, 0)[:3]
    want = dict(zip(LEAVES, ((c, width), (width, j, c), (j, c), (1,)), strict=True))
    for x in LEAVES:
        if got[x] != want[x] or not m * j * c:
            raise InputError(
                f"probes of {name}: {x} has shape {list(got[x])}, expected {list(want[x])} for a "
                f"model of width {width}; use probes trained for this model"
            )
    return {x: jnp.asarray(table[x]) for x in LEAVES}
