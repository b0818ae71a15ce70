"""Choosing the next token: greedy, temperature, nucleus."""

import jax
import jax.numpy as jnp

from kvjax.shapes import Array, Float, Int


def sample(logits: Float[Array, "b w"], key, *, temperature=0.0, top_p=1.0) -> Int[Array, "b"]:
    """A token id per row; temperature and top_p are static, temperature 0 takes the largest logit.

    top_p keeps the smallest set of tokens whose probability, after temperature, reaches it.
    Source: Holtzman et al. 2020, arXiv:1904.09751.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_p < 1:
        ordered = -jnp.sort(-logits, axis=-1)
        p = jax.nn.softmax(ordered, axis=-1)
        inside = jnp.cumsum(p, axis=-1) - p < top_p  # the first token always is
        bar = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= bar, logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
