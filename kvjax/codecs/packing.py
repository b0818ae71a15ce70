"""Packing small codes into int32 words: planar, along the tokens of a page.

A plane of b bits (1, 2, 4 or 8) of s tokens is R = s * b / 32 rows of words: row w of a channel
holds token j * R + w in its bits b * j .. b * j + b - 1. To read, whole rows are shifted by
constants and follow each other in the order of the tokens. Other widths are several planes, the
widest first, which has the highest bits: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1. Each is a
leaf of its own: sliced from one, two planes take five times as long to read on the CPU.
"""

import jax.numpy as jnp
from einops import rearrange

from kvjax.errors import InputError
from kvjax.shapes import Array, Int, Num

LANES = 128


def unit(bits: int) -> int:
    """Tokens that fill whole words in every plane: a page holds a multiple of it."""
    return 32 // _planes(bits)[-1]


def pack(codes: Num[Array, "*a s c"], bits: int) -> tuple[Int[Array, "*a _ _"], ...]:
    """The planes of codes 0 .. 2**bits - 1, each int32 [... R c] made `wide`; s is a multiple of
    `unit(bits)`."""
    codes, made, below = codes.astype(jnp.int32), [], bits
    for size in _planes(bits):
        below -= size
        plane = (codes >> below) & (2**size - 1)
        plane = rearrange(plane, "... (j w) c -> ... j w c", j=32 // size)
        made.append(wide((plane << _shifts(size)).sum(axis=-3)))  # no two have a bit in common
    return tuple(made)


def unpack(planes: tuple[Int[Array, "*a _ _"], ...], bits: int, s: int) -> Num[Array, "*a s c"]:
    """The codes of s tokens that `pack` was given, as uint8."""
    codes = jnp.int32(0)
    for size, words in zip(_planes(bits), planes, strict=True):
        words = rows(words, s * size // 32)
        plane = (words[..., None, :, :] >> _shifts(size)) & (2**size - 1)
        codes = codes << size | rearrange(plane, "... j w c -> ... (j w) c")
    return codes.astype(jnp.uint8)


def wide(x: Num[Array, "*a r c"]) -> Num[Array, "*a _ _"]:
    """Rows of fewer than 128 numbers side by side in rows of 128, two of 64 each, where they fit: a
    TPU has 128 lanes, and pads each row to them."""
    size = x.shape[-2] * x.shape[-1]
    return x.reshape(*x.shape[:-2], -1, LANES) if x.shape[-1] < LANES and not size % LANES else x


def rows(x: Num[Array, "*a _ _"], count: int) -> Num[Array, "*a count c"]:
    """What `wide` was given, of so many rows."""
    return x.reshape(*x.shape[:-2], count, -1)


def check_bits(bits: int, least: int) -> None:
    """Refuses a number of bits that no code has."""
    if not least <= bits <= 8:
        raise InputError(f"bits must be a whole number from {least} to 8, got {bits}")


def _planes(bits):
    return [size for size in (8, 4, 2, 1) if bits & size]


def _shifts(size):
    return size * jnp.arange(32 // size, dtype=jnp.int32)[:, None, None]
