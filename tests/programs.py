"""A small model and a cache of every kind, for programs that use kvjax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import kvjax
from kvjax.config import LayerKind, ModelConfig
from kvjax.params import init_params

CONFIG = ModelConfig(
    "llama", vocab=61, width=32, mlp=32, heads=8, kv_heads=4, head_dim=16,
    kinds=(LayerKind(),), pattern=(0, 0), context=4096,
)  # fmt: skip
HYBRID = dataclasses.replace(CONFIG, kinds=(LayerKind(), LayerKind(window=6)), pattern=(0, 1))
ODD = ModelConfig(
    "llama", vocab=61, width=32, mlp=32, heads=6, kv_heads=3, head_dim=16,
    kinds=(LayerKind(),), pattern=(0, 0), context=4096,
)  # fmt: skip
SMALL = dict(window=4, stride=4, lookahead=3, page=8)
KINDS = {  # a recipe of every kind of memory
    "exact": kvjax.recipe("exact", stride=4, lookahead=3),
    "int8": kvjax.recipe("int8", **SMALL),
    "scored": kvjax.recipe("key_norm", when="during", **SMALL),
    "streaming": kvjax.recipe("streaming_llm", stride=4, lookahead=3),
    "condensed": kvjax.recipe("snapkv", **SMALL),
    "pooled": kvjax.recipe("ada_snapkv", **SMALL),
    "condensed int8": kvjax.recipe("snapkv", codec="int8", **SMALL),
}
MAX = 64


def some(default, more):
    """Kinds of the default suite, and those left to `pytest -m full`."""
    return [*default, *(pytest.param(kind, marks=pytest.mark.full) for kind in more)]


@functools.cache
def weights(config=CONFIG):
    return init_params(config, jax.random.key(0), std=0.3)


def prompts(batch, length=20):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, 61)


@functools.cache
def reader(recipe, config=CONFIG):
    """A compiled reading of prompts (int[b t], right padded) into a new cache."""

    @jax.jit
    def read(params, tokens, count):
        cache = kvjax.init_cache(config, recipe, tokens.shape[0], MAX)
        logits, new = kvjax.look(params, config, cache, tokens, count=count, logits="last")
        return jnp.argmax(logits, -1), kvjax.absorb_long(cache, new, count)

    return read


def filled(recipe, batch=2, config=CONFIG):
    counts = jnp.array([20, 13, 7, 16][:batch])
    return reader(recipe, config)(weights(config), prompts(batch), counts)


def one(params, cache, token, config=CONFIG):
    logits, cache = kvjax.step(params, config, cache, token[:, None])
    return jnp.argmax(logits[:, -1], -1), kvjax.compress(cache)


def mesh_of(*shape):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
