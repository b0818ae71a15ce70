"""Hard cases 6 and 7 of other projects: rows that see nothing, and queries fewer than keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, generator, model, tables
from hard import FIRST, TIERS, absorb_long, fast_compile, longer, small  # noqa: F401

import kvjax
from kvjax import scorers
from kvjax.attention import Query, attend_own, attend_rows, mass, merge
from kvjax.cache.cache import attend, merge_all, places
from kvjax.cache.condense import compact
from kvjax.cache.recipes import resolve
from kvjax.shapes import EMPTY

# --- case 6: pytorch#103749, Automodel PR#2658: every key masked ---


def random_qkv(dtype, t=3, s=5):
    rng = generator("masks")
    shapes = (1, t, 4, 8), (1, 2, s, 8), (1, 2, s, 8)
    return tuple(jnp.asarray(rng.normal(size=x), dtype) for x in shapes)


def masked(query_pos, pos, bias=None):
    """A function of q, k, v with the given positions, for value and gradient."""

    def f(q, k, v):
        query = Query(q, jnp.array([query_pos]), 8**-0.5)
        return attend_rows(query, k, v, jnp.array([pos]), bias)

    return jax.jit(f)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_without_keys_is_zero(dtype):
    """Query 0 comes before every key, query 1 is padding, query 2 sees slots 0 and 3 only."""
    qkv = random_qkv(dtype)
    f = masked([0, -1, 4], [1, -1, 9, 4, 7])
    out, lse = f(*qkv)
    assert (np.asarray(out[:, :2]) == 0).all() and (
        np.asarray(lse[:, :2]) == np.float32(EMPTY)
    ).all()
    assert np.isfinite(out).all() and (np.asarray(out[:, 2]) != 0).all()
    for loss in (lambda o, lse: (o**2).sum(), lambda o, lse: (o * jnp.exp(lse)[..., None]).sum()):
        dq, dk, dv = jax.jit(jax.grad(lambda *x: loss(*f(*x)), (0, 1, 2)))(*qkv)  # noqa: B023
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in (dq, dk, dv))
        for g in (dk, dv):
            assert (np.asarray(g[:, :, [1, 2, 4]], np.float32) == 0).all()
            assert (np.asarray(g[:, :, [0, 3]], np.float32) != 0).any()
        assert (np.asarray(dq[:, :2], np.float32) == 0).all()


@pytest.mark.parametrize("masked_slots", [[0, 1, 2, 3, 4], [1, 2]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_added_masks_that_overflow_are_masks(dtype, masked_slots):
    """Two minima of bfloat16 add up to -inf (their softmax is NaN): the slots count as unseen."""
    low = jnp.finfo(jnp.bfloat16).min.astype(jnp.bfloat16)
    for value in (low + low, low, jnp.bfloat16(-jnp.inf)):
        bias = jnp.zeros((1, 2, 5), jnp.bfloat16).at[:, :, jnp.array(masked_slots)].set(value)
        qkv = random_qkv(dtype)
        f = masked([9, 9, 9], range(5), bias)
        pos = [-1 if s in masked_slots else s for s in range(5)]
        expected = masked([9, 9, 9], pos)(*qkv)  # masked as booleans
        for one, two in zip(f(*qkv), expected, strict=True):
            np.testing.assert_array_equal(one, two)
        if len(masked_slots) == 5:
            assert (np.asarray(expected[0]) == 0).all()
        grads = jax.jit(jax.grad(lambda *x: (f(*x)[0] ** 2).sum(), (0, 1, 2)))(*qkv)  # noqa: B023
        for i, g in enumerate(grads):
            g = np.asarray(g, np.float32)
            assert np.isfinite(g).all()
            assert i == 0 or (g[:, :, masked_slots] == 0).all()


@pytest.mark.parametrize("window", [None, 50])
def test_tokens_that_see_themselves_in_strips(window):
    """300 tokens, of which the second row has 170 and padding: as with all keys in sight."""
    rng, row = generator("strips"), np.arange(300)
    q, k, v = (jnp.asarray(rng.normal(size=(2, *x)), jnp.float32)
               for x in ((300, 4, 8), (2, 300, 8), (2, 300, 8)))  # fmt: skip
    pos = jnp.asarray([row + 7, np.where(row < 170, row, -1)])
    query = Query(q, pos, 8**-0.5, window)
    for one, two in zip(attend_own(query, k, v, pos), attend_rows(query, k, v, pos), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-6)
    free = query.replace(causal=False, window=None)
    for one, two in zip(attend_own(free, k, v, pos), attend_rows(free, k, v, pos), strict=True):
        np.testing.assert_array_equal(one, two)


def test_merging_with_nothing_changes_nothing():
    out, lse = masked([9, 9, 9], range(5))(*random_qkv("float32"))
    nothing = jnp.zeros_like(out), jnp.full_like(lse, EMPTY)
    for merged in (merge((out, lse), nothing), merge(nothing, (out, lse))):
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_allclose(merged[1], lse, rtol=1e-6)
    for leaf, right in zip(merge(nothing, nothing), nothing, strict=True):
        np.testing.assert_array_equal(leaf, right)
    grad = jax.grad(lambda a, b: merge(a, b)[0].sum(), (0, 1))(nothing, nothing)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grad))


@functools.cache
def in_dtype(dtype):
    config = dataclasses.replace(PLAIN, dtype=dtype)
    return config, jax.tree.map(lambda w: w.astype(dtype), model(PLAIN).params)


IDS = jnp.asarray(generator("empty row").integers(0, PLAIN.vocab, (2, 4)))


@pytest.mark.parametrize(
    "name, when, positions",
    longer([v for v in FIRST if v[1] == "during" or v[0] in ("ada_snapkv", "kvzip")], "exact"),
)
def test_a_row_of_padding_then_a_token(name, when, positions):
    """Row 1 is all padding at first: its first token then answers as the first of a fresh text.

    The caches have the shape of each recipe, condensed ones (pools too) with nothing in them yet.
    """
    recipe = small(
        name, when=when, positions=positions, slots=8, sinks=1, window=2, stride=4, page=4
    )
    config, params = in_dtype("float32")
    empty = kvjax.init_cache(config, recipe, 2, 32, length=16)

    @jax.jit
    def run(cache):
        first, new = kvjax.look(params, config, cache, IDS, count=jnp.array([3, 0]))
        cache = kvjax.append(cache, new, jnp.array([3, 0]))
        last, new = kvjax.look(params, config, cache, IDS[:, 3:])
        return first, last, cache.seen

    first, last, seen = run(empty)
    assert np.isfinite(first).all() and np.isfinite(last).all()
    assert np.asarray(seen).tolist() == [3, 0]
    whole, _ = _alone(params, config, IDS)
    single, _ = _alone(params, config, IDS[:, 3:])
    np.testing.assert_allclose(first[0, :3], whole[0, :3], atol=1e-5)
    np.testing.assert_allclose(last[0, 0], whole[0, 3], atol=1e-5)
    np.testing.assert_allclose(last[1, 0], single[1, 0], atol=1e-5)


_alone = jax.jit(
    lambda params, config, ids: kvjax.look(params, config, None, ids), static_argnums=1
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_do_not_reach_padding(dtype):
    """Training with a short row and an empty row: finite, and exactly 0 into padding."""
    config, params = in_dtype(dtype)
    x = params.embed[IDS]
    cache = kvjax.init_cache(config, kvjax.recipe("exact"), 2, 8)
    count = jnp.array([3, 0])

    @jax.jit
    def grads(params, x, v):
        def loss(params, x, v):
            group = cache.groups[0]
            held = cache.replace(groups=(group.replace(tail=group.tail.replace(v=v, k=v)),))
            logits, _ = kvjax.look(params, config, held, x, count=count)
            real = (jnp.arange(4) < count[:, None])[..., None]
            return jnp.where(real, logits**2, 0).sum()

        return jax.grad(loss, (0, 1, 2))(params, x, v)

    into_params, into_x, into_v = grads(params, x, cache.groups[0].tail.v)
    for g in jax.tree.leaves(into_params):
        assert np.isfinite(np.asarray(g, np.float32)).all()
    into_x = np.asarray(into_x, np.float32)
    assert (into_x[0, 3] == 0).all() and (into_x[1] == 0).all() and (into_x[0, :3] != 0).any()
    assert (np.asarray(into_v, np.float32) == 0).all()  # nothing is remembered yet


# --- case 7: jax#24491, queries and keys of unequal length ---


def uniform(t, s, window=None, **options):
    """Zero queries and keys, values 1..s; the queries are the last t positions."""
    k = jnp.zeros((1, 2, s, 8))
    v = jnp.broadcast_to(jnp.arange(1.0, s + 1)[:, None], (1, 2, s, 3))
    query = Query(jnp.zeros((1, t, 4, 8)), jnp.arange(s - t, s)[None], 1.0, window)
    attended = jax.jit(lambda *x: attend_rows(*x, **options))(query, k, v, jnp.arange(s)[None])
    return query, k, v, attended


def mean_seen(t, s, window=None):
    """Query p sees values 1..p + 1, or the last `window` of those."""
    first = [0 if window is None else max(0, p + 1 - window) for p in range(s - t, s)]
    return np.array([np.mean(np.arange(a, s - t + i + 1) + 1.0) for i, a in enumerate(first)])


def test_the_triangle_is_aligned_at_the_end():
    out, _ = uniform(2, 5)[3]
    np.testing.assert_allclose(out[0, :, 0, 0], [2.5, 3.0], rtol=1e-6)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "t, s, block",
    [(1, 1, 512), (3, 3, 512), (2, 127, 512), (1, 128, 512), (1, 129, 512), (2, 513, 512),
     (1, 1025, 512), (65, 129, 64), (70, 513, 128), (130, 130, 128), (33, 1025, 512)],
)  # fmt: skip
def test_uniform_scores_give_the_mean_of_what_is_seen(t, s, block, window):
    """One block, a scan with and without a rest, blocks of queries with and without padding."""
    query, k, v, (out, lse) = uniform(t, s, window, block=block)
    expected = mean_seen(t, s, window)
    np.testing.assert_allclose(out, np.broadcast_to(expected[:, None, None], out.shape[1:])[None],
                               rtol=2e-6)  # fmt: skip
    sums, tops = jax.jit(mass)(query, k, jnp.arange(s)[None], lse)
    np.testing.assert_allclose(sums.sum(-1), t, rtol=1e-5)  # each query spends a weight of 1
    seen = np.minimum(np.arange(s - t, s) + 1, window or s)
    np.testing.assert_allclose(tops.max(-1), 1 / seen.min(), rtol=1e-5)


@pytest.mark.parametrize("name, when, positions", TIERS)
@pytest.mark.parametrize("t, s", [(2, 17)])
def test_every_body_aligns_at_the_end(name, when, positions, t, s):
    """The same through tail and bodies, which hold all but the t newest: room for 32 of them."""
    recipe = small(name, when=when, positions=positions, keep=1.0, slots=32, sinks=1, window=1,
                   stride=4, page=4)  # fmt: skip
    old, recipe = s - t, resolve(recipe, 32)
    v = jnp.broadcast_to(jnp.arange(1.0, s + 1)[:, None, None], (2, 1, s, 2, 16))
    after = when == "after"
    made = kvjax.init_cache(PLAIN, kvjax.recipe("exact") if after else recipe, 1, 32)
    past = kvjax.Tokens(jnp.zeros_like(v), v)
    cache = absorb_long(made, past, jnp.array([old]))
    if after:
        alike = {name: jnp.ones((2, 1, 2, 32)) for name in ("maxima", "scores")}
        alike |= {"sums": jnp.ones((2, 1, 4, 32)), "count": jnp.full((2, 1), float(old))}
        alike |= {"mean": jnp.zeros((2, 1, 4, 16)), "spread": jnp.zeros((2, 1, 4, 16, 16))}
        evidence = () if scorers.reads(recipe.choice) is None else (alike,)
        given = tables(PLAIN.layers).get(name)
        cache = compact(cache, evidence, np.array([old]), PLAIN, recipe, old, given)
    query = Query(jnp.zeros((1, t, 4, 16)), jnp.arange(old, s)[None], 1.0)
    group = cache.groups[0]
    layer = jax.tree.map(lambda x: x[0], group)
    new = jnp.swapaxes(v[0, :, old:], 1, 2)
    pooled = cache.pool and (cache.pool, cache.pool.first[0], cache.pool.count[0])

    @jax.jit
    def whole(layer, new):
        here = attend_rows(query, jnp.zeros_like(new), new, query.pos)
        pieces, _ = attend(layer, query, places(cache, group), cache.recipe, PLAIN.kinds[0].rope,
                           pooled=pooled)  # fmt: skip
        return merge_all([here, *pieces])

    out, _ = whole(layer, new)
    expected = mean_seen(t, s)
    np.testing.assert_allclose(out[0, :, :, 0], np.repeat(expected[:, None], 4, 1), rtol=1e-5)
