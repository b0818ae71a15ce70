"""Laws of choosing and storing: the selection, codecs, scorers, budgets."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    generator,
)  # fmt: skip

from kvjax import budgets, codecs, scorers
from kvjax.cache.select import ids, top
from kvjax.codecs import CODECS
from kvjax.config import Spec
from kvjax.scorers import SCORERS, Seen

B, N, G, D, E = 2, 2, 2, 16, 8


scores_of = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 2.0, np.nan, np.inf, -np.inf]),
    st.floats(-100, 100, width=32, allow_subnormal=False),
)


@st.composite
def choices(draw):
    s = 12
    scores = draw(hnp.arrays(np.float32, s, elements=scores_of))
    valid, protected = (draw(hnp.arrays(bool, s)) for _ in range(2))
    pos = np.array(draw(st.permutations(range(s))), np.int32)
    return scores, valid, protected & valid, pos, draw(st.integers(-1, s + 1))


_top = jax.jit(top)


@hypothesis.given(choices())
def test_select_against_a_sort(args):
    """Kept are the first `count` by (protected, score, lowest position); NaN scores as -inf."""
    scores, valid, protected, pos, count = args
    value = np.where(np.isnan(scores), -np.inf, scores.astype(np.float64))
    order = sorted(np.flatnonzero(valid), key=lambda i: (
        (0, 0.0, pos[i]) if protected[i] else (1, -value[i], pos[i])))  # fmt: skip
    want = np.isin(np.arange(len(pos)), order[: max(count, 0)])
    got = np.asarray(_top(*map(jnp.asarray, (scores, valid, protected, pos, np.int32(count)))))
    assert got.tolist() == want.tolist()


def test_ids():
    """Indices of true entries ascend; what is past the last is marked as not real."""
    mask_ = generator("ids").random((3, 4, 9)) < 0.4
    mask_[0, 0] = False
    at, real = (np.asarray(x) for x in ids(jnp.asarray(mask_), 6))
    for i in np.ndindex(3, 4):
        want = np.flatnonzero(mask_[i])[:6]
        assert at[i][real[i]].tolist() == want.tolist() and real[i].sum() == len(want)


VECTORS = st.one_of(
    hnp.arrays(np.float32, (3, D), elements=st.floats(-1000, 1000, width=32)),
    st.just(np.zeros((3, D), np.float32)),
    st.floats(-50, 50, width=32).map(lambda c: np.full((3, D), c, np.float32)),
    hnp.arrays(np.float32, (3, D), elements=st.floats(-1, 1, width=32)).map(
        lambda x: x + 300 * (np.arange(D) == 5).astype(np.float32)  # one channel is biased
    ),
    hnp.arrays(np.float32, (3, D), elements=st.floats(-1, 1, width=32)).map(lambda x: x * 1e-30),
)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("name", CODECS)
@hypothesis.given(x=VECTORS)
def test_codec(name, side, x):
    """What is read back is within the bound the codec states, below half the vector's size."""
    codec = codecs.build(Spec(name), side)
    x = np.tile(x, (-(-codec.group // len(x)), 1))[: max(codec.group, 3)]
    back = codec.decode(codec.encode(jnp.asarray(x), jnp.ones(len(x), bool)), jnp.float32)
    bound = np.asarray(codec.bound(jnp.asarray(x)))
    assert np.isfinite(back).all()
    assert (np.abs(np.asarray(back) - x) <= bound[:, None]).all()
    assert (bound <= np.abs(x).max(-1) * 0.5 + 1e-37).all()


@pytest.mark.parametrize("name", CODECS)
def test_round_trip_passes_gradients(name):
    """`round_trip` gives what is stored, and gradients as if nothing had been."""
    pair = codecs.Pair(codecs.build(Spec(name), "k"), codecs.build(Spec(name), "v"))
    x = jnp.asarray(generator("trip").normal(size=(2, max(pair.group, 4), D)).astype(np.float32))
    stored = pair.decode(pair.encode(x, x), jnp.float32)[0]
    f = lambda x: jnp.sum(jnp.square(pair.round_trip(x, x)[0]))  # noqa: E731
    # x + (stored - x) rounds twice
    np.testing.assert_allclose(pair.round_trip(x, x)[0], stored, rtol=0, atol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(x), 2 * stored, rtol=0, atol=1e-5)


def _seen(s, *words):
    rng = generator("seen", s, *words)
    k, v = (rng.normal(size=(B, N, s, D)).astype(np.float32) for _ in range(2))
    pos = np.stack([[rng.permutation(s) for _ in range(N)] for _ in range(B)]).astype(np.int32)
    return k, v, pos, rng.random((B, N * G, s)).astype(np.float32)


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_follow_a_permutation(name):
    """Permuting the tokens permutes the scores, exactly: a token's score is its own.

    A scorer that smooths along the text is looked at without smoothing.
    """
    options = (("kernel", 1),) if name == "window_attention" else ()
    scorer = scorers.build(Spec(name, options))
    k, v, pos, sums = _seen(11)
    order = generator("order").permutation(11)

    def scores(k, v, pos, sums):
        evidence = {"sums": jnp.asarray(sums), "maxima": jnp.asarray(sums)}
        length = jnp.full((B,), 11, jnp.int32)
        return np.asarray(scorer(Seen(*map(jnp.asarray, (k, v, pos)), length, evidence)))

    want = scores(k, v, pos, sums)
    got = scores(k[:, :, order], v[:, :, order], pos[:, :, order], sums[:, :, order])
    assert want.shape == (B, N, 11) and len(np.unique(want)) > 10
    assert np.array_equal(got, want[:, :, order])


@pytest.mark.parametrize("name", budgets.BUDGETS)
def test_kept_scores_above_dropped(name):
    """The least score kept is at least the largest dropped, protected and floors apart."""
    k, _, pos, _ = _seen(20)
    scores = generator("scores").normal(size=(B, N, 20)).astype(np.float32)
    valid = pos < 17
    count = np.array([6, 3], np.int32)
    options = (("alpha", 0.0),) if name == "pooled" else ()
    budget = budgets.build(Spec(name, options))
    args = map(jnp.asarray, (scores, valid, pos < 2, pos, count))
    keep = np.asarray(jax.jit(budget)(*args))
    assert (keep <= valid).all() and keep[pos < 2].all()
    apart = pos >= 2
    for b in range(B):
        assert keep[b].sum() == N * count[b]
        sets = [np.s_[b]] if budget.pooled else [np.s_[b, n] for n in range(N)]
        for at in sets:
            kept = scores[at][keep[at] & apart[at]]
            gone = scores[at][~keep[at] & valid[at] & apart[at]]
            assert kept.min() > gone.max()
