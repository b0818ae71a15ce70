"""The only softmax in the library: attend to pieces of memory, and merge the pieces exactly.

Every piece gives `(out [b t h e], lse [b t h])`, both float32 whatever the inputs are; scores, sums
and exponentials are float32 too. A query that sees nothing gets out 0 and lse EMPTY.
"""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax import struct
from kvjax.shapes import EMPTY, Array, Float, Int

BLOCK = 512
"""Keys (and queries) taken at once: 512 x 512 scores a head stay in a core's cache."""

WHOLE = 64
"""Up to so many query rows per kv head, all keys are one block: their scores are small."""

STRIP = 128
"""Queries that share the keys they may see, of a block that attends to itself."""


@struct.dataclass
class Query(struct.Record):
    """Queries of one layer."""

    q: Float[Array, "b t h d"]  # after RoPE
    pos: Int[Array, "b t"]  # arrival index; -1 is padding and sees nothing
    scale: float = struct.field(pytree_node=False)
    window: int | None = struct.static(None)
    causal: bool = struct.static(True)


def visible(query: Query, pos):
    """What each query sees, [b 1 t s] or [b n t s]: arrival is the mask.

    pos: [b s], or [b n s] where kv heads keep different tokens; -1 is an empty slot.
    """
    p = pos[:, None, None, :] if pos.ndim == 2 else pos[:, :, None, :]
    q = query.pos[:, None, :, None]
    see = (p >= 0) & (q >= 0)
    if query.causal:
        see &= p <= q
    if query.window is not None:
        see &= p > q - query.window
    return see


def attend_rows(
    query: Query,
    k: Float[Array, "b n s d"],
    v: Float[Array, "b n s e"],
    pos: Int[Array, "b s"] | Int[Array, "b n s"],
    bias: Float[Array, "b n s"] | None = None,
    *,
    block: int = BLOCK,
) -> tuple[Float[Array, "b t h e"], Float[Array, "b t h"]]:
    """Attends to plain keys and values, in blocks, skipping the blocks that nobody sees.

    bias is added to the logits of a slot. No array of size t x s is formed beyond one block.
    """
    read = lambda start, size: _cut((k, v), start, size)  # noqa: E731
    sizes: dict[str, Any] = dict(kv_heads=k.shape[1], value_dim=v.shape[3], block=block)
    return attend_blocks(query, read, k.shape[2], pos, bias, **sizes)


def attend_own(query: Query, k, v, pos):
    """`attend_rows` of tokens to themselves, in the order of arrival, padding last.

    Keys behind a strip of queries are left out: it sees none of them.
    """
    t = query.q.shape[1]
    if not query.causal or not STRIP < t <= BLOCK:
        return attend_rows(query, k, v, pos)
    parts = []
    for start in range(0, t, STRIP):
        stop = min(start + STRIP, t)
        strip = query.replace(q=query.q[:, start:stop], pos=query.pos[:, start:stop])
        parts.append(attend_rows(strip, k[:, :, :stop], v[:, :, :stop], pos[:, :stop]))
    out, lse = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return out, lse


def attend_blocks(query, read, slots, pos, bias=None, *, kv_heads, value_dim, block=BLOCK,
                  whole=True):  # fmt: skip
    """`attend_rows` over keys and values that `read(start, size) -> (k, v)` yields block by block.

    start may be traced, size is static; slots is how many there are. A codec decodes in `read`, so
    a decoded copy never exceeds a block. They may come in pages [b n p s d]. whole: all slots may
    be one block if queries are few.
    """
    t, heads = query.q.shape[1], query.q.shape[2]
    group = heads // kv_heads
    if t > block:  # blocks of queries, one after the other
        return _by_queries(query, read, slots, pos, bias, kv_heads, value_dim, block, whole)
    q = rearrange(query.q, "b t (n g) d -> b n (g t) d", n=kv_heads)
    q = q * jnp.asarray(query.scale, q.dtype)
    if t * group > WHOLE:  # XLA's CPU product would turn the axes of queries while it multiplies
        q = jax.lax.platform_dependent(q, cpu=jax.lax.optimization_barrier, default=lambda x: x)

    def part(start, size, first=0):
        kb, vb = read(start, size)
        pb = jax.lax.dynamic_slice_in_dim(pos, start, size, axis=pos.ndim - 1)
        pb = jnp.where(start + jnp.arange(size) >= first, pb, -1)
        bb = None if bias is None else jax.lax.dynamic_slice_in_dim(bias, start, size, axis=2)
        return _softmax(q, kb, vb, visible(query, pb), bb, group)

    def add(carry, start, size, first: Any = 0):
        pb = jax.lax.dynamic_slice_in_dim(pos, start, size, axis=pos.ndim - 1)
        pb = jnp.where(start + jnp.arange(size) >= first, pb, -1)
        seen = jnp.any(visible(query, pb))
        return jax.lax.cond(seen, lambda c: merge(c, part(start, size, first)), lambda c: c, carry)

    if slots <= block or (whole and t * group <= WHOLE):
        out, lse = part(0, slots)
    else:  # decoded codes: the last block may begin in the one before, as a size of its own would
        # make XLA lay all codes out anew on TPU
        shape = (q.shape[0], kv_heads, group * t)
        carry = jnp.zeros((*shape, value_dim), jnp.float32), jnp.full(shape, EMPTY, jnp.float32)
        full = slots // block if whole else -(-slots // block)
        last = slots - block
        carry, _ = jax.lax.scan(
            lambda c, i: (add(c, jnp.minimum(i * block, last), block, i * block), None),
            carry,
            jnp.arange(full),
        )
        out, lse = add(carry, full * block, slots - full * block) if slots > full * block else carry
    out = rearrange(out, "b n (g t) e -> b t (n g) e", t=t)
    return out, rearrange(lse, "b n (g t) -> b t (n g)", t=t)


def _by_queries(query, read, slots, pos, bias, kv_heads, value_dim, block, whole):
    """Attends for blocks of queries in turn; the last block is padded with queries at -1."""
    t = query.q.shape[1]
    pad = -t % block
    q = jnp.pad(query.q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    at = jnp.pad(query.pos, ((0, 0), (0, pad)), constant_values=-1)
    q = rearrange(q, "b (c t) h d -> c b t h d", t=block)
    at = rearrange(at, "b (c t) -> c b t", t=block)
    out, lse = jax.lax.map(
        lambda x: attend_blocks(query.replace(q=x[0], pos=x[1]), read, slots, pos, bias,
                                kv_heads=kv_heads, value_dim=value_dim, block=block, whole=whole),
        (q, at))  # fmt: skip
    return (rearrange(out, "c b t h e -> b (c t) h e")[:, :t],
            rearrange(lse, "c b t h -> b (c t) h")[:, :t])  # fmt: skip


def _cut(leaves, start, size):
    if size == leaves[0].shape[2]:
        return leaves
    return tuple(jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in leaves)


def _scores(q, k, see, bias, group):
    """Float32 logits [b n (g t) s] and the mask [b n|1 (g t) s]; logits unseen are EMPTY.

    A bias of EMPTY or less hides its slot: additive masks, and sums of them that overflow to -inf,
    act as masks.
    """
    k = k.astype(q.dtype)
    at = "ps" if k.ndim == 5 else "s"  # pages stay apart: to flatten codes would move them
    if q.shape[2] <= WHOLE:  # few queries: XLA's CPU product is faster with the keys first
        s = jnp.einsum(f"bn{at}d,bnqd->bn{at}q", k, q, preferred_element_type=jnp.float32)
        s = jnp.swapaxes(s.reshape(*s.shape[:2], -1, s.shape[-1]), 2, 3)
    else:
        s = jnp.einsum(f"bnqd,bn{at}d->bnq{at}", q, k, preferred_element_type=jnp.float32)
        s = s.reshape(*s.shape[:3], -1)
    if bias is not None:
        s = s + bias[:, :, None, :].astype(jnp.float32)
    see = jnp.tile(see, (1, 1, group, 1)) if group > 1 else see
    if bias is not None:
        see = see & (bias > EMPTY)[:, :, None, :]
    return jnp.where(see, s, EMPTY), see


def _softmax(q, k, v, see, bias, group):
    """One block: q [b n (g t) d], k [b n s d], v [b n s e], see [b n|1 t s]; or k and v in pages,
    [b n p s d]."""
    s, _ = _scores(q, k, see, bias, group)
    top = jax.lax.stop_gradient(jnp.max(s, axis=-1))
    p = jnp.exp(s - top[..., None])  # unseen logits are EMPTY: 0, unless the query sees nothing
    some = top > EMPTY / 2
    total = jnp.where(some, jnp.sum(p, axis=-1), 1.0)
    at = "ps" if v.ndim == 5 else "s"
    p = p.astype(v.dtype).reshape(*p.shape[:3], *v.shape[2:-1])
    out = jnp.einsum(f"bnq{at},bn{at}e->bnqe", p, v, preferred_element_type=jnp.float32)
    out = jnp.where(some[..., None], out / total[..., None], 0.0)
    return out, jnp.where(some, top + jnp.log(total), EMPTY)


def merge(one, two):
    """Attention over the union of two pieces, from their `(out [... e], lse [...])`."""
    (o1, l1), (o2, l2) = one, two
    top = jax.lax.stop_gradient(jnp.maximum(l1, l2))
    w1, w2 = jnp.exp(l1 - top), jnp.exp(l2 - top)
    total = w1 + w2
    out = (o1 * w1[..., None] + o2 * w2[..., None]) / total[..., None]
    return out, jnp.maximum(top + jnp.log(total), EMPTY)


def mass(
    query: Query,
    k: Float[Array, "b n s d"],
    pos: Int[Array, "b s"] | Int[Array, "b n s"],
    lse: Float[Array, "b t h"],
    rows: tuple = (0, None),
    bias: Float[Array, "b n s"] | None = None,
) -> tuple[Float[Array, "b h s"], Float[Array, "b h s"]]:
    """Sum and maximum, over the queries, of the weight that each key gets.

    lse is the total log-sum-exp of each query over all its memory, from `attend_rows` and `merge`;
    a second pass with it gives true softmax weights without any t x s array beyond one block.
    rows=(first, stop) restricts to a range of query indices, which may be traced.
    """
    b, n, slots, _ = k.shape
    t, h = lse.shape[1], lse.shape[2]
    group = h // n
    first, stop = rows[0], t if rows[1] is None else rows[1]
    index = jnp.arange(t)
    asked = (index >= first) & (index < stop)
    query = query.replace(pos=jnp.where(asked[None, :], query.pos, -1))
    q = rearrange(query.q, "b t (n g) d -> b n (g t) d", n=n) * jnp.asarray(
        query.scale, query.q.dtype
    )
    total = rearrange(lse, "b t (n g) -> b n (g t) 1", n=n)
    size = slots if t * group <= WHOLE else min(slots, BLOCK)

    def part(start, size):
        kb = jax.lax.dynamic_slice_in_dim(k, start, size, axis=2)
        pb = jax.lax.dynamic_slice_in_dim(pos, start, size, axis=pos.ndim - 1)
        bb = None if bias is None else jax.lax.dynamic_slice_in_dim(bias, start, size, axis=2)
        s, see = _scores(q, kb, visible(query, pb), bb, group)
        p = jnp.where(see, jnp.exp(s - total), 0.0)
        p = rearrange(p, "b n (g t) s -> b (n g) t s", g=group)
        return p.sum(axis=2), p.max(axis=2)

    full = slots // size
    sums, tops = jax.lax.map(lambda i: part(i * size, size), jnp.arange(full))
    sums, tops = (rearrange(x, "c b h s -> b h (c s)") for x in (sums, tops))
    if slots % size:
        last = part(full * size, slots % size)
        sums, tops = (jnp.concatenate(p, axis=2) for p in zip((sums, tops), last, strict=True))
    return sums, tops
