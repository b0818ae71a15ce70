"""Reads rotary bases and scalings, in each spelling that checkpoints use."""

import math

import numpy as np

from kvjax.config import Rope
from kvjax.errors import InputError
from kvjax.models.family import Tensors
from kvjax.models.numbers import Numbers


def from_hf(n: Numbers, base: float, spec=None) -> Rope:
    """The Rope of a config.json, old spelling (`rope_theta`, `rope_scaling`) or new.

    `spec` is the dict to read, by default `rope_parameters` or `rope_scaling`; `base` where the
    file gives none.
    """
    spec = spec if spec is not None else n.get("rope_parameters", n.get("rope_scaling", {}))
    if not isinstance(spec, dict):
        raise n.wrong("rope_scaling", "an object")
    s = Numbers(spec, f"{n.where}, rope scaling")
    base = s.real("rope_theta", n.get("rope_theta", base))
    for place in (s, n):
        place.refuse("partial_rotary_factor", 1, 1.0)
    kind = s.get("rope_type", s.get("type", "default"))
    original = s.get("original_max_position_embeddings", n.get("max_position_embeddings"))
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, "linear", s.real("factor"))
    length = Numbers({"original_max_position_embeddings": original}, s.where)
    original = length.count("original_max_position_embeddings")
    if kind == "llama3":
        low, high = s.real("low_freq_factor", 1.0), s.real("high_freq_factor", 4.0)
        if low >= high:
            raise s.wrong("low_freq_factor", f"a number under high_freq_factor {high}")
        return Rope(base, "llama3", s.real("factor"), original, low, high)
    if kind == "yarn":
        s.refuse("truncate", True)
        factor = s.real("factor", n.count("max_position_embeddings") / original)
        fast, slow = s.real("beta_fast", 32.0), s.real("beta_slow", 1.0)
        return Rope(
            base, "yarn", factor, original,
            beta_fast=fast, beta_slow=slow, attention_factor=_attention_factor(s, factor),
        )  # fmt: skip
    raise InputError(
        f"{s.where}: type {str(kind)[:40]!r} is not one of default, linear, llama3, yarn; "
        "use another model"
    )


def _attention_factor(s: Numbers, factor):
    """What the file says of yarn's attention factor; None leaves the paper's 0.1 ln(factor) + 1."""
    if s.get("attention_factor") is not None:
        return s.real("attention_factor")
    if not (s.get("mscale") and s.get("mscale_all_dim")):
        return None
    log = 0.1 * math.log(max(factor, 1.0))
    return (s.real("mscale") * log + 1.0) / (s.real("mscale_all_dim") * log + 1.0)


def from_gguf(n: Numbers, base: float, factors=None) -> Rope:
    """The Rope of GGUF metadata; `factors` [d/2] are the values of tensor rope_freqs.weight."""
    base = n.real("rope.freq_base", base)
    kind = n.get("rope.scaling.type", "linear" if n.get("rope.scale_linear") else "none")
    if factors is not None:
        return _llama3(n, base, np.asarray(factors, np.float64))
    if kind == "none":
        return Rope(base)
    factor = n.real("rope.scaling.factor", n.get("rope.scale_linear"))
    if kind == "linear":
        return Rope(base, "linear", factor)
    if kind == "yarn":
        original = n.count("rope.scaling.original_context_length", n.get("context_length", None))
        own = n.real("rope.scaling.attn_factor", n.get("rope.scaling.yarn_attn_factor", 1.0))
        scale = None if own == 1 else own * (0.1 * math.log(max(factor, 1.0)) + 1.0)
        return Rope(
            base, "yarn", factor, original,
            beta_fast=n.real("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=n.real("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=scale,
        )  # fmt: skip
    n.refuse("rope.scaling.type", "none", "linear", "yarn")
    raise AssertionError(kind)


def stored_factors(tensors: Tensors, head_dim: int):
    """The values of GGUF tensor rope_freqs.weight, [d/2], or None where the file has none."""
    found = tensors.shapes.get("rope_freqs.weight")
    if found is None:
        return None
    if found != (head_dim // 2,):
        raise InputError(
            f"{tensors.where}: tensor rope_freqs.weight has shape {found}, "
            f"expected {(head_dim // 2,)}; get the file again"
        )
    return tensors.rows("rope_freqs.weight", 0, 1)[0]


def llama3_factors(rope: Rope, head_dim: int) -> np.ndarray:
    """What llama3 scaling divides each frequency by, [d/2]; GGUF stores these numbers.

    Source: Llama 3.1 reference code; 1 above `high` turns in the original context, `factor` below
    `low`, between them the weighted mean of the two frequencies.
    """
    turns = rope.original_length * _frequencies(rope.base, head_dim) / (2 * math.pi)
    ramp = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
    return 1 / ((1 - ramp) / rope.factor + ramp)


def _frequencies(base, head_dim):
    return base ** -(np.arange(0, head_dim, 2) / head_dim)


def _llama3(n: Numbers, base, factors) -> Rope:
    """The llama3 Rope whose factors these are: published settings first, then a fit of the ramp.

    On the ramp, (1/f - 1/F) / (1 - 1/F) is linear in the frequency, which gives the original
    length and the two ends up to a common scale; that scale changes nothing.
    """
    if not (factors.ndim == 1 and np.all(factors >= 1) and np.all(np.isfinite(factors))):
        raise InputError(f"{n.where}: rope_freqs.weight holds no scaling factors; get it again")
    top = float(str(np.float32(factors.max())))
    if top == 1:
        return Rope(base)
    tries = [Rope(base, "llama3", top, 1 << i) for i in (13, 12, 14, 15, 11, 16, 17)]
    ramp = (1 / factors - 1 / top) / (1 - 1 / top)
    on = (ramp > 1e-6) & (ramp < 1 - 1e-6)
    if on.sum() >= 2:
        turns = _frequencies(base, 2 * len(factors))[on] / (2 * math.pi)
        slope, shift = np.polyfit(turns, ramp[on], 1)
        high = 1 - 1 / shift if shift < 0 else math.inf
        if slope > 0 and high < 1e6 and slope * high < 1e12:
            length = max(round(slope * (high - 1)), 1)
            tries.append(Rope(base, "llama3", top, length, 1.0, float(high)))
    for rope in tries:
        if np.allclose(llama3_factors(rope, 2 * len(factors)), factors, rtol=1e-4, atol=0):
            return rope
    raise InputError(
        f"{n.where}: rope_freqs.weight is no llama3 scaling of base {base:g}; "
        "load the model from its Hugging Face folder"
    )


def context(n: Numbers, key: str, rope: Rope) -> int:
    """The longest context: what the file says, or what yarn extends it to."""
    length = n.count(key, 8192, most=1 << 31)
    if rope.scaling == "yarn":
        return max(length, min(int(rope.factor * rope.original_length), 1 << 31))
    return length
