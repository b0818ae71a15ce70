"""Weights come out of GGUF files and Hugging Face folders as they went in, and errors say why."""

import dataclasses
import json

import checkpoints
import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import HF

from kvjax import models
from kvjax.errors import InputError
from kvjax.models import gguf as gguf_file
from kvjax.models import safetensors, stack
from kvjax.models.load import load_weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


def config_of(family):
    return models.FAMILIES[family].config_from_hf(HF[family])


def assert_same(params, values, tolerance=0.0):
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    assert {p[-1].name for p, _ in leaves} == set(values)
    for path, leaf in leaves:
        np.testing.assert_allclose(leaf, values[path[-1].name], atol=tolerance, rtol=0)


# Hard case 12: q and k rows


def test_gguf_rows_are_undone_with_the_heads_of_each(tmp_path):
    config = dataclasses.replace(config_of("llama"), pattern=(0,))
    values = checkpoints.arrays(config)
    rows = np.ones((1, 1, 1, 32), np.float32)
    values["q"] = np.arange(32, dtype=np.float32).reshape(1, 4, 8, 1) * rows
    values["k"] = np.arange(16, dtype=np.float32).reshape(1, 2, 8, 1) * rows
    path = checkpoints.write_gguf(tmp_path / "m.gguf", values, config, "llama")
    stored = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    assert list(stored["blk.0.attn_k.weight"][:8, 0]) == [0, 4, 1, 5, 2, 6, 3, 7]
    params, _, _ = gguf_file.read(path)
    assert list(params.blocks.q[0, :, :, 0].ravel()) == list(range(32))
    assert list(params.blocks.k[0, :, :, 5].ravel()) == list(range(16))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures_keep_their_rows(tmp_path, arch):
    config, values = config_of(arch), checkpoints.arrays(config_of(arch))
    extra = {"gemma3.attention.sliding_window": 4} if arch == "gemma3" else {}
    path = checkpoints.write_gguf(tmp_path / "m.gguf", values, config, arch, extra)
    np.testing.assert_array_equal(gguf_file.read(path)[0].blocks.k, values["k"])


# Both formats


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_and_folder_give_the_same_weights_and_config(tmp_path, family):
    config = config_of(family)
    values = checkpoints.arrays(config)
    folder = checkpoints.write_folder(tmp_path / "hf", HF[family], values, config, shards=2)
    params, found, source = load_weights(folder)
    assert (found, source) == (config, ("folder", folder))
    assert_same(params, values)
    arch = models.FAMILIES[family].gguf_arch or "llama"
    extra = {}
    if family == "mistral":
        extra = {"llama.attention.sliding_window": 4}
    if family == "gemma3":
        extra = {
            "gemma3.attention.sliding_window": 4, "gemma3.attention.sliding_window_pattern": 3,
            "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0,
        }  # fmt: skip
    path = checkpoints.write_gguf(tmp_path / "m.gguf", values, config, arch, extra)
    params, found, (kind, metadata) = load_weights(path)
    assert found == dataclasses.replace(config, family=arch)
    assert (kind, metadata["general.architecture"]) == ("gguf", arch)
    assert metadata["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]
    # gemma3: the converter rounds 1 + w to float32, so w is known to half an ulp of 2
    assert_same(params, values, 1.2e-7 if family == "gemma3" else 0.0)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_a_folder_keeps_its_dtype_unless_told(tmp_path, stored):
    config = config_of("llama")
    values = {k: v.astype(stored) for k, v in checkpoints.arrays(config).items()}
    checkpoints.write_folder(tmp_path, HF["llama"], values, config, dtype=stored)
    params, found = safetensors.read(tmp_path)
    assert found.dtype == np.dtype(stored).name
    assert_same(params, values)
    params, found = safetensors.read(tmp_path, "float32")
    assert (found.dtype, params.embed.dtype) == ("float32", np.float32)
    assert_same(params, values)


def test_tied_and_untied_heads(tmp_path):
    tied = config_of("llama")
    untied = dataclasses.replace(tied, style=dataclasses.replace(tied.style, tied=False))
    values = checkpoints.arrays(untied)
    says = {k: v for k, v in HF["llama"].items() if k != "tie_word_embeddings"}
    checkpoints.write_folder(tmp_path / "a", says, values, untied)
    assert safetensors.read(tmp_path / "a")[1].style.tied is False
    checkpoints.write_folder(tmp_path / "b", HF["llama"], values, untied)
    assert safetensors.read(tmp_path / "b")[0].head is None
    del values["head"]
    checkpoints.write_folder(tmp_path / "c", says, values, tied)
    assert safetensors.read(tmp_path / "c")[1].style.tied is True


def test_text_part_of_a_multimodal_folder(tmp_path):
    config, values = config_of("gemma3"), checkpoints.arrays(config_of("gemma3"))
    folder = checkpoints.write_folder(tmp_path, HF["gemma3"], values, config)
    file = folder / "model.safetensors"
    named = gemma_names(file)
    named["vision_tower.x.weight"] = np.zeros((2, 2), np.float32)
    checkpoints.save_file(named, file)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": HF["gemma3"]})
    )
    params, found = safetensors.read(folder)
    assert found == config
    assert_same(params, values)


def gemma_names(file):
    from safetensors.numpy import load_file

    return {f"language_model.{name}": array for name, array in load_file(file).items()}


# Quantized types

K_QUANTS = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}
LEGACY = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def k_blocks(kind, shape, rng):
    """Random blocks of a K-quant, with finite half-precision scales where the format has them."""
    size, scales = K_QUANTS[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // 256, size), np.uint8)
    for at in scales:
        value = rng.uniform(0.001, 0.01, raw.shape[:2]).astype(np.float16)
        raw[..., at : at + 2] = value[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", LEGACY + tuple(K_QUANTS))
def test_quantized_types(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(stack, "CHUNK_BYTES", 3 * 256 * 4)  # three rows at a time
    hf = HF["qwen3"] | dict(hidden_size=256, head_dim=64, intermediate_size=256, vocab_size=7)
    config = models.FAMILIES["qwen3"].config_from_hf(hf | {"num_hidden_layers": 1})
    values = checkpoints.arrays(config)
    code, rng = gguf.GGMLQuantizationType[kind], np.random.default_rng(1)
    stored = {}

    def quantize(name, array):
        if array.ndim < 2:
            return None
        raw = (
            k_blocks(kind, array.shape, rng)
            if kind in K_QUANTS
            else gguf.quants.quantize(np.ascontiguousarray(array), code)
        )
        stored[name] = gguf.quants.dequantize(raw, code)
        return raw, code

    path = checkpoints.write_gguf(tmp_path / "m.gguf", values, config, "qwen3", (), quantize)
    params, found, _ = gguf_file.read(path)
    assert found == config
    np.testing.assert_array_equal(params.embed, stored["token_embd.weight"])
    np.testing.assert_array_equal(params.blocks.down[0], stored["blk.0.ffn_down.weight"])
    np.testing.assert_array_equal(
        params.blocks.q[0].reshape(-1, 256), stored["blk.0.attn_q.weight"]
    )


def test_q4_0_block_by_hand(tmp_path):
    # one block: scale 0.5, nibbles 0..15 low then high; value = 0.5 * (nibble - 8)
    raw = np.concatenate([
        np.array([0.5], np.float16).view(np.uint8),
        np.array([i | (15 - i) << 4 for i in range(16)], np.uint8),
    ])  # fmt: skip
    config = config_of("llama")
    values = checkpoints.arrays(config)

    def quantize(name, array):
        if name == "token_embd.weight":
            return np.tile(raw, (24, 1)), gguf.GGMLQuantizationType.Q4_0
        return None

    path = checkpoints.write_gguf(tmp_path / "m.gguf", values, config, "llama", (), quantize)
    row = [(i - 8) / 2 for i in range(16)] + [(7 - i) / 2 for i in range(16)]
    np.testing.assert_array_equal(gguf_file.read(path)[0].embed, [row] * 24)


def test_leaves_are_taken_over_without_a_copy():
    values = stack.aligned((3, 5), "bfloat16")
    assert jax.device_put(values).unsafe_buffer_pointer() == values.ctypes.data


# What is refused


@pytest.mark.parametrize("field", ["q", "norm"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_weights_names_the_tensor(tmp_path, field, bad):
    config = config_of("llama")
    values = checkpoints.arrays(config)
    values[field].reshape(-1)[-1] = bad
    path = checkpoints.write_gguf(tmp_path / "m.gguf", values, config, "llama")
    name = {"q": r"blk\.2\.attn_q\.weight", "norm": r"output_norm\.weight"}[field]
    with pytest.raises(InputError, match=f"tensor {name} holds NaN"):
        gguf_file.read(path)


def test_missing_extra_and_misshaped_tensors(tmp_path):
    config = config_of("llama")
    values = checkpoints.arrays(config)
    folder = checkpoints.write_folder(tmp_path, HF["llama"], values, config)
    file, wrong = folder / "model.safetensors", HF["llama"] | {"intermediate_size": 48}
    (folder / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(
        InputError, match=r"layers.0.mlp.gate_proj.*\(32, 32\), expected \(48, 32\)"
    ):
        safetensors.read(folder)
    (folder / "config.json").write_text(json.dumps(HF["llama"] | {"num_hidden_layers": 4}))
    with pytest.raises(InputError, match=r"layers.3.*missing, expected shape \(32,\)"):
        safetensors.read(folder)
    (folder / "config.json").write_text(json.dumps(HF["llama"] | {"num_hidden_layers": 2}))
    with pytest.raises(InputError, match=r"layers.2.*no place in a llama model"):
        safetensors.read(folder)
    file.unlink()
    with pytest.raises(InputError, match="neither model.safetensors nor"):
        safetensors.read(folder)


def test_bad_dtype_and_model_type(tmp_path):
    config = config_of("llama")
    checkpoints.write_folder(tmp_path, HF["llama"], checkpoints.arrays(config), config)
    with pytest.raises(InputError, match="did you mean 'float16'"):
        safetensors.read(tmp_path, "float17")
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(InputError, match="did you mean 'llama'"):
        safetensors.read(tmp_path)
