"""Numbers that scales are rounded to, so that what they promise holds after rounding."""

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


def at_least(x):
    """The smallest bfloat16 that is at least x, as float32."""
    return -at_most(-x)
