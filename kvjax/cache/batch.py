"""Rows of a batch: select, insert and reset conversations."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvjax.cache.cache import Cache
from kvjax.cache.pool import Pool
from kvjax.cache.state import State
from kvjax.errors import InputError


def _in_batch(cache, rows, ndim: int) -> None:
    """Refuses what is not one row (ndim 0) or a list of them, and rows that are not there, where
    their numbers are known."""
    if jnp.ndim(rows) != ndim:
        kind = "one row" if ndim == 0 else "rows [r]"
        raise InputError(f"expected the number of {kind}, got an array of shape {jnp.shape(rows)}")
    if not isinstance(rows, Tracer):
        rows = jnp.asarray(rows)
        if not jnp.issubdtype(rows.dtype, jnp.integer) or bool(
            ((rows < 0) | (rows >= cache.batch)).any()
        ):
            raise InputError(f"rows {rows.tolist()} are not among the {cache.batch} of the cache")


def select(cache: Cache, rows: Any) -> Cache:
    """The conversations `rows` [r] of a batch, as a batch of their own."""
    rows = jnp.asarray(rows)
    _in_batch(cache, rows, 1)
    take = lambda x: jnp.take(x, rows, axis=1 if x.ndim > 1 else 0)  # noqa: E731
    return jax.tree.map(take, cache)


def insert(cache: Cache, row: Any, other: Cache) -> Cache:
    """Puts the one conversation of `other` in a row of a batch; both of one recipe and size."""
    _in_batch(cache, row, 0)
    if other.batch != 1:
        raise InputError(f"insert takes a cache of one row, got {other.batch}; use select first")
    if jax.tree.structure(cache) != jax.tree.structure(other):
        raise InputError(
            f"insert needs equal recipes and capacities: this cache is {cache.recipe.name!r} of "
            f"{cache.max_length}, the other {other.recipe.name!r} of {other.max_length}"
        )

    def put(x, y):
        axis = 1 if x.ndim > 1 else 0
        if x.shape[:axis] + x.shape[axis + 1 :] != y.shape[:axis] + y.shape[axis + 1 :]:
            raise InputError(f"insert needs equal leaves, got {x.shape} and {y.shape}")
        return jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), row, axis)

    return jax.tree.map(put, cache, other)


def reset(cache: Cache, row: Any) -> Cache:
    """Forgets a row: it is ready for a new conversation, with its budget as before.

    Outside jit a copy: no buffer is shared with the cache given.
    """
    _in_batch(cache, row, 0)
    here = jnp.arange(cache.batch) == row
    zero = lambda x: jnp.where(here, 0, x)  # noqa: E731
    groups = tuple(
        group.replace(
            tail=_unseen(group.tail, here),
            bodies=tuple(_emptied(body, here) for body in group.bodies),
        )  # fmt: skip
        for group in cache.groups
    )
    made = cache.replace(
        groups=groups, pool=cache.pool and _emptied(cache.pool, here), seen=zero(cache.seen),
        clock=zero(cache.clock), edge=zero(cache.edge), high=zero(cache.high),
        flags=zero(cache.flags),
    )  # fmt: skip
    return made if isinstance(cache.flags, Tracer) else jax.tree.map(jnp.copy, made)


def _unseen(part, here):
    """A tail or body whose rows `here` remember nothing of their tokens."""
    if part.stat is None:
        return part
    row = here.reshape(1, -1, *(1,) * (part.stat.ndim - 2))
    return part.replace(stat=jnp.where(row, 0.0, part.stat))


def _emptied(body, here):
    if isinstance(body, State):
        zero = lambda x: jnp.where(here.reshape(1, -1, *(1,) * (x.ndim - 2)), 0.0, x)  # noqa: E731
        return body.replace(sums=zero(body.sums), mass=zero(body.mass))
    if body.pos is None:
        return body.replace(base=jnp.where(here, 0, body.base))
    empty = jnp.asarray(65535 if body.pos.dtype == jnp.uint16 else -1, body.pos.dtype)
    body = body.replace(pos=jnp.where(here[:, None, None, None], empty, body.pos))
    if not isinstance(body, Pool):
        return _unseen(body, here)
    none = lambda x: jnp.where(here, 0, x)  # noqa: E731
    return body.replace(first=none(body.first), count=none(body.count))
