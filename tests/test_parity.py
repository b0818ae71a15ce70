"""Next-token logits equal those of Hugging Face, and every switch of a family matters.

The golden files come from tests/golden/make_golden.py. Errors are relative: the largest absolute
difference over the largest absolute logit.
"""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from kvjax import model
from kvjax.config import Rope
from kvjax.models.load import load_weights

GOLDEN = pathlib.Path(__file__).parent / "golden"
NAMES = ("llama", "llama-yarn", "llama-linear", "mistral", "qwen2", "qwen3", "gemma3")
TOLERANCE = 1e-4  # float32 sums in two orders, through 4 to 6 layers of deviation 0.3
SMOLLM2_TOLERANCE = 2e-3  # absolute, of logits up to 30: 30 layers of real weights in float32


def logits_of(params, config, ids):
    return np.asarray(
        jax.jit(lambda p, t: model.look(p, config, None, t, logits="all")[0])(params, ids)
    )


def golden_of(name):
    with np.load(GOLDEN / "tiny" / name / "logits.npz") as data:
        return data["ids"], data["logits"]


def error(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", NAMES)
def test_tiny_model_equals_hugging_face(name):
    params, config, _ = load_weights(GOLDEN / "tiny" / name)
    ids, expected = golden_of(name)
    assert error(logits_of(params, config, ids), expected) < TOLERANCE


def without(style):
    """Turns one structural switch off, and takes its weights away."""
    fields = {
        "qkv_bias": ("q_bias", "k_bias", "v_bias"),
        "qk_norm": ("q_norm", "k_norm"),
        "post_norms": ("post_attn_norm", "post_mlp_norm"),
    }

    def change(params, config):
        off = None if style == "query_scale" else False
        styles = dataclasses.replace(config.style, **{style: off})
        blocks = params.blocks.replace(**dict.fromkeys(fields.get(style, ()), None))
        return params.replace(blocks=blocks), dataclasses.replace(config, style=styles)

    return change


def kinds(change):
    """Changes every kind of layer."""

    def apply(params, config):
        return params, dataclasses.replace(config, kinds=tuple(map(change, config.kinds)))

    return apply


def rope(**changes):
    return kinds(lambda k: dataclasses.replace(k, rope=dataclasses.replace(k.rope, **changes)))


no_window = kinds(lambda k: dataclasses.replace(k, window=None))
wider_window = kinds(lambda k: dataclasses.replace(k, window=k.window and k.window + 1))
local_unscaled = kinds(lambda k: k if k.window else dataclasses.replace(k, rope=Rope(k.rope.base)))
local_scaled = kinds(
    lambda k: dataclasses.replace(k, rope=Rope(k.rope.base, "linear", 8.0)) if k.window else k
)


def one_kind_everywhere(index):
    def apply(params, config):
        return params, dataclasses.replace(config, pattern=(index,) * config.layers)

    return apply


def swapped_bases(params, config):
    one, two = config.kinds
    bases = dict(zip((one, two), (two.rope.base, one.rope.base), strict=True))
    change = kinds(
        lambda k: dataclasses.replace(k, rope=dataclasses.replace(k.rope, base=bases[k]))
    )
    return change(params, config)


SWITCHES = {
    ("llama", "scaling"): rope(scaling="none"),
    ("llama", "linear in place of llama3"): rope(scaling="linear"),
    ("llama", "original length"): rope(original_length=64),
    ("llama-yarn", "scaling"): rope(scaling="none"),
    ("llama-yarn", "linear in place of yarn"): rope(scaling="linear"),
    ("llama-yarn", "attention factor"): rope(attention_factor=1.0),
    ("llama-linear", "scaling"): rope(scaling="none"),
    ("mistral", "window"): no_window,
    ("mistral", "edge of the window"): wider_window,
    ("qwen2", "bias"): without("qkv_bias"),
    ("qwen3", "qk norm"): without("qk_norm"),
    ("gemma3", "window"): no_window,
    ("gemma3", "edge of the window"): wider_window,
    ("gemma3", "scaling"): local_unscaled,
    ("gemma3", "scaling of sliding layers"): local_scaled,
    ("gemma3", "two bases"): swapped_bases,
    ("gemma3", "all layers of the first kind"): one_kind_everywhere(0),
    ("gemma3", "all layers of the second kind"): one_kind_everywhere(1),
    ("gemma3", "qk norm"): without("qk_norm"),
    ("gemma3", "post norms"): without("post_norms"),
    ("gemma3", "gelu"): without("gelu"),
    ("gemma3", "unit offset"): without("unit_offset"),
    ("gemma3", "scaled embedding"): without("scaled_embedding"),
    ("gemma3", "query scale"): without("query_scale"),
}


@pytest.mark.parametrize("name,switch", SWITCHES, ids=["-".join(k) for k in SWITCHES])
def test_each_switch_matters(name, switch):
    params, config, _ = load_weights(GOLDEN / "tiny" / name)
    ids, expected = golden_of(name)
    changed = logits_of(*SWITCHES[name, switch](params, config), ids)
    assert np.isfinite(changed).all()
    assert error(changed, expected) > 100 * TOLERANCE


def test_goldens_reach_beyond_window_and_original_length():
    for name in NAMES:
        _, config, _ = load_weights(GOLDEN / "tiny" / name)
        ids, _ = golden_of(name)
        for kind in config.kinds:
            assert ids.shape[1] > 2 * max(kind.window or 0, kind.rope.original_length)


def test_smollm2_equals_hugging_face():
    params, config, _ = load_weights("smollm2-135m")
    with np.load(GOLDEN / "smollm2.npz") as golden:
        found = logits_of(params, config, golden["ids"][None])[0]
        whole = found[golden["positions"]] - golden["logits"]
        best = np.take_along_axis(found, golden["best"], 1) - golden["best_logits"]
        total = jax.nn.logsumexp(found, axis=1) - golden["logsumexp"]
    for difference in (whole, best, total):
        assert np.abs(difference).max() < SMOLLM2_TOLERANCE
