"""Llama 2 and 3 (SmolLM2 among them): one kind of layer, no biases, llama3 rope scaling."""

from kvjax.models import plain
from kvjax.models.family import HF_NAMES, Family
from kvjax.models.numbers import Numbers, layer_types


def config_from_hf(values):
    """The ModelConfig of a config.json."""
    n = Numbers(values, "config.json")
    n.refuse("attention_bias", False)
    types = layer_types(n, lambda layers: [plain.FULL] * layers)
    return plain.from_hf(n, "llama", types=types, window=None)


def config_from_gguf(metadata, tensors):
    """The ModelConfig of GGUF metadata. Mistral is stored as this architecture too."""
    n = Numbers(metadata, tensors.where, "llama.")
    n.refuse("expert_count", 0)
    return plain.from_gguf(n, tensors, "llama")


FAMILY = Family(
    "llama", config_from_hf, ("llama",), HF_NAMES, config_from_gguf, "llama", gguf_permuted=True
)
