"""The weights of a decoder, as one pytree with layers stacked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.config import ModelConfig
from kvjax.shapes import Array, Float


@struct.dataclass
class Block(struct.Record):
    """Weights of all layers, stacked; output axes lead, as published checkpoints store them."""

    attn_norm: Float[Array, "l m"]
    q: Float[Array, "l h d m"]
    k: Float[Array, "l n d m"]
    v: Float[Array, "l n e m"]
    o: Float[Array, "l m h e"]
    mlp_norm: Float[Array, "l m"]
    gate: Float[Array, "l f m"]
    up: Float[Array, "l f m"]
    down: Float[Array, "l m f"]
    q_bias: Float[Array, "l h d"] | None = None  # style.qkv_bias
    k_bias: Float[Array, "l n d"] | None = None
    v_bias: Float[Array, "l n e"] | None = None
    q_norm: Float[Array, "l d"] | None = None  # style.qk_norm
    k_norm: Float[Array, "l d"] | None = None
    post_attn_norm: Float[Array, "l m"] | None = None  # style.post_norms
    post_mlp_norm: Float[Array, "l m"] | None = None


@struct.dataclass
class Params(struct.Record):
    """Weights of a decoder."""

    embed: Float[Array, "w m"]
    blocks: Block | tuple[Block, ...]  # stacked over layers, or (`apart`) one for each
    norm: Float[Array, "m"]
    head: Float[Array, "w m"] | None = None  # absent where the embedding is tied


def abstract_params(config: ModelConfig, dtype=None) -> Params:
    """The tree of ShapeDtypeStruct that weights of `config` have."""
    c, s = config, config.style
    dtype = jnp.dtype(dtype or c.dtype)

    def a(*shape) -> Any:  # stands for an array
        return jax.ShapeDtypeStruct(shape, dtype)

    def b(*shape):
        return a(c.layers, *shape)

    m, h, n, d, f = c.width, c.heads, c.kv_heads, c.head_dim, c.mlp
    bias = dict(q_bias=b(h, d), k_bias=b(n, d), v_bias=b(n, d)) if s.qkv_bias else {}
    norm = dict(q_norm=b(d), k_norm=b(d)) if s.qk_norm else {}
    post = dict(post_attn_norm=b(m), post_mlp_norm=b(m)) if s.post_norms else {}
    blocks = Block(
        attn_norm=b(m), q=b(h, d, m), k=b(n, d, m), v=b(n, d, m), o=b(m, h, d),
        mlp_norm=b(m), gate=b(f, m), up=b(f, m), down=b(m, f), **bias, **norm, **post,
    )  # fmt: skip
    return Params(a(c.vocab, m), blocks, a(m), None if s.tied else a(c.vocab, m))


def init_params(config: ModelConfig, key, dtype=None, std: float = 0.02) -> Params:
    """Random weights: normal with deviation `std`; norms at one (zero if they are 1 + weight)."""
    tree = abstract_params(config, dtype)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = jax.random.split(key, len(leaves))
    ones = 0.0 if config.style.unit_offset else 1.0

    def make(path, leaf, k):
        if "norm" in jax.tree_util.keystr(path[-1:]):
            return jnp.full(leaf.shape, ones, leaf.dtype)
        return std * jax.random.normal(k, leaf.shape, leaf.dtype)

    return jax.tree.unflatten(
        treedef, [make(p, x, k) for (p, x), k in zip(leaves, keys, strict=True)]
    )


def apart(params: Params) -> Params:
    """The same weights with leaves of their own for each layer, sharing memory on the CPU.

    A scan over stacked weights copies each layer's slice before XLA's CPU products read it, which
    costs more than the products of a decoding step; weights apart are read where they lie. For one
    CPU device: accelerators and training want them stacked.
    """
    host = jax.tree.map(np.asarray, params.blocks)
    layers = host.attn_norm.shape[0]
    blocks = tuple(
        jax.tree.map(lambda w: jax.device_put(w[i]), host)  # noqa: B023
        for i in range(layers)
    )
    return params.replace(blocks=blocks)
