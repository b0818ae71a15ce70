"""Pool: entries of all layers and heads in pages of one owner each, for unequal budgets.

A page belongs to one kv head of one layer, and the pages of a layer follow each other, so a layer
reads its own stretch of the pool and nothing else. Sizes depend on how many entries are kept in
all, never on who keeps them: one compilation serves every prompt of a bucket.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import codecs, struct
from kvjax.attention import WHOLE, Query, merge, visible
from kvjax.cache.slots import pack_pos, unpack_pos
from kvjax.config import CacheRecipe
from kvjax.shapes import EMPTY, Array, Int
from kvjax.sharding import by_rows

BLOCK = 2048
"""Slots read at once for few queries: fewer blocks, fewer merges."""


@struct.dataclass
class Pool(struct.Record):
    """A closed body of all layers that see everything; made by condense.

    Leaves that grow with tokens are [1 b 1 pages ...]; first and count are by layer. The codes of
    a page are one row of numbers (`fold`): slots apart, of 32 x 64 numbers say, would be padded to
    whole tiles on TPU, and the pool laid out anew at every step.
    """

    codes: tuple  # (codes of keys, codes of values), leaves [1 b 1 p x]
    pos: Int[Array, "1 b 1 p s"]  # arrival; uint16, all ones empty, or int32, -1 empty
    owner: Int[Array, "1 b 1 p"]  # kv head; -1 is free
    first: Int[Array, "f b"]  # first page of each layer that sees everything
    count: Int[Array, "f b"]  # its pages
    page: int = struct.static(32)
    most: int = struct.static(0)  # pages that one layer can have

    @property
    def pages(self) -> int:
        return self.owner.shape[3]


def fold(codes):
    """Packed codes [1 b 1 p ...] as a pool stores them: a page is rows of 128 numbers, or one."""

    def one(x):
        size = x[0, 0, 0, 0].size
        return x.reshape(*x.shape[:4], *((-1, 128) if size % 128 == 0 else (-1,)))

    return jax.tree.map(one, codes)


def unfold(codes, recipe: CacheRecipe, lead, d: int):
    """Folded codes with leading axes `lead`, pages last, as `codecs.Pair.pack` gave them."""
    assert recipe.store is not None
    x = jax.ShapeDtypeStruct((*lead, recipe.store.page, d), jnp.float32)
    like = jax.eval_shape(codecs.pair(recipe.store).write, x, x)
    return jax.tree.map(lambda x, y: x.reshape(y.shape), codes, like)


def room(total: int, page: int, heads: int) -> int:
    """Pages for `total` entries of so many heads in all: each may leave one page unfilled."""
    return max((total + heads * (page - 1)) // page, 1)


def empty(recipe: CacheRecipe, pages: int, most: int, layers: int, batch: int, d: int, dtype, kind):
    """A pool that holds nothing; kind is the dtype of positions."""
    assert recipe.store is not None
    page, pair = recipe.store.page, codecs.pair(recipe.store)
    lead = (1, batch, 1, pages)
    x = jnp.zeros((*lead, page, d), dtype)
    like = jax.eval_shape(lambda: fold(pair.write(x, x)))
    codes = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    pos = pack_pos(jnp.full((*lead, page), -1, jnp.int32), kind)
    zero = lambda: jnp.zeros((layers, batch), jnp.int32)  # noqa: E731  # a buffer each: donated
    owner = jnp.full(lead, -1, jnp.int16)
    return Pool(codes, pos, owner, zero(), zero(), page=page, most=min(most, pages))


def plan(keep, pool: Pool):
    """Deals pages: keep [l b n s] to (owner [b p], layer [b p], slot ids [b p s], real [b p s],
    first [l b], count [l b]); owner and layer are 0 where a page is free, and no slot is real."""
    layers, b, n, slots = keep.shape
    flat = rearrange(keep, "l b n s -> b (l n) s")
    count = flat.sum(axis=-1)
    need = -(-count // pool.page)  # [b l*n]
    stop = jnp.cumsum(need, axis=-1)
    index = jnp.arange(pool.pages)
    mine = jax.vmap(lambda s: jnp.searchsorted(s, index, side="right"))(stop)  # [b p]
    free = mine >= layers * n
    mine = jnp.minimum(mine, layers * n - 1)
    first = jnp.take_along_axis(stop - need, mine, axis=1)
    rank = ((index - first) * pool.page)[..., None] + jnp.arange(pool.page)  # [b p s]
    row = jnp.arange(b)[:, None, None]
    real = (rank < count[row[..., 0], mine][..., None]) & ~free[..., None]
    at = _nth(flat, mine, rank)
    by_layer = rearrange(need, "b (l n) -> l b n", n=n).sum(-1)
    start = jnp.cumsum(by_layer, axis=0) - by_layer
    return mine % n, mine // n, at, real, start.astype(jnp.int32), by_layer.astype(jnp.int32)


def _nth(mask, mine, rank):
    """The slot of the rank-th true entry of head mine[b p] of mask [b h s]; rank [b p s']."""
    total = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)

    def row(total, mine, rank):
        find = lambda head, want: jnp.searchsorted(total[head], want + 1)  # noqa: E731
        return jax.vmap(find)(mine, rank)

    return jnp.minimum(jax.vmap(row)(total, mine, rank), mask.shape[-1] - 1).astype(jnp.int32)


def attend(pool: Pool, first, count, query: Query, n: int, recipe: CacheRecipe, tables=None):
    """Attends to the pages first[b] .. first[b] + count[b] of one layer, block by block.

    On a mesh each shard reads the pages of its own rows.
    """
    assert recipe.store is not None
    pair = codecs.pair(recipe.store, tables)

    def run(rows, first, count, query):
        return _attend(rows, first, count, query, n, recipe, pair.inside, pool.most)

    rows = jax.tree.map(lambda x: x[0, :, 0], (pool.codes, pool.pos, pool.owner))
    query = query.replace(q=pair.turn_query(query.q))
    out, lse = by_rows(run, rows, first, count, query)
    return pair.turn_back(out), lse


def _attend(rows, first, count, query, n, recipe, pair, most):
    """`attend` to (codes, positions, owners) [b p ...]."""
    codes, pos, owner = rows
    few = pair.raw and query.q.shape[1] * query.q.shape[2] // n <= WHOLE
    per = min(max((BLOCK if few else BLOCK // 4) // recipe.store.page, 1), most)
    pages = owner.shape[1]

    def part(i):
        start = first + i * per
        low = jnp.clip(start, 0, pages - per)
        cut = lambda x: _pages(x, low, per)  # noqa: E731
        index = low[:, None] + jnp.arange(per)
        mine = (index >= start[:, None]) & (index < (first + count)[:, None])
        own = jnp.where(mine, cut(owner), -1)
        here = unfold(jax.tree.map(cut, codes), recipe, (len(low), 1, per), query.q.shape[3])
        k, v = pair.read(here, query.q.dtype)
        return _block(query, k[:, 0], v[:, 0], own, unpack_pos(cut(pos)), n)

    def add(carry, i):
        some = jnp.any(i * per < count)
        return jax.lax.cond(some, lambda c: merge(c, part(i)), lambda c: c, carry), None

    out = part(0)
    blocks = -(-most // per)
    if blocks > 1:
        out, _ = jax.lax.scan(add, out, jnp.arange(1, blocks))
    return out


def _pages(leaf, low, per):
    """Pages low[b] .. low[b] + per of a leaf [b p ...]: [b per ...].

    Row by row: a batched slice is a gather, for which XLA lays the whole pool out anew on TPU.
    """
    if leaf.shape[1] == per:
        return leaf
    rest = leaf.shape[2:]

    def row(r):
        return jax.lax.dynamic_slice(leaf, (r, low[r], *(0,) * len(rest)), (1, per, *rest))

    return jnp.concatenate([row(r) for r in range(leaf.shape[0])])


def _block(query, k, v, own, pos, n):
    """Attention over pages [b p s d] of owners [b p], for n kv heads; own -1 is not seen."""
    t = query.q.shape[1]
    q = rearrange(query.q, "b t (n g) d -> b n (g t) d", n=n)
    q = q * jnp.asarray(query.scale, q.dtype)
    owner = jnp.maximum(own, 0).astype(jnp.int32)
    mine = jnp.take_along_axis(q, owner[..., None, None], axis=1)  # [b p (g t) d]
    s = jnp.einsum("bpsd,bpqd->bpsq", k, mine, preferred_element_type=jnp.float32)
    s = jnp.swapaxes(s, 2, 3)
    pages = pos.shape[1]
    see = visible(query, rearrange(pos, "b p s -> b (p s)"))
    see = rearrange(see, "b 1 t (p s) -> b p t s", p=pages) & (own >= 0)[..., None, None]
    see = jnp.tile(see, (1, 1, q.shape[2] // t, 1))
    top = jax.lax.stop_gradient(jnp.max(jnp.where(see, s, EMPTY), axis=-1))
    weight = jnp.where(see, jnp.exp(s - top[..., None]), 0.0)
    out = jnp.einsum("bpqs,bpse->bpqe", weight.astype(v.dtype), v,
                     preferred_element_type=jnp.float32)  # fmt: skip
    return _by_owner(out, weight.sum(-1), top, owner, n, t)


def _by_owner(out, total, top, own, n, t):
    """Merges unnormalised page results [b p q e], sums and maxima [b p q] into heads."""
    mine = jax.nn.one_hot(own, n, axis=-1, dtype=jnp.float32)  # [b p n]
    best = jnp.max(jnp.where(mine[..., None] > 0, top[:, :, None], EMPTY), axis=1)  # [b n q]
    back = jnp.einsum("bpn,bnq->bpq", mine, best)
    scale = jnp.where(total > 0, jnp.exp(top - back), 0.0)
    whole = jnp.einsum("bpn,bpq->bnq", mine, total * scale)
    some = whole > 0
    safe = jnp.where(some, whole, 1.0)
    out = jnp.einsum("bpn,bpqe->bnqe", mine, out * scale[..., None]) / safe[..., None]
    lse = jnp.where(some, best + jnp.log(safe), EMPTY)
    return (rearrange(out, "b n (g t) e -> b t (n g) e", t=t),
            rearrange(lse, "b n (g t) -> b t (n g)", t=t))  # fmt: skip
