"""Mistral: Llama with a sliding window on every layer where the file names one."""

from kvjax.models import plain
from kvjax.models.family import HF_NAMES, Family
from kvjax.models.numbers import Numbers, layer_types


def config_from_hf(values):
    """The ModelConfig of a config.json; `sliding_window: null` is none, no entry is 4096."""
    n = Numbers({"sliding_window": 4096, "num_key_value_heads": 8, **values}, "config.json")
    n.refuse("attention_bias", False)
    window = None if n.get("sliding_window") is None else n.count("sliding_window")
    kind = plain.FULL if window is None else plain.SLIDING
    types = layer_types(n, lambda layers: [kind] * layers)
    return plain.from_hf(n, "mistral", types=types, window=window)


FAMILY = Family("mistral", config_from_hf, ("mistral",), HF_NAMES)
