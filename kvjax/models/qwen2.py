"""Qwen2 and Qwen2.5: biases on q, k and v; upper layers may slide."""

from kvjax.models import plain
from kvjax.models.family import HF_NAMES, Family
from kvjax.models.numbers import Numbers, layer_types


def window_of(n: Numbers):
    """The sliding window, or None where the file has one but does not use it."""
    if not n.flag("use_sliding_window", False) or n.values.get("sliding_window", 4096) is None:
        return None
    return n.count("sliding_window", 4096)


def types_of(n: Numbers, window):
    """Layer types: those the file lists, else sliding from `max_window_layers` on."""
    first = n.get("max_window_layers", 28)
    if type(first) is not int:
        raise n.wrong("max_window_layers", "a whole number")

    def default(layers):
        sliding = [window is not None and i >= first for i in range(layers)]
        return [plain.SLIDING if s else plain.FULL for s in sliding]

    return layer_types(n, default)


def config_from_hf(values):
    """The ModelConfig of a config.json."""
    n = Numbers({"num_key_value_heads": 32, **values}, "config.json")
    window = window_of(n)
    types = types_of(n, window)
    return plain.from_hf(n, "qwen2", types=types, window=window, qkv_bias=True)


def config_from_gguf(metadata, tensors):
    """The ModelConfig of GGUF metadata."""
    n = Numbers(metadata, tensors.where, "qwen2.")
    return plain.from_gguf(n, tensors, "qwen2", qkv_bias=True)


FAMILY = Family("qwen2", config_from_hf, ("qwen2",), HF_NAMES, config_from_gguf, "qwen2")
