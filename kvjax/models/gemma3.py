"""Gemma 3 text models: sliding and full layers, two rope bases, four norms a block, GeGLU."""

from kvjax.config import LayerKind, Rope, Style
from kvjax.models import numbers, rope_scaling
from kvjax.models.family import HF_NAMES, Family
from kvjax.models.numbers import Numbers, layer_types
from kvjax.models.plain import FULL, SLIDING

LOCAL_BASE, GLOBAL_BASE = 10_000.0, 1_000_000.0
LAYERS_27B = 62  # the one size whose query scale is not head_dim ** -0.5, and GGUF does not say so

DEFAULTS = {  # of transformers' Gemma3TextConfig, which multimodal files rely on
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
}


def config_from_hf(values):
    """The ModelConfig of a config.json, of a text model or of the text part of a larger one."""
    values = values.get("text_config") or values
    if not isinstance(values, dict):
        raise Numbers({"text_config": values}, "config.json").wrong("text_config", "an object")
    n = Numbers({**DEFAULTS, **values}, "config.json")
    n.refuse("hidden_activation", "gelu_pytorch_tanh")
    n.refuse("attention_bias", False)
    n.refuse("use_bidirectional_attention", False)
    n.refuse("attn_logit_softcapping")
    n.refuse("final_logit_softcapping")
    full, sliding = _ropes(n)
    every = n.count("sliding_window_pattern", n.get("_sliding_window_pattern", 6))
    return _build(
        n,
        numbers.sizes_from_hf(n),
        layer_types(n, lambda layers: _alternate(layers, every)),
        LayerKind(None, full),
        LayerKind(n.count("sliding_window"), sliding),
        rope_scaling.context(n, "max_position_embeddings", full),
        n.real("query_pre_attn_scalar") ** -0.5,
        n.flag("tie_word_embeddings", True),
    )


def _ropes(n: Numbers):
    """Rotations of full and of sliding layers; an old file's scaling is for full layers only."""
    new = n.get("rope_parameters")
    if isinstance(new, dict) and (FULL in new or SLIDING in new):
        # rope_theta of the file's top level is the full layers' base, never the sliding ones'
        bare = Numbers({k: v for k, v in n.values.items() if k != "rope_theta"}, n.where)
        full = rope_scaling.from_hf(n, GLOBAL_BASE, new.get(FULL) or {})
        local = n.get("rope_local_base_freq", LOCAL_BASE)
        return full, rope_scaling.from_hf(bare, local, new.get(SLIDING) or {})
    full = rope_scaling.from_hf(n, GLOBAL_BASE)
    return full, Rope(n.real("rope_local_base_freq", LOCAL_BASE))


def config_from_gguf(metadata, tensors):
    """The ModelConfig of GGUF metadata; without a pattern, every sixth layer is full."""
    n = Numbers(metadata, tensors.where, "gemma3.")
    layers = n.count("block_count", most=numbers.MOST_LAYERS)
    sizes = numbers.sizes_from_gguf(n, tensors.shapes)
    n.refuse("attn_logit_softcapping")
    n.refuse("final_logit_softcapping")
    divisor = sizes["width"] / sizes["heads"] if layers == LAYERS_27B else sizes["head_dim"]
    factors = rope_scaling.stored_factors(tensors, sizes["head_dim"])
    full = rope_scaling.from_gguf(n, GLOBAL_BASE, factors)
    window = n.count("attention.sliding_window")
    return _build(
        n,
        sizes,
        _types_from_gguf(n, layers),
        LayerKind(None, full),
        LayerKind(window, Rope(n.real("rope.freq_base_swa", LOCAL_BASE))),
        rope_scaling.context(n, "context_length", full),
        divisor**-0.5,
        "output.weight" not in tensors.shapes,
    )


def _types_from_gguf(n: Numbers, layers):
    pattern = n.get("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list) and len(pattern) == layers:
        return [SLIDING if slides else FULL for slides in pattern]
    return _alternate(layers, n.count("attention.sliding_window_pattern", 6))


def _alternate(layers, every):
    return [SLIDING if (i + 1) % every else FULL for i in range(layers)]


def _build(n, sizes, types, full, sliding, context, query_scale, tied):
    style = Style(
        qk_norm=True,
        post_norms=True,
        gelu=True,
        unit_offset=True,
        scaled_embedding=True,
        tied=tied,
        query_scale=query_scale,
    )
    kinds = {FULL: full, SLIDING: sliding}
    return numbers.build("gemma3", sizes, types, kinds, context, style, n.where)


FAMILY = Family(
    "gemma3",
    config_from_hf,
    ("gemma3_text", "gemma3"),
    HF_NAMES
    | {
        "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    },
    config_from_gguf,
    "gemma3",
    gguf_norm_shift=1.0,
)
