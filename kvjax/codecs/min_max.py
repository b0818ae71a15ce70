"""Asymmetric rounding: a group of numbers to the levels between its least and its largest.

Scale and minimum are bfloat16, rounded outwards before anything is divided by them, so that every
number stays within half a level: a channel with a bias of 300, where bfloat16 has steps of 2, gets
levels that are up to 2 / (2**bits - 1) wider, not an offset.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax.codecs import packing
from kvjax.codecs.scales import TINY, at_least, at_most, halves, whole
from kvjax.errors import InputError


def encode(x, bits: int, size: int, axis: int, valid=None) -> dict:
    """Codes of x [... s d] in groups of `size` along the axis -2 (tokens) or -1 (channels).

    "codes" is uint8 [... s d]; "scale" and "low" are bits of bfloat16, one entry a group. The last
    group has what is left. valid [... s]: other tokens count in no group's minimum and maximum.
    """
    x = x.astype(jnp.float32)
    seen = True if valid is None else valid[..., None]
    low = _by_group(jnp.min, jnp.where(seen, x, jnp.inf), size, axis)
    high = _by_group(jnp.max, jnp.where(seen, x, -jnp.inf), size, axis)
    low = at_most(jnp.where(low <= high, low, 0.0))  # 0 where no token is valid
    scale = at_least(jnp.maximum((high - low) / (2**bits - 1), TINY))
    codes = jnp.round((x - _wide(low, x, size, axis)) / _wide(scale, x, size, axis))
    codes = jnp.clip(codes, 0, 2**bits - 1).astype(jnp.uint8)
    return {"codes": codes, "scale": halves(scale), "low": halves(low)}


def decode(codes: dict, size: int, axis: int, dtype):
    """x [... s d] of its codes."""
    levels = codes["codes"].astype(jnp.float32)
    scale, low = (_wide(whole(codes[k]), levels, size, axis) for k in ("scale", "low"))
    return (low + levels * scale).astype(dtype)


def pack(codes: dict, bits: int) -> dict:
    """What is stored of the codes of a page; the tokens of scales and minima last, where a TPU has
    its 128 lanes."""
    turned = {k: jnp.swapaxes(codes[k], -1, -2) for k in ("scale", "low")}
    return {"codes": packing.pack(codes["codes"], bits)} | turned


def unpack(stored: dict, bits: int, slots: int) -> dict:
    """The codes of a page of so many slots."""
    turned = {k: jnp.swapaxes(stored[k], -1, -2) for k in ("scale", "low")}
    return {"codes": packing.unpack(stored["codes"], bits, slots)} | turned


def bound(x, bits: int, size: int, axis: int):
    """Largest error of an entry [... s]: half a level, roundings of float32, and its least number
    for x, low, their difference and the result, each of which XLA flushes to zero below it."""
    scale = whole(encode(x, bits, size, axis)["scale"])
    level = _wide(scale, x, size, axis).max(axis=-1)
    return 0.5 * level + 2e-6 * jnp.abs(x.astype(jnp.float32)).max(axis=-1) + 4 * TINY


def check_size(size: int) -> None:
    """Refuses a group that holds nothing."""
    if size < 1:
        raise InputError(f"group_size must be at least 1, got {size}")


def _by_group(reduce, x, size, axis):
    x = jnp.moveaxis(x, axis, -1)
    size = min(size, x.shape[-1])
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)]
    x = jnp.pad(x, pad, mode="edge")  # of the last group, so that it changes no extreme
    return jnp.moveaxis(reduce(rearrange(x, "... (m g) -> ... m g", g=size), axis=-1), -1, axis)


def _wide(y, like, size, axis):
    """For each number of `like` along the axis, the entry of its group."""
    wide = jnp.repeat(y, min(size, like.shape[axis]), axis)
    return jax.lax.slice_in_dim(wide, 0, like.shape[axis], axis=axis)
