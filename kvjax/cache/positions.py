"""Arrival indices and rotary positions, kept apart.

Arrival is the mask: unique, contiguous, never renumbered. The rotary position of a token is its
arrival plus a turn, by one of four policies:

keep    keys keep the rotation they came with; the next token continues at `seen`
rerot   condense rotates the kept keys to 0..n-1, once; the next token continues at n
read    keys are stored before RoPE and rotated on read by their rank among what is kept
reuse   pieces that were encoded apart keep their own positions (`join`); the next token continues
        after the longest
"""

import jax.numpy as jnp

from kvjax.config import Rope
from kvjax.layers import angles, frequencies, rotate
from kvjax.shapes import Array, Int

POLICIES = ("keep", "rerot", "read", "reuse")


def ring(capacity: int, seen: Int[Array, "b"], low: Int[Array, "b"]) -> Int[Array, "b c"]:
    """Arrival index in each slot of a ring that has taken tokens up to `seen`; -1 below `low`."""
    slot = jnp.arange(capacity, dtype=jnp.int32)
    last = seen[:, None] - 1
    pos = last - (last - slot) % capacity
    return jnp.where((pos >= low[:, None]) & (pos >= 0), pos, -1)


def ranks(pos: Int[Array, "*b s"]) -> Int[Array, "*b s"]:
    """Rank of each slot by arrival among the slots that are filled; 0 where empty."""
    key = jnp.where(pos >= 0, pos, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(jnp.argsort(key, axis=-1), axis=-1).astype(jnp.int32)
    return jnp.where(pos >= 0, order, 0)


def turn(k, by, rope: Rope):
    """Rotates keys [... s d] by `by` positions [... s] more, in float32.

    Used for keys stored before RoPE (by their whole position) and to move rotated keys (by the
    difference). The attention factor of YaRN is a length, applied once: a move leaves it alone.
    """
    cos, sin = angles(rope, k.shape[-1], by)
    return rotate(k, cos, sin)


def move(k, by, rope: Rope):
    """`turn` for keys that are already rotated: lengths stay."""
    factor = frequencies(rope, k.shape[-1])[1]
    cos, sin = angles(rope, k.shape[-1], by)
    return rotate(k, cos / factor, sin / factor)
