"""Packing small codes into int32 words: planar, along the tokens of a page.

A plane of b bits (1, 2, 4 or 8) of s tokens is R = s * b / 32 rows of words: row w of a channel
holds token j * R + w in its bits b * j .. b * j + b - 1. To read, whole rows are shifted by
constants and follow each other in the order of the tokens. Other widths are several planes, the
widest first, which has the highest bits: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1.
"""

import jax.numpy as jnp
from einops import rearrange

from kvjax.errors import InputError
from kvjax.shapes import Array, Int, Num


def unit(bits: int) -> int:
    """Tokens that fill whole words in every plane: a page holds a multiple of it."""
    return 32 // _planes(bits)[-1]


def pack(codes: Num[Array, "*a s c"], bits: int) -> Int[Array, "*a w c"]:
    """Words of codes 0 .. 2**bits - 1; s is a multiple of `unit(bits)`, and w is s * bits / 32."""
    codes, rows, below = codes.astype(jnp.int32), [], bits
    for wide in _planes(bits):
        below -= wide
        plane = (codes >> below) & (2**wide - 1)
        plane = rearrange(plane, "... (j w) c -> ... j w c", j=32 // wide)
        rows.append((plane << _shifts(wide)).sum(axis=-3))  # no two have a bit in common
    return jnp.concatenate(rows, axis=-2)


def unpack(words: Int[Array, "*a w c"], bits: int) -> Num[Array, "*a s c"]:
    """The codes that `pack` was given, as uint8."""
    codes, at, slots = jnp.int32(0), 0, words.shape[-2] * 32 // bits
    for wide in _planes(bits):
        rows = words[..., at : at + slots * wide // 32, :]
        plane = (rows[..., None, :, :] >> _shifts(wide)) & (2**wide - 1)
        codes = codes << wide | rearrange(plane, "... j w c -> ... (j w) c")
        at += slots * wide // 32
    return codes.astype(jnp.uint8)


def packed(codes: dict, bits: int) -> dict:
    """The same leaves, with "codes" packed."""
    return {**codes, "codes": pack(codes["codes"], bits)}


def unpacked(stored: dict, bits: int) -> dict:
    """What `packed` was given."""
    return {**stored, "codes": unpack(stored["codes"], bits)}


def check_bits(bits: int, least: int) -> None:
    """Refuses a number of bits that no code has."""
    if not least <= bits <= 8:
        raise InputError(f"bits must be a whole number from {least} to 8, got {bits}")


def _planes(bits):
    return [wide for wide in (8, 4, 2, 1) if bits & wide]


def _shifts(wide):
    return wide * jnp.arange(32 // wide, dtype=jnp.int32)[:, None, None]
