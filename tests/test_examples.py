"""One example a method, of four to eight tokens, small enough to verify by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import budgets, codecs, scorers
from kvjax.attention import Query, attend_rows, mass, merge
from kvjax.cache import positions
from kvjax.cache.cache import Tokens
from kvjax.cache.init import init_cache
from kvjax.cache.ops import absorb_long, compress
from kvjax.cache.recipes import recipe
from kvjax.cache.select import top
from kvjax.config import LayerKind, ModelConfig, Spec
from kvjax.scorers import Seen

ONE = ModelConfig(
    "llama", vocab=8, width=4, mlp=4, heads=1, kv_heads=1, head_dim=2,
    kinds=(LayerKind(),), pattern=(0,), context=64,
)  # fmt: skip


_top = jax.jit(top)
_absorb = jax.jit(lambda cache, new, count: compress(absorb_long(cache, new, count)))


def seen(k, pos=None, **evidence):
    """Entries of one row and one kv head; k [s d]."""
    k = jnp.asarray(k, jnp.float32)[None, None]
    pos = jnp.arange(k.shape[2]) if pos is None else jnp.asarray(pos)
    evidence = {name: jnp.asarray(x, jnp.float32)[None] for name, x in evidence.items()}
    return Seen(k, k, pos[None, None].astype(jnp.int32), jnp.array([k.shape[2]]), evidence)


def best(scores, count, protected=(), pos=None, valid=None):
    """Indices that `top` keeps."""
    n = len(scores)
    valid = jnp.ones(n, bool) if valid is None else jnp.asarray(valid, bool)
    pos = jnp.arange(n) if pos is None else jnp.asarray(pos)
    safe = jnp.asarray([i in protected for i in range(n)])
    keep = _top(jnp.asarray(scores, jnp.float32), valid, safe & valid, pos, jnp.int32(count))
    return np.flatnonzero(keep).tolist()


def test_key_norm():
    """|(3, 4)| = 5, |(0, 1)| = 1, |(1, 0)| = 1, |(2, 0)| = 2: two stay, those of norm 1."""
    scores = scorers.build(Spec("key_norm"))(seen([[3, 4], [0, 1], [1, 0], [2, 0]]))[0, 0]
    assert scores.tolist() == [-5, -1, -1, -2]
    assert best(scores, 2) == [1, 2]


def test_key_norm_does_not_see_rotation():
    """A rotation keeps lengths: (3, 4) turned by any angle has norm 5."""
    kind = ONE.kinds[0].rope
    turned = positions.turn(jnp.array([[3.0, 4.0]] * 3), jnp.array([0, 1, 7]), kind)
    scores = scorers.build(Spec("key_norm"))(seen(turned))[0, 0]
    np.testing.assert_allclose(scores, [-5, -5, -5], rtol=1e-6)  # cos^2 + sin^2 in float32
    assert abs(float(turned[1, 0]) - 3) > 1  # cos 1 * 3 - sin 1 * 4 = -1.745


def test_key_norm_during():
    """Five tokens of norms 5, 1, 4, 2, 3; window 1, two entries beside it, one token at a time.

    Token 4 is the window. 0 and 1 fill the body; 2 (norm 4) takes the place of 0 (norm 5), and 3
    (norm 2) that of 2: in place, so the slots hold arrivals 3 and 1.
    """
    made = recipe("key_norm", when="during", slots=3, window=1, stride=1, page=2)
    cache = init_cache(ONE, made, 1, 8)
    k = jnp.array([5.0, 1, 4, 2, 3])[None, None, :, None, None] * jnp.array([1.0, 0])
    for i in range(5):
        new = Tokens(k[:, :, i : i + 1], k[:, :, i : i + 1])
        cache = _absorb(cache, new, jnp.array([1]))
    body = cache.groups[0].bodies[0]
    assert body.pos.ravel().tolist() == [3, 1]
    assert body.codes[0][..., 0].ravel().tolist() == [2, 1]
    assert int(cache.edge[0]) == 4 and int(cache.seen[0]) == 5


def snap(sums, **options):
    spec = Spec("window_attention", tuple(options.items()))
    width = len(sums[0])
    return scorers.build(spec)(seen(np.zeros((width, 2)), sums=sums))[0, 0]


def test_snapkv_spike():
    """A spike at 4 with max pooling over 3 keeps 3, 4, 5; over 5 it keeps 2 to 6."""
    spike = [[0, 0, 0, 0, 1, 0, 0, 0]]
    assert snap(spike, kernel=3, pool="max").tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert best(snap(spike, kernel=5, pool="max"), 5) == [2, 3, 4, 5, 6]


def test_snapkv_average():
    """Means of three, zeros beyond the ends: (0+3+6)/3, (3+6+0)/3, (6+0+9)/3, (0+9+0)/3."""
    assert snap([[3, 6, 0, 9]], kernel=3, pool="avg").tolist() == [3, 3, 5, 3]


def test_snapkv_heads_of_a_group():
    """Two query heads, (1, 0, 2) and (3, 4, 0): mean (2, 2, 1), sum (4, 4, 2), max (3, 4, 2)."""
    sums = [[1, 0, 2], [3, 4, 0]]
    assert snap(sums, kernel=1).tolist() == [2, 2, 1]
    assert snap(sums, kernel=1, reduce="sum").tolist() == [4, 4, 2]
    assert snap(sums, kernel=1, reduce="max").tolist() == [3, 4, 2]


def pooled(scores, count, alpha):
    scores = jnp.asarray(scores, jnp.float32)[None]
    pos = jnp.broadcast_to(jnp.arange(scores.shape[2]), scores.shape)
    none = jnp.zeros(scores.shape, bool)
    budget = budgets.build(Spec("pooled", (("alpha", alpha),)))
    wants = budget.wants(budgets.Ask(scores.shape[2], slots=count))[:, None]
    return np.asarray(jax.jit(budget)(scores, ~none, none, pos, jnp.asarray(wants)))[0]


ADA = [[0.9, 0.05, 0.03, 0.02], [0.3, 0.25, 0.25, 0.2]]


def test_ada_pooled_counts():
    """Two heads, two entries each: the best four of all are .9 and .3, .25, .25, so 1 and 3."""
    assert pooled(ADA, 2, 0.0).tolist() == [[True, False, False, False], [True, True, True, False]]


def test_ada_floors():
    """alpha 1: each head keeps its own best two, as without a pool; 0.5: one each for sure."""
    assert pooled(ADA, 2, 1.0).sum(axis=1).tolist() == [2, 2]
    starved = [[0.9, 0.8, 0.7, 0.6], [0.01, 0.02, 0.03, 0.04]]
    assert pooled(starved, 2, 0.0).sum(axis=1).tolist() == [4, 0]
    # the floor of one keeps .04; the other three places go to .9, .8, .7
    assert pooled(starved, 2, 0.5).tolist() == [[True] * 3 + [False], [False] * 3 + [True]]


def test_ada_identical_heads():
    """Heads that agree share alike: the best of .4, .4, .3, .3, .2, .2 are .4 and .3 of each."""
    assert pooled([[0.2, 0.4, 0.3]] * 2, 2, 0.0).tolist() == [[False, True, True]] * 2


def test_streaming_sinks():
    """Eight tokens, 2 sinks, a window of 2: 0, 1 in the body, 6, 7 in the tail, next at 4."""
    made = recipe("streaming_llm", slots=4, sinks=2, stride=1, page=2)
    cache = init_cache(ONE, made, 1, 16)
    x = jnp.arange(8.0)[None, None, :, None, None] * jnp.ones(2)
    for i in range(0, 8, 2):
        new = Tokens(x[:, :, i : i + 2], x[:, :, i : i + 2])
        cache = _absorb(cache, new, jnp.array([2]))
    body = cache.groups[0].bodies[0]
    assert body.pos.ravel().tolist() == [0, 1]
    assert body.codes[0][..., 0].ravel().tolist() == [0, 1]
    assert [int(x[0]) for x in (cache.seen, cache.edge, cache.clock)] == [8, 6, 4]
    at = positions.ring(cache.groups[0].tail.capacity, cache.seen, cache.edge)
    assert sorted(at[0].tolist())[-2:] == [6, 7] and (at >= 0).sum() == 2


def test_int8():
    """Largest 2.54, so a level is 2.54 / 127 = 0.02; 1.0 is 50 levels, -0.508 is -25.4."""
    codes = codecs.build(Spec("int8"), "k").encode(jnp.array([[2.54, 1.0, -0.508, 0.0]]))
    assert codes["codes"].tolist() == [[127, 50, -25, 0]]  # -0.508 / 0.02 = -25.4
    np.testing.assert_allclose(codes["scale"], [0.02], rtol=1e-6)  # 2.54 is not a float32
    assert codes["codes"].dtype == jnp.int8 and codes["scale"].dtype == jnp.float32


def test_int8_extremes_and_zeros():
    """The largest magnitude is exact at either sign; a vector of zeros stays zeros, not NaN."""
    codec = codecs.build(Spec("int8"), "v")
    x = jnp.array([[-127.0, 127.0, 63.4], [0.0, 0.0, 0.0]])
    back = codec.decode(codec.encode(x), jnp.float32)
    assert back.tolist() == [[-127, 127, 63], [0, 0, 0]]


def test_ring():
    """Four slots, six tokens: slot s holds the last p with p % 4 == s, here 4, 5, 2, 3.

    With everything below 3 let go, slot 2 is empty; an unfinished first round leaves slots empty.
    """
    ring = lambda seen, low: positions.ring(4, jnp.array([seen]), jnp.array([low]))[0].tolist()  # noqa: E731
    assert ring(6, 0) == [4, 5, 2, 3]
    assert ring(6, 3) == [4, 5, -1, 3]
    assert ring(2, 0) == [0, 1, -1, -1]
    assert ring(0, 0) == [-1] * 4


def test_ranks():
    """Arrivals 9, none, 0, 4 have ranks 2, 0 (as empty), 0, 1."""
    assert positions.ranks(jnp.array([9, -1, 0, 4])).tolist() == [2, 0, 0, 1]


@pytest.mark.parametrize(
    "scores,count,kept,more",
    [
        ([1, 3, 2, 3], 2, [1, 3], {}),
        ([1, 1, 1, 1], 2, [0, 1], {}),  # ties go to the lowest position,
        ([1, 1, 1, 1], 2, [1, 2], dict(pos=[9, 0, 5, 7])),  # wherever its slot is
        ([0.0, -0.0, 0.0], 2, [0, 1], {}),  # zeros tie, whatever their sign
        ([np.nan, -5, np.nan, 0], 3, [0, 1, 3], {}),  # NaN is the lowest
        ([np.nan, np.nan], 1, [0], {}),
        ([-np.inf, 2, np.inf], 2, [1, 2], {}),
        ([1, 2, 3, 4], 2, [0, 3], dict(protected=(0,))),  # protection beats any score,
        ([1, 2, np.inf, 4], 1, [1], dict(protected=(1, 3))),  # within the count
        ([4, 3, 2, 1], 3, [1, 3], dict(valid=[0, 1, 0, 1])),  # only what is there
        ([1, 2], 0, [], {}),
        ([1, 2], 9, [0, 1], {}),
    ],
)
def test_top(scores, count, kept, more):
    assert best(scores, count, **more) == kept


def query(rows):
    """One head, one batch row; queries [t d] at the end of 8 arrivals, scale 1."""
    q = jnp.asarray(rows, jnp.float32)[None, :, None]
    return Query(q, jnp.full((1, q.shape[1]), 8), 1.0)


def test_attention_and_merge():
    """Logits ln 1, ln 3 and ln 4: weights 1/8, 3/8, 4/8; values 8, 16, 0 give 1 + 6 = 7, lse ln 8.

    The pieces alone: {ln 1, ln 3} gives 8/4 + 48/4 = 14 with lse ln 4; {ln 4} gives 0 with ln 4.
    Merged with equal weights: 7. Rounding of ln and exp: 1e-6.
    """
    k = jnp.log(jnp.array([1.0, 3.0, 4.0]))[None, None, :, None]
    v = jnp.array([8.0, 16.0, 0.0])[None, None, :, None]
    q = query([[1.0]])
    piece = lambda pos: attend_rows(q, k, v, jnp.array([pos]))  # noqa: E731
    one, two, whole = piece([0, 1, -1]), piece([-1, -1, 2]), piece([0, 1, 2])
    for (out, lse), want, total in ((one, 14, 4), (two, 0, 4), (whole, 7, 8),
                                    (merge(one, two), 7, 8), (merge(two, one), 7, 8)):  # fmt: skip
        np.testing.assert_allclose(out.ravel(), [want], rtol=1e-6)
        np.testing.assert_allclose(lse.ravel(), [np.log(total)], rtol=1e-6)


def test_window_counts_the_query():
    """At arrival 8 a window of 3 sees 6, 7 and 8, not 5, nor 9 which comes later."""
    k, v = jnp.zeros((1, 1, 5, 1)), jnp.arange(5.0)[None, None, :, None]
    q = query([[1.0]]).replace(window=3)
    out, lse = attend_rows(q, k, v, jnp.array([[5, 6, 7, 8, 9]]))
    assert out.ravel().tolist() == [2.0]  # (1 + 2 + 3) / 3
    np.testing.assert_allclose(lse.ravel(), [np.log(3)], rtol=1e-6)


def test_mass():
    """Weights (1/4, 3/4) and (2/3, 1/3) of two queries: sums 11/12, 13/12; maxima 2/3, 3/4."""
    k = jnp.eye(2)[None, None]
    q = query(np.log([[1.0, 3.0], [2.0, 1.0]]))
    pos = jnp.array([[0, 1]])
    lse = attend_rows(q, k, k, pos)[1]
    sums, maxima = mass(q, k, pos, lse)
    np.testing.assert_allclose(sums.ravel(), [11 / 12, 13 / 12], rtol=1e-6)
    np.testing.assert_allclose(maxima.ravel(), [2 / 3, 3 / 4], rtol=1e-6)
    np.testing.assert_allclose(mass(q, k, pos, lse, (1, 2))[0].ravel(), [2 / 3, 1 / 3], rtol=1e-6)
