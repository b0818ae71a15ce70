"""Scales in two bytes: bfloat16, rounded so that what they promise holds, and kept as its bits.

As arrays of bfloat16 they would cost memory on the CPU: XLA computes nothing in it there, and makes
a float32 copy of the scales of all layers around a loop that reads a layer's.
"""

import jax
import jax.numpy as jnp

TINY = float(jnp.finfo(jnp.float32).tiny)
"""The least scale: XLA flushes smaller numbers to zero."""


def at_most(x):
    """The largest bfloat16 that is at most x, as float32.

    By bits: of a conversion there and back, which XLA may leave out, nothing can be relied on.
    """
    word = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    cut = word & ~0xFFFF  # towards zero
    down = jnp.where((word < 0) & (cut != word), cut + 0x10000, cut)
    return jax.lax.bitcast_convert_type(down, jnp.float32)


def nearest(x):
    """The nearest bfloat16, as float32; ties go up."""
    word = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type((word + 0x8000) & jnp.uint32(0xFFFF0000), jnp.float32)


def halves(x):
    """The bits of float32 numbers that are bfloat16, as uint16."""
    return (jax.lax.bitcast_convert_type(x, jnp.uint32) >> 16).astype(jnp.uint16)


def whole(bits):
    """The float32 numbers of `halves`."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def at_least(x):
    """The smallest bfloat16 that is at least x, as float32."""
    return -at_most(-x)
