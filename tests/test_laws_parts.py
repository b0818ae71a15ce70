"""Laws of attention: blocks, merge, mass, bodies, positions, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    DRAFT,
    HYBRID,
    LENGTHS,
    LONGEST,
    MAX,
    PLAIN,
    ROWS,
    cuts,
    feed,
    filled,
    generator,
    look,
    model,
    random_ids,
    random_tokens,
    small,
)
from float64 import dense, rope
from holding import arrivals, in_pool, pool_codes

import kvjax
from kvjax import codecs
from kvjax.attention import Query, attend_rows, mass, merge
from kvjax.cache import cache as cache_parts
from kvjax.config import Rope

B, N, G, D, E = 2, 2, 2, 16, 8
SCALE = 0.25
F32 = 2e-6  # values are of size 1 and sums have up to 40 terms: a few roundings of 6e-8


_rows = jax.jit(attend_rows, static_argnames="block")
_mass = jax.jit(mass, static_argnums=4)


def attention_inputs(t, s, *words):
    """q [b t h d], k [b n s d], v [b n s e], pos [b n s] with holes, and the queries' pos [b t]."""
    rng = generator("attention", t, s, *words)
    q, k, v = (rng.normal(size=x).astype(np.float32)
               for x in ((B, t, N * G, D), (B, N, s, D), (B, N, s, E)))  # fmt: skip
    pos = np.stack([[rng.permutation(s) for _ in range(N)] for _ in range(B)])
    pos = np.where(rng.random(pos.shape) < 0.2, -1, pos).astype(np.int32)
    at = (s - t + np.arange(t) + np.zeros((B, 1))).astype(np.int32)
    at[1, -1] = -1  # padding
    return q, k, v, pos, at


def mask(pos, at, window=None):
    """What each query sees, [b n t s], by the definition."""
    p, a = pos[:, :, None, :], at[:, None, :, None]
    see = (p >= 0) & (a >= 0) & (p <= a)
    return see if window is None else see & (p > a - window)


def oracle(q, k, v, pos, at, window=None):
    see, out = mask(pos, at, window), []
    for b, h in np.ndindex(B, N * G):
        out.append(dense(q[b, :, h], k[b, h // G], v[b, h // G], see[b, h // G], SCALE))
    o, lse = (np.stack(x) for x in zip(*out, strict=True))
    t = q.shape[1]
    return o.reshape(B, N * G, t, -1).swapaxes(1, 2), lse.reshape(B, N * G, t).swapaxes(1, 2)


@pytest.mark.parametrize("t,s,block,window", [(3, 40, 512, None), (70, 75, 16, None),
                                              (40, 90, 16, 7), (20, 40, 7, 30)])  # fmt: skip
def test_attention_in_blocks(t, s, block, window):
    """Blocks of keys and queries, windows, holes and padding give dense float64 attention."""
    q, k, v, pos, at = attention_inputs(t, s)
    query = Query(jnp.asarray(q), jnp.asarray(at), SCALE, window)
    out, lse = _rows(query, *map(jnp.asarray, (k, v, pos)), block=block)
    want, total = oracle(q, k, v, pos, at, window)
    np.testing.assert_allclose(out, want, rtol=F32, atol=F32)
    np.testing.assert_allclose(lse, total, rtol=F32, atol=F32)
    assert not np.asarray(out)[1, -1].any() and (np.asarray(lse)[1, -1] == -1e30).all()


@pytest.mark.parametrize("seed", range(3))
def test_merge(seed):
    """Any partition of the slots merges to the whole, in any order, empty pieces included."""
    q, k, v, pos, at = attention_inputs(4, 24, seed)
    rng = generator("merge", seed)
    part = rng.integers(0, 4, 24)
    part[part == 3] = 2  # piece 3 stays empty
    query = Query(jnp.asarray(q), jnp.asarray(at), SCALE)
    whole = oracle(q, k, v, pos, at)
    some = []
    for i in rng.permutation(4):  # a piece is the slots of its number, the others empty
        mine = jnp.asarray(np.where(part == i, pos, -1))
        some.append(_rows(query, jnp.asarray(k), jnp.asarray(v), mine))
    left = merge(merge(merge(some[0], some[1]), some[2]), some[3])
    tree = merge(merge(some[3], some[1]), merge(some[2], some[0]))
    for got in (left, tree):
        np.testing.assert_allclose(got[0], whole[0], rtol=F32, atol=F32)
        np.testing.assert_allclose(got[1], whole[1], rtol=F32, atol=F32)


@pytest.mark.parametrize("t,s,rows", [(5, 30, (0, None)), (5, 30, (1, 3)), (40, 600, (8, None))])
def test_mass(t, s, rows):
    """Mass is the column sums and maxima of the dense softmax, over the queries asked for."""
    q, k, v, pos, at = attention_inputs(t, s)
    query = Query(jnp.asarray(q), jnp.asarray(at), SCALE)
    lse = oracle(q, k, v, pos, at)[1]
    lse32 = jnp.asarray(lse, jnp.float32)
    sums, maxima = _mass(query, jnp.asarray(k), jnp.asarray(pos), lse32, rows)
    see = mask(pos, at)
    for b, h in np.ndindex(B, N * G):
        logits = np.float64(q[b, :, h]) @ np.float64(k[b, h // G]).T * SCALE
        logits = np.where(see[b, h // G], logits, -np.inf)
        p = np.exp(logits - lse[b, :, h][:, None])[rows[0] : rows[1]]
        np.testing.assert_allclose(
            sums[b, h], p.sum(0), rtol=1e-5, atol=F32
        )  # exp of a rounded lse
        np.testing.assert_allclose(maxima[b, h], p.max(0), rtol=1e-5, atol=F32)


@functools.partial(jax.jit, static_argnums=(3, 4))
def attend(layer, query, at, recipe, rope, pooled=None):
    """Attention of one layer to all its memory."""
    pieces = cache_parts.attend(layer, query, at, recipe, rope, pooled=pooled)[0]
    return cache_parts.merge_all(pieces)


BODIES = ["ada_snapkv", "key_norm during", "int8,raw", "twice kvzip"]


SLOW = [pytest.param(x, marks=pytest.mark.full) for x in ("kvzip int8", "ada_snapkv int4", "kivi")]


@pytest.mark.parametrize("name", [*BODIES, *SLOW])
def test_attention_of_a_body(name):
    """Attention to bodies, the pool of owned pages and the tail is dense, to their entries."""
    case = CASES[name]
    cache = filled(case)
    q = generator("q", name).normal(size=(ROWS, DRAFT, N * G, D)).astype(np.float32)
    at = np.asarray(cache.seen)[:, None] + np.arange(DRAFT, dtype=np.int32)
    group, pair = cache.groups[-1], codecs.pair(case.recipe.store)
    decode = lambda codes: [np.asarray(x) for x in pair.decode(codes, jnp.float32)]  # noqa: E731
    tail, bodies = arrivals(cache, group)
    last, pooled, held = group.stop - group.start - 1, None, []
    for body, pos in zip(group.bodies, bodies, strict=True):  # k, v, and who sees them [b n p s]
        k, v = (x[last] for x in decode(pair.unpack(body.codes)))
        held.append((k, v, pos[last] >= 0))
    if group.pooled is not None:
        mine = group.pooled + last
        pooled = (cache.pool, cache.pool.first[mine], cache.pool.count[mine])
        layer, owner, pos = in_pool(cache)
        see = (owner == np.arange(N)[:, None, None]) & (layer == mine)  # [n b p]
        see = (see[..., None] & (pos >= 0)).swapaxes(0, 1)
        wide = lambda x: np.broadcast_to(x[0], (ROWS, N, *x.shape[3:]))  # noqa: E731
        held.append((*map(wide, decode(pool_codes(cache))), see))
    ring = [np.asarray(x)[last] for x in (group.tail.k, group.tail.v)]
    held.append((*ring, np.broadcast_to(tail[:, None] >= 0, ring[0].shape[:3])))
    one = jax.tree.map(lambda x: x[last], group)
    query = Query(jnp.asarray(q), jnp.asarray(at), SCALE)
    got, lse = attend(one, query, cache_parts.places(cache, group), case.recipe, Rope(), pooled)
    for b, h in np.ndindex(ROWS, N * G):
        n = h // G
        k, v = (np.concatenate([x[i][b, n].reshape(-1, D) for x in held]) for i in range(2))
        see = np.concatenate([x[2][b, n].ravel() for x in held])
        want, total = dense(q[b, :, h], k, v, np.tile(see, (DRAFT, 1)), SCALE)
        np.testing.assert_allclose(got[b, :, h], want, rtol=F32, atol=F32)
        np.testing.assert_allclose(lse[b, :, h], total, rtol=F32, atol=F32)


def test_read_positions():
    """StreamingLLM attends to sinks and window with rotations 0, 1, 2, ... whatever their age.

    24 entries of 48: 4 sinks and a window of 20. Of 25 tokens, 0-3 and 5-24 stay; the query comes
    next, at rank 24. Angles up to 24 are rounded to 1e-6 of a turn in float32: 1e-5.
    """
    case = CASES["streaming_llm"]
    tokens = random_tokens(LONGEST, "read")
    cache = kvjax.init_cache(PLAIN, case.recipe, 2, 48)
    cache = feed(cache, tokens, cuts(generator("read"), (25, 25)))
    assert np.asarray(cache.clock).tolist() == [24, 24]
    q = generator("read q").normal(size=(2, 1, N * G, D)).astype(np.float32)
    base = PLAIN.kinds[0].rope.base
    turned = rope(q, np.full((2, 1, 1), 24), base).astype(np.float32)
    query = Query(jnp.asarray(turned), cache.seen[:, None], SCALE)
    layer = jax.tree.map(lambda x: x[0], cache.groups[0])
    at = cache_parts.places(cache, cache.groups[0])
    got, _ = attend(layer, query, at, case.recipe, PLAIN.kinds[0].rope)
    kept = [*range(4), *range(5, 25)]
    k, v = (np.asarray(x)[0][:, kept].swapaxes(1, 2) for x in (tokens.k, tokens.v))
    k = rope(k, np.arange(24), base)
    for b, h in np.ndindex(2, N * G):
        see = np.ones((1, 24), bool)
        want, _ = dense(
            rope(q[b, :, h], np.array([24]), base), k[b, h // G], v[b, h // G], see, SCALE
        )
        np.testing.assert_allclose(got[b, :, h], want, rtol=0, atol=1e-5)


def test_rerot_positions():
    """After rerot, keys are those of the kept tokens placed at 0, 1, 2, ...: moved from 10 to 3, a
    key is as if it had come at 3. Rotations in float32 of angles below 25: 1e-5."""
    one, two = (filled(CASES[n]) for n in ("key_norm", "key_norm rerot"))
    base = PLAIN.kinds[0].rope.base
    a, b = (c.groups[0].bodies[0] for c in (one, two))
    pos = np.asarray(a.pos).astype(int)
    assert np.array_equal(pos, b.pos)
    real = (pos != 65535).reshape(*pos.shape[:3], -1)
    rank = np.cumsum(real, -1) - 1
    age = pos.reshape(real.shape)
    flat = [np.asarray(x.codes[0]).reshape(*real.shape, D) for x in (a, b)]
    want = rope(flat[0], rank - age, base)
    np.testing.assert_allclose(flat[1][real], want[real], rtol=0, atol=1e-5 * np.abs(want).max())
    kept = [12, 9]  # half of 25 and 18, rounded to even
    assert np.asarray(two.clock).tolist() == kept and real[0].sum(-1).tolist() == [[8, 8], [5, 5]]
    tails = [np.asarray(c.groups[0].tail.k) for c in (one, two)]
    for row, (n, count) in enumerate(zip((25, 18), kept, strict=True)):
        for p in range(n - 4, n):
            slot = p % tails[0].shape[3]
            moved = rope(tails[0][:, row, :, slot], np.array(count - n), base)
            got = tails[1][:, row, :, slot]
            np.testing.assert_allclose(got, moved, rtol=0, atol=1e-5 * np.abs(moved).max())


def test_rerot_leaves_sliding_windows_alone():
    """A model of sliding layers only has nothing to condense: rerot changes none of its logits.

    Rotary distances stay while both ends move: angles are rounded at other values, 1e-4.
    """
    config = dataclasses.replace(HYBRID, pattern=(1, 1))
    whole, tokens = kvjax.Model(model().params, config, None), random_ids(LONGEST, 0)
    args = dict(max_length=MAX, lengths=LENGTHS, logits="none")
    exact = kvjax.prefill(whole, tokens, small("exact"), **args)[1]
    turned = kvjax.condense(whole, exact, small("key_norm", positions="rerot"), tokens=tokens)
    assert np.asarray(turned.clock).tolist() != np.asarray(exact.clock).tolist()
    want, got = (look(whole.params, config, c, random_ids(DRAFT))[0] for c in (exact, turned))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_gradients():
    """Attention is differentiable, twice, through what a cache holds; empty slots get gradient 0.

    The directional derivatives are compared with central differences of step 1e-2, whose
    truncation and float32 rounding are both below 1% of derivatives of this size.
    """
    case = CASES["key_norm during"]
    cache = filled(case)
    (group,) = cache.groups
    q = generator("gradient").normal(size=(ROWS, DRAFT, N * G, D)).astype(np.float32)
    at = np.asarray(cache.seen)[:, None] + np.arange(DRAFT, dtype=np.int32)
    query, places = Query(jnp.asarray(q), jnp.asarray(at), SCALE), cache_parts.places(cache, group)
    leaves = lambda g: (g.tail, g.bodies[0].codes)  # noqa: E731

    def f(held):
        whole = group.replace(tail=held[0], bodies=(group.bodies[0].replace(codes=held[1]),))
        layer = jax.tree.map(lambda x: x[1], whole)
        return jnp.sum(jnp.sin(attend(layer, query, places, case.recipe, Rope())[0]))

    held = leaves(group)
    rng = generator("direction")
    way = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32) * 0.1, held)
    along = jax.jit(lambda a: f(jax.tree.map(lambda x, y: x + a * y, held, way)))
    grad = jax.jit(jax.grad(f))(held)
    first = sum(
        float(jnp.vdot(x, y)) for x, y in zip(*map(jax.tree.leaves, (grad, way)), strict=True)
    )
    h = 1e-2
    assert first == pytest.approx(float(along(h) - along(-h)) / (2 * h), rel=1e-2, abs=1e-3)
    slope = jax.jit(jax.grad(along))
    second = float(jax.jit(jax.grad(jax.grad(along)))(0.0))
    assert second == pytest.approx(float(slope(h) - slope(-h)) / (2 * h), rel=1e-2, abs=1e-3)
    tail, (pos,) = arrivals(cache, group)
    for x in jax.tree.leaves(grad[0]):  # [l b n c d]; the attention was that of layer 1
        x = np.asarray(x)[1].swapaxes(1, 2)
        assert not x[tail < 0].any() and x[tail >= 0].any(axis=-1).all()
    for x in jax.tree.leaves(grad[1]):
        x = np.asarray(x)[1]
        assert not x[pos[1] < 0].any() and x[pos[1] >= 0].any(axis=-1).all()
