"""Qwen3: norms on q and k, a head dim of its own, no biases."""

from kvjax.models import plain, qwen2
from kvjax.models.family import HF_NAMES, Family
from kvjax.models.numbers import Numbers


def config_from_hf(values):
    """The ModelConfig of a config.json; the head dim is 128 where the file has none."""
    n = Numbers({"num_key_value_heads": 32, **values}, "config.json")
    n.refuse("attention_bias", False)
    window = qwen2.window_of(n)
    types = qwen2.types_of(n, window)
    return plain.from_hf(n, "qwen3", types=types, window=window, head_dim=128, qk_norm=True)


def config_from_gguf(metadata, tensors):
    """The ModelConfig of GGUF metadata."""
    n = Numbers(metadata, tensors.where, "qwen3.")
    return plain.from_gguf(n, tensors, "qwen3", qk_norm=True)


FAMILY = Family("qwen3", config_from_hf, ("qwen3",), HF_NAMES, config_from_gguf, "qwen3")
