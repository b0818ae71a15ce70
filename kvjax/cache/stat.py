"""Stat: what queries gave each stored token, remembered beside it for scorers that stream.

A scorer that streams has `streams()`, an observer that looks along whenever a cache with the leaf
is read, and static `decay`. The observer returns, for one layer, a dictionary with any of

    "here"    [b t n]    what each new token starts with
    "tail"    [b c n]    what each slot of the tail gains
    "bodies"  ([b s n],) what each slot of each body gains, () for a state

or, where the look keeps its queries apart (`Looked.apart`), the same with a last axis of queries.
"""

import jax.numpy as jnp

from kvjax import scorers
from kvjax.cache.slots import Slots
from kvjax.config import CacheRecipe
from kvjax.shapes import Array, Float, Int


def streams(cache) -> bool:
    """Whether tokens of this cache carry a `stat`."""
    return any(group.tail.stat is not None for group in cache.groups)


def observer(recipe: CacheRecipe, layer, tables=None):
    """The observer of a layer whose tokens carry `stat`, with its tables, or None."""
    if layer.tail.stat is None:
        return None
    assert recipe.choice is not None
    return scorers.build(recipe.choice.scorer, (tables or {}).get("scorer")).streams()


def apart(recipe: CacheRecipe | None, t: int) -> bool:
    """Whether a look at t tokens keeps its queries apart: they may be drafts, taken back in part.

    Longer looks add theirs up: `append` of fewer than were looked at leaves the others' mass.
    """
    return recipe is not None and 1 < t <= 1 + recipe.lookahead


def add(group, new, i: int, count: Int[Array, "b"], recipe: CacheRecipe):
    """Group i with what the first count[b] new queries gave its slots, and the new tokens' own
    [l b n t]: `stat` fades by decay for each query, then gains. Rows of count 0 stay as they are.

    New tokens that come without evidence (made by hand) start at 0 and add nothing.
    """
    if group.tail.stat is None or new is None:
        return group, None
    shape = (group.stop - group.start, *new.k.shape[1:4])
    own = jnp.zeros(shape, jnp.float32)  # [l b t n]
    if new.evidence:
        assert recipe.choice is not None
        seen = new.evidence[i]
        decay = scorers.build(recipe.choice.scorer).decay
        gained = lambda leaf, gain: _gained(leaf, gain, count, decay)  # noqa: E731
        tail = group.tail.replace(stat=gained(group.tail.stat, seen.get("tail")))
        bodies = tuple(
            body.replace(stat=gained(body.stat, gain)) if isinstance(body, Slots) else body
            for body, gain in zip(group.bodies, _each(seen, group.bodies), strict=True)
        )
        group = group.replace(tail=tail, bodies=bodies)
        own = _committed(seen["here"], count, decay)
    return group, jnp.swapaxes(own, 2, 3)


def _each(seen, bodies):
    return seen.get("bodies") or (None,) * len(bodies)


def _gained(leaf: Float[Array, "l b n *s"], gain, count, decay: float):
    """A leaf of a tail [l b n c] or of a body [l b n p s] after a look."""
    wide = lambda x: x.reshape((1, -1) + (1,) * (leaf.ndim - 2))  # noqa: E731
    after = leaf if decay == 1.0 else leaf * wide(decay ** count.astype(jnp.float32))
    if gain is not None:
        after = after + jnp.swapaxes(_committed(gain, count, decay), 2, 3).reshape(leaf.shape)
    return jnp.where(wide(count) > 0, after, leaf)


def _committed(gain, count, decay: float):
    """[l b s n] of a look: of queries kept apart [l b s n t] the first count[b], faded since."""
    if gain.ndim == 4:
        return gain
    since = count[:, None] - 1 - jnp.arange(gain.shape[-1])  # [b t]
    weight = jnp.where(since >= 0, decay ** jnp.maximum(since, 0).astype(jnp.float32), 0.0)
    return jnp.einsum("lbsnt,bt->lbsn", gain, weight)
