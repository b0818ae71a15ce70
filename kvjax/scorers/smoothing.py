"""Smoothing: attention that slots got, pooled along the text and over the heads of a group."""

import jax
import jax.numpy as jnp
from einops import rearrange, reduce

from kvjax.errors import InputError, unknown
from kvjax.shapes import Array, Bool, Float


def check(kernel: int, pool: str, over: str) -> None:
    """Refuses options that mean nothing."""
    if kernel < 1:
        raise InputError(f"kernel must be at least 1, got {kernel}")
    if pool not in ("avg", "max"):
        raise unknown("value of pool", pool, ("avg", "max"))
    if over not in ("mean", "max", "sum"):
        raise unknown("value of reduce", over, ("mean", "max", "sum"))


def smoothed(
    sums: Float[Array, "b h s"], competes: Bool[Array, "b n s"], kernel: int, pool: str, over: str
) -> Float[Array, "b n s"]:
    """Pooled over `kernel` neighbours (zeros beyond the ends; "avg" divides by the whole kernel),
    then reduced over the query heads of a kv head. What does not compete is not pooled."""
    sums = jnp.where(competes[:, :1], sums, 0.0)
    shape, half = (1, 1, kernel), kernel // 2
    pad = ((0, 0), (0, 0), (half, kernel - 1 - half))
    if pool == "max":
        s = jax.lax.reduce_window(sums, -jnp.inf, jax.lax.max, shape, (1, 1, 1), pad)
    else:
        s = jax.lax.reduce_window(sums, 0.0, jax.lax.add, shape, (1, 1, 1), pad) / kernel
    return reduce(
        rearrange(s, "b (n g) s -> b n g s", n=competes.shape[1]), "b n g s -> b n s", over
    )
