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
from kvjax.codecs.turned import Turned
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
    """What is read back is within the bound the codec states, below half of the largest number of
    the vector, or of its group; of a turned vector below 1.25 of its length."""
    codec = codecs.build(Spec(name), side)
    x = np.tile(x, (-(-codec.group // len(x)), 1))[: max(codec.group, 3)]
    back = codec.decode(codec.encode(jnp.asarray(x), jnp.ones(len(x), bool)), jnp.float32)
    bound = np.asarray(codec.bound(jnp.asarray(x)))
    assert np.isfinite(back).all()
    assert (np.abs(np.asarray(back) - x) <= bound[:, None]).all()
    size = np.abs(x).max(-1) if codec.group == 1 else np.abs(x).max()
    size = 2.5 * np.linalg.norm(np.float64(x), axis=-1) if isinstance(codec, Turned) else size
    assert (bound <= 0.5 * size + 1e-36).all()


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


TABLES = {
    "labels": {"label": jnp.array([0.25, 0.75])},
}


def _seen(s, *words):
    rng = generator("seen", s, *words)
    k, v = (rng.normal(size=(B, N, s, D)).astype(np.float32) for _ in range(2))
    pos = np.stack([[rng.permutation(s) for _ in range(N)] for _ in range(B)]).astype(np.int32)
    return k, v, pos, rng.random((B, N * G, s)).astype(np.float32)


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_follow_a_permutation(name):
    """Permuting the tokens permutes the scores, exactly: a token's score is its own.

    A scorer that smooths along the text is looked at without smoothing. One that sums over all
    tokens, a mean key or a softmax, sums them in another order: a few roundings of 6e-8.
    """
    options = (("kernel", 1),) if name in ("window_attention", "probe_attention") else ()
    scorer = scorers.build(Spec(name, options), TABLES.get(name))
    k, v, pos, sums = _seen(11)
    order = generator("order").permutation(11)
    root = jnp.asarray(generator("spread").normal(size=(B, N * G, D, D)), jnp.float32)
    queries = {"count": jnp.full((B,), 7.0), "mean": root[..., 0], "spread": root @ root.mT}

    def scores(k, v, pos, sums):
        each = jnp.asarray(sums[:, :N])
        evidence = queries | {"sums": jnp.asarray(sums), "maxima": each, "scores": each}
        length = jnp.full((B,), 11, jnp.int32)
        return np.asarray(scorer(Seen(*map(jnp.asarray, (k, v, pos)), length, evidence)))

    want = scores(k, v, pos, sums)
    got = scores(k[:, :, order], v[:, :, order], pos[:, :, order], sums[:, :, order])
    assert want.shape == (B, N, 11) and len(np.unique(want)) > (1 if name == "labels" else 10)
    near = 1e-5 * np.abs(want).max() if name in ("key_diff", "expected_attention") else 0
    np.testing.assert_allclose(got, want[:, :, order], rtol=0, atol=near)


L, S, REAL = 3, 20, 17
OPTIONS = {"pooled": (("alpha", 0.0),), "threshold": (("tau", -1e30),), "chunks": (("size", 3),)}
SCOPE = {"pooled": "layer", "model": "model", "threshold": "model", "heads": "model"}  # else a head


def _ranked(name, scores, valid):
    """What a budget ranks by: scores, or for whole heads and runs that of the head or the run."""
    if name == "heads":
        return np.broadcast_to(
            np.where(valid, scores, -np.inf).max(-1, keepdims=True), scores.shape
        )
    if name != "chunks":
        return scores
    out = np.empty_like(scores)
    for layer, b in np.ndindex(L, B):
        from_ = layer // 2 * 2  # two layers share a choice
        for first in range(0, S, 3):
            run = np.s_[from_, b, :, first : first + 3]
            many = valid[run].any(0).sum()
            mean = np.where(valid[run], scores[run], 0).sum() / max(many, 1)
            out[layer, b, :, first : first + 3] = mean
    return out


@pytest.mark.parametrize("name", budgets.BUDGETS)
def test_kept_scores_above_dropped(name):
    """The least score kept is at least the largest dropped, protected and floors apart, and as many
    are kept as was asked for: 6 of 17 entries a head in row 0, 3 in row 1."""
    rng = generator("scores")
    scores = rng.normal(size=(L, B, N, S)).astype(np.float32)
    pos = np.broadcast_to([rng.permutation(S) for _ in range(B)], (L, N, B, S)).swapaxes(1, 2)
    valid = pos < REAL
    budget = budgets.build(Spec(name, OPTIONS.get(name, ())))
    asked = [budgets.Ask(REAL, keep / REAL, layers=L, heads=N) for keep in (6, 3)]
    wants = np.stack([budget.wants(ask) for ask in asked], axis=-1)
    args = map(jnp.asarray, (scores, valid, valid & (pos < 2), pos, wants))
    keep = np.asarray(jax.jit(budget)(*args))
    ranked, apart = _ranked(name, scores, valid), pos >= 2
    assert (keep <= valid).all() and (keep[pos < 2].all() or name == "pyramid")
    for b, each in enumerate((6, 3)):
        total = keep[:, b].sum(axis=-1)  # [l n]
        if name == "heads":  # steps of 15 beyond the 2 protected: of 36 or 18, one head or none
            assert sorted(total.ravel()) == [2] * 5 + [17 if each == 6 else 2]
        elif name == "labelled":  # whole heads, and the newest tokens of others, by no score
            assert each * L * N - L * N < total.sum() <= each * L * N
            continue
        elif name == "pyramid":  # lines from 2 * each - each / 20 to each / 20
            assert total.tolist() == [[n, n] for n in {6: (12, 6, 0), 3: (6, 3, 0)}[each]]
        elif SCOPE.get(name) == "layer":
            assert total.sum(axis=1).tolist() == [N * each] * L
        else:
            assert total.sum() == each * L * N
            assert name in SCOPE or (total == each).all()
        for layer, n in np.ndindex(L, N):
            at = {"layer": np.s_[layer, b], "model": np.s_[:, b]}.get(
                SCOPE.get(name, ""), np.s_[layer, b, n]
            )
            kept = ranked[at][keep[at] & apart[at]]
            gone = ranked[at][~keep[at] & valid[at] & apart[at]]
            assert kept.size == 0 or kept.min() >= gone.max()
