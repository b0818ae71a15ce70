"""Writes tiny checkpoints of every family, as converters and transformers do."""

import json
from pathlib import Path

import gguf
import jax
import numpy as np
from safetensors.numpy import save_file

from kvjax import models
from kvjax.models.family import GGUF_NAMES
from kvjax.params import abstract_params

SIZES = dict(
    vocab_size=24, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
    rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
HF = {
    "llama": SIZES | {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 4},
    "qwen2": SIZES | {"model_type": "qwen2"},
    "qwen3": SIZES | {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3": SIZES
    | dict(
        model_type="gemma3_text", sliding_window=4, sliding_window_pattern=3, rope_theta=1e6,
        query_pre_attn_scalar=8, rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}  # fmt: skip


def arrays(config, seed=0):
    """Random float32 values for each field of Params and Block, layers stacked."""
    rng = np.random.default_rng(seed)
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    return {p[-1].name: rng.normal(0, 0.3, x.shape).astype(np.float32) for p, x in leaves}


def tensors(values, names, config):
    """The checkpoint's tensors by name: one a layer, heads flattened."""
    out = {}
    for field, array in values.items():
        if "{i}" not in names[field]:
            out[names[field]] = array
            continue
        for i, layer in enumerate(array):
            if field in ("q", "k", "v"):
                layer = layer.reshape(-1, config.width)
            elif field == "o":
                layer = layer.reshape(config.width, -1)
            out[names[field].format(i=i)] = layer.ravel() if "bias" in field else layer
    return out


def write_folder(folder: Path, hf: dict, values, config, shards=1, dtype=np.float32):
    """A Hugging Face folder with `shards` safetensors files."""
    names = models.FAMILIES[config.family].hf_names
    named = {k: v.astype(dtype) for k, v in tensors(values, names, config).items()}
    named = {k: np.ascontiguousarray(v) for k, v in named.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    where = {}
    for s in range(shards):
        part = dict(list(named.items())[s::shards])
        file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file)
        where |= {name: file for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def permute(rows, heads):
    """What the converter of the llama architecture does to q and k rows."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, values, config, arch, metadata=(), quantize=None):
    """A GGUF file; `quantize(name, array)` gives (bytes, type) or None to keep float32."""
    writer = gguf.GGUFWriter(path, arch)
    rope = config.kinds[-1].rope
    for key, value in {
        "block_count": config.layers, "context_length": config.context,
        "embedding_length": config.width, "feed_forward_length": config.mlp,
        "attention.head_count": config.heads, "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
    }.items():  # fmt: skip
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.eps)
    writer.add_float32(f"{arch}.rope.freq_base", rope.base)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(config.vocab)])
    for key, value in dict(metadata).items():
        writer.add_key_value(key, value, _kind(value))
    for name, array in tensors(values, GGUF_NAMES, config).items():
        if arch == "llama" and ("attn_q." in name or "attn_k." in name):
            array = permute(array, config.heads if "attn_q" in name else config.kv_heads)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        packed = quantize(name, array) if quantize else None
        if packed:
            writer.add_tensor(name, packed[0], raw_dtype=packed[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    return close(writer, path)


def close(writer, path):
    """Writes what the writer holds."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _kind(value):
    kinds = {int: "UINT32", float: "FLOAT32", str: "STRING", bool: "BOOL"}
    return gguf.GGUFValueType[kinds[type(value)]]
