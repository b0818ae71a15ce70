"""What a cache holds, read from the definition: arrivals of every slot, by layer, row and head."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import codecs
from kvjax.cache.pool import fold, unfold
from kvjax.cache.state import State
from kvjax.config import Store


def arrivals(cache, group):
    """Arrival index of each slot, from the definition: tail [b c], then bodies [l b r p s].

    A state, which has no slots, is None.
    """
    seen, edge, high = (np.asarray(x) for x in (cache.seen, cache.edge, cache.high))
    capacity = group.tail.k.shape[3]
    tail = np.full((len(seen), capacity), -1)
    for row in range(len(seen)):
        low = 0 if group.keeps_all else edge[row]
        if group.window is not None:  # a later query sees window - 1 tokens before it
            low = max(0, high[row] - capacity, seen[row] - group.window + 1)
        for p in range(low, seen[row]):
            tail[row, p % capacity] = p
    bodies = []
    for body in group.bodies:
        if isinstance(body, State):
            bodies.append(None)
            continue
        shape = (*jax.tree.leaves(body.codes)[0].shape[:4], body.page)
        if body.pos is None:
            flat = np.asarray(body.base)[..., None] + np.arange(shape[3] * shape[4])
            flat = np.where(flat < edge[:, None], flat, -1)[:, :, None]
            pos = np.broadcast_to(flat, (*shape[:3], flat.shape[-1])).reshape(shape)
        else:
            pos = np.asarray(body.pos).astype(np.int64)
            pos = np.where(pos == 65535, -1, pos) if body.pos.dtype == jnp.uint16 else pos
        bodies.append(pos)
    return tail, bodies


def in_pool(cache):
    """(layer, head, arrival) of each slot of the pool, from the definition: [b p], [b p], [b p s].

    layer counts those that see everything; -1 where no layer reads the page, whose slots are -1.
    """
    pool = cache.pool
    first, count = np.asarray(pool.first), np.asarray(pool.count)
    owner, pos = (np.asarray(x)[0, :, 0].astype(np.int64) for x in (pool.owner, pool.pos))
    layer = np.full(owner.shape, -1)
    for f, row in np.ndindex(first.shape):
        layer[row, first[f, row] : first[f, row] + count[f, row]] = f
    pos = np.where(pos == 65535, -1, pos) if pool.pos.dtype == jnp.uint16 else pos
    seen = (layer >= 0) & (owner >= 0)
    return layer, owner, np.where(seen[..., None], pos, -1)


def overwrite(cache, rng=None):
    """The cache with every slot that holds no token set to zero, or to large random values."""

    def fill(leaf, empty):
        leaf = np.asarray(leaf)
        at = empty.ndim - 1  # of the slots; a group of them may share an entry
        empty = empty.reshape(*empty.shape[:at], leaf.shape[at], -1).all(-1)
        empty = empty.reshape(empty.shape + (1,) * (leaf.ndim - empty.ndim))
        other = np.zeros(leaf.shape) if rng is None else rng.normal(size=leaf.shape) * 50
        scale = leaf.dtype == np.uint16  # the bits of a bfloat16
        other = other.astype(jnp.bfloat16).view(np.uint16) if scale else other.astype(leaf.dtype)
        return jnp.asarray(np.where(empty, other, leaf))

    def filled_up(body, pos):
        if pos is None:
            return body
        pair = codecs.pair(Store(page=body.page) if body.plain else cache.recipe.store)
        codes = jax.tree.map(lambda x: fill(x, pos < 0), pair.unpack(body.codes))
        return body.replace(codes=pair.pack(codes))

    groups = []
    for group in cache.groups:
        tail, bodies = arrivals(cache, group)
        empty = (tail < 0)[None, :, None]
        ring = group.tail.replace(k=fill(group.tail.k, empty), v=fill(group.tail.v, empty))
        made = map(filled_up, group.bodies, bodies)
        groups.append(group.replace(tail=ring, bodies=tuple(made)))
    pool = cache.pool
    if pool is not None:
        codes, empty = pool_codes(cache), in_pool(cache)[2][None, :, None] < 0
        codes = jax.tree.map(lambda x: fill(x, empty), codes)
        pool = pool.replace(codes=fold(codecs.pair(cache.recipe.store).pack(codes)))
    return cache.replace(groups=tuple(groups), pool=pool)


def pool_codes(cache):
    """The codes of the pool, slot by slot: leaves [1 b 1 p s ...]."""
    lead, d = cache.pool.owner.shape, cache.groups[0].tail.k.shape[-1]
    stored = unfold(cache.pool.codes, cache.recipe, lead, d)
    return codecs.pair(cache.recipe.store).unpack(stored)


def assert_same(one, two, but=()):
    """Two trees are equal bit by bit, except for the fields named in `but`."""
    a, b = (jax.tree_util.tree_flatten_with_path(x)[0] for x in (one, two))
    assert len(a) == len(b)
    for (path, x), (_, y) in zip(a, b, strict=True):
        name = jax.tree_util.keystr(path)
        if name.strip(".") not in but:
            x, y = np.asarray(x), np.asarray(y)
            assert x.dtype == y.dtype and x.shape == y.shape, name
            assert x.tobytes() == y.tobytes(), name


def entries(cache):
    """For each layer, row and head, the arrivals in its bodies, then those in the pool, as sorted
    tuples."""
    out = []
    for group in cache.groups:
        for pos in arrivals(cache, group)[1]:
            for at in np.ndindex(pos.shape[:3] if pos is not None else 0):
                out.append(tuple(sorted(pos[at][pos[at] >= 0].tolist())))
    return out + [tuple(sorted(x)) for _, x in sorted(by_head(cache).items())]


def by_head(cache):
    """{(layer that sees everything, row, head): arrivals in the pool, in order of their slots}."""
    if cache.pool is None:
        return {}
    layer, owner, pos = in_pool(cache)
    heads, layers = cache.groups[0].tail.k.shape[2], len(cache.pool.first)
    rows = range(cache.batch)
    made = {(f, b, n): [] for f in range(layers) for b in rows for n in range(heads)}
    for b, p, s in np.argwhere(pos >= 0).tolist():
        made[layer[b, p], b, owner[b, p]].append(int(pos[b, p, s]))
    return made
