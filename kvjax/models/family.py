"""What a family file gives to the readers of checkpoints."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from kvjax.config import ModelConfig


@runtime_checkable
class Tensors(Protocol):
    """Named tensors of a checkpoint: shapes from its headers, values read a few rows at a time."""

    @property
    def where(self) -> str:
        """What messages call the file."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor as stored, rows first."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop as floats, [rows, columns]; a vector is one row."""
        ...


@dataclasses.dataclass(frozen=True)
class Family:
    """Names and numbers of one family, in both file formats.

    The name maps lead from a field of Params or Block to a tensor name; `{i}` is the layer.
    """

    name: str
    config_from_hf: Callable[[Mapping], ModelConfig]
    hf_types: tuple[str, ...]  # model_type of config.json
    hf_names: Mapping[str, str]
    config_from_gguf: Callable[[Mapping, Tensors], ModelConfig] | None = None
    gguf_arch: str | None = None  # general.architecture; None: stored as another family's
    gguf_permuted: bool = False  # q and k rows pair up neighbours, (2i, 2i + 1)
    gguf_norm_shift: float = 0.0  # what the converter added to norm weights


HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{i}.input_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
    "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}

GGUF_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{i}.attn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "mlp_norm": "blk.{i}.ffn_norm.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
    "q_bias": "blk.{i}.attn_q.bias",
    "k_bias": "blk.{i}.attn_k.bias",
    "v_bias": "blk.{i}.attn_v.bias",
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
    "post_attn_norm": "blk.{i}.post_attention_norm.weight",
    "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
}
