"""Numbers of each family come out of config.json and GGUF metadata in every spelling."""

import numpy as np
import pytest

from kvjax import models
from kvjax.config import Rope
from kvjax.errors import InputError
from kvjax.models import rope_scaling
from kvjax.models.numbers import Numbers

LLAMA31 = dict(
    model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_act="silu",
    max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=False,
    attention_bias=False, mlp_bias=False,
)  # fmt: skip
LLAMA31_SCALING = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192, rope_type="llama3",
)  # fmt: skip


def test_llama_old_and_new_spelling():
    read = models.FAMILIES["llama"].config_from_hf
    old = read(LLAMA31 | {"rope_theta": 5e5, "rope_scaling": LLAMA31_SCALING})
    new = read(LLAMA31 | {"rope_parameters": LLAMA31_SCALING | {"rope_theta": 5e5}})
    assert old == new
    assert old.kinds[0].rope == Rope(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
    assert (old.head_dim, old.kv_heads, old.context) == (128, 8, 131072)
    plain = read(LLAMA31 | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}})
    assert plain.kinds[0].rope == Rope(5e5, "linear", 2.0)
    for wrong in ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "linear"}):
        with pytest.raises(InputError, match="rope scaling"):
            read(LLAMA31 | {"rope_scaling": wrong})


def test_mistral_windows():
    read = models.FAMILIES["mistral"].config_from_hf
    first = read(LLAMA31 | {"sliding_window": 4096, "rope_theta": 1e4})
    assert [k.window for k in first.kinds] == [4096] and set(first.pattern) == {0}
    assert read(LLAMA31 | {"sliding_window": None}).kinds[0].window is None
    assert read(LLAMA31).kinds[0].window == 4096


def test_qwen2_windows_and_yarn():
    read = models.FAMILIES["qwen2"].config_from_hf
    base = LLAMA31 | dict(
        model_type="qwen2", max_position_embeddings=32768, rope_theta=1e6,
        use_sliding_window=False, sliding_window=32768, max_window_layers=28,
    )  # fmt: skip
    assert read(base).kinds[0].window is None and read(base).style.qkv_bias
    slides = read(base | {"use_sliding_window": True, "sliding_window": 64})
    assert [k.window for k in slides.kinds] == [None, 64]
    assert slides.pattern == (0,) * 28 + (1,) * 4
    listed = ["sliding_attention", "full_attention"] * 16
    slides = read(base | dict(use_sliding_window=True, layer_types=listed, sliding_window=8))
    assert slides.pattern == (0, 1) * 16 and slides.kinds[0].window == 8
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = read(base | {"rope_scaling": yarn})
    assert found.kinds[0].rope == Rope(1e6, "yarn", 4.0, 32768)
    assert found.context == 131072


def test_qwen3_has_its_own_head_dim():
    found = models.FAMILIES["qwen3"].config_from_hf(
        LLAMA31 | dict(hidden_size=1024, num_attention_heads=16, sliding_window=None)
    )
    assert (found.head_dim, found.style.qk_norm, found.style.qkv_bias) == (128, True, False)


def test_gemma3_old_and_new_spelling():
    read = models.FAMILIES["gemma3"].config_from_hf
    base = dict(
        model_type="gemma3_text", hidden_size=2560, intermediate_size=10240, num_hidden_layers=7,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262208,
        max_position_embeddings=131072, rms_norm_eps=1e-6, query_pre_attn_scalar=256,
        hidden_activation="gelu_pytorch_tanh", sliding_window=1024,
    )  # fmt: skip
    old = read(
        base
        | dict(
            rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        )
    )  # fmt: skip
    new = read(
        base
        | dict(
            layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        )
    )
    assert old == new
    assert [(k.window, k.rope) for k in old.kinds] == [
        (1024, Rope(1e4)),
        (None, Rope(1e6, "linear", 8.0)),
    ]
    assert old.pattern == (0,) * 5 + (1, 0)
    assert old.scale == 1 / 16 and old.style.tied and old.style.unit_offset
    with pytest.raises(InputError, match="attn_logit_softcapping"):
        read(base | {"attn_logit_softcapping": 50.0})


@pytest.mark.parametrize(
    "rope",
    [
        Rope(5e5, "llama3", 8.0, 8192),
        Rope(5e5, "llama3", 32.0, 8192),
        Rope(1e4, "llama3", 3.0, 777),
    ],
)
def test_llama3_scaling_is_read_back_from_gguf_factors(tmp_path, rope):
    factors = rope_scaling.llama3_factors(rope, 128).astype(np.float32)
    found = rope_scaling.from_gguf(
        Numbers({"llama.rope.freq_base": rope.base}, "m.gguf", "llama."),
        1e4,
        factors,
    )
    np.testing.assert_allclose(rope_scaling.llama3_factors(found, 128), factors, rtol=1e-4)
    assert found.scaling == "llama3" and found.original_length == rope.original_length
    factors[40] = 2.5 if factors[40] != 2.5 else 3.5
    with pytest.raises(InputError, match="rope_freqs"):
        rope_scaling.from_gguf(Numbers({}, "m.gguf"), rope.base, factors)
