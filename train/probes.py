"""Meta-Soft: soft tokens whose attention to a prompt is that of the text that goes on from it."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.init import init_cache
from kvjax.cache.ops import absorb_long
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.data import moby_dick
from kvjax.errors import InputError
from kvjax.evidence import Mass
from kvjax.model import observe
from kvjax.scorers.probe_attention import PROBES
from kvjax.scorers.probe_attention import probes as soft_tokens
from kvjax.train.less import sequences  # pyright: ignore[reportMissingImports]
from kvjax.train.loop import TrainConfig, Trained, train  # pyright: ignore[reportMissingImports]

LEAST = 1e-9
"""Added to shares of attention before their logarithm."""


def orthonormal(basis: jax.Array) -> jax.Array:
    """[c m]: orthonormal rows that span the same, as Gram-Schmidt makes them in order; by QR."""
    q, r = jnp.linalg.qr(basis.T)
    return (q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)).T


def start(model: Any, tokens: np.ndarray, count: int, rows: int, seed: int = 0) -> dict[str, Any]:
    """What training begins with: `rows` embeddings of the texts' tokens, and a random selector.

    A soft token is as long as those embeddings are in the mean, and stays so.
    """
    config, ids = model.config, np.unique(tokens)
    if not 1 <= rows <= min(len(ids), config.width):
        raise InputError(
            f"rows is {rows}; give from 1 to {min(len(ids), config.width)}: the texts have "
            f"{len(ids)} different tokens and the model is {config.width} wide"
        )
    if count < 1:
        raise InputError(f"count is {count}; give a soft token or more")
    ids = np.random.default_rng(seed).choice(ids, rows, replace=False)
    found = jnp.take(model.params.embed, ids, axis=0).astype(jnp.float32)
    long = jnp.linalg.norm(found, axis=-1, keepdims=True)
    shape = (config.width, count, rows)
    return {
        "basis": found / jnp.maximum(long, LEAST),
        "weight": jax.random.normal(jax.random.key(seed), shape) * config.width**-0.5,
        "bias": jnp.zeros(shape[1:]),
        "size": long.mean(axis=0) * (config.width**0.5 if config.style.scaled_embedding else 1.0),
    }


def divergence(want: jax.Array, got: jax.Array) -> jax.Array:
    """The mean of KL(want || got) over layers, rows and heads; [l b h s], each over its sum."""
    p, q = ((x + LEAST) / (x + LEAST).sum(axis=-1, keepdims=True) for x in (want, got))
    return jnp.mean(jnp.sum(p * (jnp.log(p) - jnp.log(q)), axis=-1))


def loss_of(config: ModelConfig, length: int, temperature: float = 1.0) -> Callable:
    """The loss of {"probes": ..., "model": Params} on token ids [b t].

    The first `length` of them are the prompt. The attention to it, in the mean over the tokens that
    follow, is what the mean over soft tokens in their place should be, in each layer that sees
    everything and each head.
    """

    def loss(params, tokens, key):
        model, table = params["model"], params[PROBES]
        prompt, later = tokens[:, :length], tokens[:, length:]
        exact = init_cache(config, CacheRecipe(), len(tokens), length)
        _, new = observe(model, config, exact, prompt, None, logits="none")
        exact = absorb_long(exact, new)

        def looked(x):
            _, new = observe(model, config, exact, x, Mass(), logits="none")
            seen = [
                e["sums"][..., :length]
                for e, group in zip(new.evidence, exact.groups, strict=True)
                if group.window is None
            ]
            return jnp.concatenate(seen)

        x = jnp.take(model.embed, prompt, axis=0)
        table = table | {"basis": orthonormal(table["basis"])}
        count = jnp.full(len(tokens), length, jnp.int32)
        made = soft_tokens(table, x, count, key, temperature)
        return divergence(jax.lax.stop_gradient(looked(later)), looked(made))

    return loss


def fit(
    model: Any, texts: Any = None, *, length: int = 512, later: int = 64, count: int = 8,
    rows: int = 64, temperature: float = 1.0, batch: int = 2, config: TrainConfig | None = None,
    out: str | os.PathLike[str] | None = None, progress: bool = True,
) -> Trained:  # fmt: skip
    """Trains the soft tokens of a model, which stays as it is; `tables` makes tables of the result.

    texts: strings, or token ids [c t] of length + later tokens; default 64 stretches of Moby Dick.
    Each is a prompt of `length` tokens and the `later` that follow it. count soft tokens are each
    one of `rows` rows of the basis. config: default 200 steps of Adam at 0.001. Nothing validates.
    Not a reproduction. FILL-IN: the objective, Judge Q's in our reading (KL between mean attention
    over the prompt's tokens, each head and layer alike); real texts in place of the model's
    answers; the basis made orthonormal by QR in each step; Gumbel-softmax with one row a soft token
    (straight-through); and every number.
    Source: Meta-Soft 2026, arXiv:2605.22337 (its abstract); Judge Q 2025, arXiv:2509.10798.
    """
    numbers = model.config
    if all(numbers.kinds[i].window is not None for i in numbers.pattern):
        raise InputError("every layer of this model has a window: there is nothing to choose from")
    if length < 1 or later < 1 or batch < 1:
        raise InputError(f"length, later and batch must be from 1, got {length}, {later}, {batch}")
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature is {temperature}; give a finite number above 0")
    size = length + later
    texts = [moby_dick()[: 64 * size * 8]] if texts is None else texts
    tokens = sequences(model, texts, size) if isinstance(texts[0], str) else np.asarray(texts)
    if tokens.shape[1:] != (size,):
        raise InputError(
            f"texts have shape {list(tokens.shape)}; give ids [c, {size}]: length + later"
        )
    each = len(tokens) // batch
    if not each:
        raise InputError(f"{len(tokens)} texts leave no batch; give {batch} or more")
    how = config or TrainConfig(200)
    seed = how.seed

    def batches(step):
        order = np.random.default_rng([seed, step // each]).permutation(len(tokens))
        return tokens[order[step % each * batch :][:batch]]

    params = {PROBES: start(model, tokens, count, rows, seed), "model": model.params}
    return train(loss_of(numbers, length, temperature), params, batches, how,
                 frozen=lambda name: name.startswith("model") or name.endswith("size"),
                 out=out, progress=progress)  # fmt: skip


def tables(trained: Trained) -> dict[str, Any]:
    """The tables of recipe "metasoft" from trained soft tokens: {"probes": ...}."""
    made = trained.params[PROBES]
    return {PROBES: made | {"basis": orthonormal(made["basis"])}}
