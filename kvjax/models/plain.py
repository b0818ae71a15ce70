"""What Llama, Mistral, Qwen2 and Qwen3 share: one rotation, full or sliding layers, SiLU."""

from kvjax.config import LayerKind, ModelConfig, Style
from kvjax.models import numbers, rope_scaling
from kvjax.models.family import Tensors
from kvjax.models.numbers import Numbers

FULL, SLIDING = "full_attention", "sliding_attention"


def from_hf(n: Numbers, family, *, base=10_000.0, types, window, head_dim=None, **style):
    """The ModelConfig of a config.json; `types(layers)` where the file does not list them."""
    n.refuse("hidden_act", "silu")
    n.refuse("mlp_bias", False)
    rope = rope_scaling.from_hf(n, base)
    kinds = {FULL: LayerKind(None, rope), SLIDING: LayerKind(window, rope)}
    if window is None:
        del kinds[SLIDING]
    return numbers.build(
        family,
        numbers.sizes_from_hf(n, head_dim),
        types,
        kinds,
        rope_scaling.context(n, "max_position_embeddings", rope),
        Style(tied=n.flag("tie_word_embeddings", False), **style),
        n.where,
    )


def from_gguf(n: Numbers, tensors: Tensors, family, *, base=10_000.0, **style) -> ModelConfig:
    """The ModelConfig of GGUF metadata; every layer slides if the file names a window."""
    layers = n.count("block_count", most=numbers.MOST_LAYERS)
    window = n.count("attention.sliding_window") if n.get("attention.sliding_window") else None
    sizes = numbers.sizes_from_gguf(n, tensors.shapes)
    rope = rope_scaling.from_gguf(n, base, rope_scaling.stored_factors(tensors, sizes["head_dim"]))
    return numbers.build(
        family,
        sizes,
        ["only"] * layers,
        {"only": LayerKind(window, rope)},
        rope_scaling.context(n, "context_length", rope),
        Style(tied="output.weight" not in tensors.shapes, **style),
        n.where,
    )
