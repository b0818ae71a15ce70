"""One example for each budget: of four to twelve tokens by hand, or a card's own numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, generator, model
from hard import Dense, held

import kvjax
from kvjax import budgets
from kvjax.budgets import Ask
from kvjax.config import Spec


def build(name, **options):
    return budgets.build(Spec(name, tuple(options.items())))


def keep(budget, scores, ask, sinks=0):
    """The mask [l n s] of one row, of scores [l n s]."""
    scores = jnp.asarray(scores, jnp.float32)[:, None]
    layers, _, heads, length = scores.shape
    ask = ask.replace(length=length, layers=layers, heads=heads)
    pos = jnp.broadcast_to(jnp.arange(length), scores.shape)
    every = jnp.ones(scores.shape, bool)
    wants = jnp.asarray(budget.wants(ask))[..., None]
    return np.asarray(jax.jit(budget)(scores, every, pos < sinks, pos, wants))[:, 0]


def tokens(mask):
    return np.flatnonzero(mask).tolist()


@pytest.mark.parametrize(
    "slots, first, last, mean", [(2048, 3986, 111, 2048.5), (128, 242, 25, 133.5)]
)
def test_pyramid_of_the_card(slots, first, last, mean):
    """T 8192, window 8, beta 20, 32 layers. B = 2048: base 2040, from 4080 - 102 = 3978 in steps of
    3876 // 31 = 125 to 103, window included 3986 and 111. B = 128: 240 - 6 = 234 in steps of 7.
    """
    ask = Ask(8192, slots=slots, window=8, layers=32, heads=8)
    got = build("pyramid", steps="whole").wants(ask) + 8
    assert (got[0], got[-1], got.mean()) == (first, last, mean)
    assert len(set(np.diff(got))) == 1


def test_pyramid_where_the_base_is_too_large():
    """8 of 10 tokens, no window, beta 4, 3 layers: 2 at the top would need 14 below, and there are
    10, so the line is 10, 8, 6."""
    ask = Ask(10, slots=8, layers=3)
    assert build("pyramid", beta=4).wants(ask).tolist() == [10, 8, 6]


def test_pyramid_is_exact():
    """3 of 8 on a line over four layers: 5.25, 3.75, 2.25, 0.75 become 5, 4, 2, 1, 12 in all.
    Each head of a layer keeps its own best."""
    ask = Ask(8, slots=3, layers=4)
    assert build("pyramid", beta=4).wants(ask).tolist() == [5, 4, 2, 1]
    scores = np.broadcast_to([[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]], (4, 2, 8))
    got = keep(build("pyramid", beta=4), scores, ask)
    assert got.sum(-1).tolist() == [[5, 5], [4, 4], [2, 2], [1, 1]]
    assert tokens(got[2, 0]) == [6, 7] and tokens(got[2, 1]) == [0, 1]


CHUNKED = [[[9, 0, 0, 1, 1, 1, 0, 0, 8, 2, 2, 2]]]


def test_chunks_of_the_card():
    """Runs of three sum to 9, 3, 8, 6; half of four runs are 0-2 and 6-8."""
    got = keep(build("chunks", size=3), CHUNKED, Ask(keep=0.5, paper=True))
    assert tokens(got[0, 0]) == [0, 1, 2, 6, 7, 8]
    # by entries: 7 are the two best runs and the first token of the third
    got = keep(build("chunks", size=3), CHUNKED, Ask(slots=7))
    assert tokens(got[0, 0]) == [0, 1, 2, 6, 7, 8, 9]


def test_chunks_of_one_token():
    """Runs of one token are tokens: what the best entries of the sum over heads are."""
    scores = np.array([[[1, 5, 2, 4], [3, 0, 3, 0]]])  # sums 4, 5, 5, 4
    one = keep(build("chunks", size=1), scores, Ask(slots=2))
    alone = keep(build("uniform"), scores.sum(1, keepdims=True), Ask(slots=2))
    assert tokens(one[0, 0]) == tokens(one[0, 1]) == tokens(alone[0, 0]) == [1, 2]


def test_chunks_reuse():
    """Four layers, each fond of another run: reuse=1 lets each choose, reuse=4 none but the first,
    reuse=2 every other."""
    scores = np.repeat(np.eye(4), 2, axis=1)[:, None]  # layer i: tokens 2 i and 2 i + 1
    for reuse, runs in ((1, [0, 1, 2, 3]), (2, [0, 0, 2, 2]), (4, [0] * 4), (9, [0] * 4)):
        got = keep(build("chunks", size=2, reuse=reuse), scores, Ask(slots=2))
        assert [tokens(x[0]) for x in got] == [[2 * i, 2 * i + 1] for i in runs]


def test_model():
    """Two layers of one head, 0.9 to 0.6 and 0.04 to 0.01: half of eight entries are all of the
    first layer. With a sink the worst of them makes room for it. count="paper" keeps one less."""
    scores = [[[0.9, 0.8, 0.7, 0.6]], [[0.04, 0.03, 0.02, 0.01]]]
    by = lambda *x, **y: [tokens(m[0]) for m in keep(build("model"), scores, Ask(*x, **y))]  # noqa: E731
    assert by(keep=0.5) == [[0, 1, 2, 3], []]
    assert by(keep=0.5, paper=True) == [[0, 1, 2], []]
    assert by(keep=0.75) == [[0, 1, 2, 3], [0, 1]]
    got = keep(build("model"), scores, Ask(keep=0.5), sinks=1)
    assert [tokens(m[0]) for m in got] == [[0, 1, 2], [0]]


def test_heads():
    """Labels .9, .1 and .5, .2 of two layers: half of 16 entries are the two best heads, whole. A
    sink in each of the others leaves room for one: 4 + 3 of 8."""
    scores = np.broadcast_to(np.array([[0.9, 0.1], [0.5, 0.2]])[..., None], (2, 2, 4))
    got = keep(build("heads"), scores, Ask(keep=0.5))
    assert got.sum(-1).tolist() == [[4, 0], [4, 0]]
    got = keep(build("heads"), scores, Ask(keep=0.5), sinks=1)
    assert got.sum(-1).tolist() == [[4, 1], [1, 1]] and got[..., 0].all()
    assert keep(build("heads"), scores, Ask(keep=0.9)).sum() == 12  # of 14 asked for, in fours


def test_a_layer_may_keep_nothing():
    """Labels give layer 0 everything and layer 1 nothing: the next tokens see just that, as a
    float64 decoder does. Logits are of order 10: sums of tens of terms in float32."""
    label = np.array([[1.0, 1.0], [0.0, 0.0]], np.float32)
    recipe = kvjax.recipe("kvzip", scorer="labels", sinks=0, page=4)
    made = dataclasses.replace(model(PLAIN), tables={"kvzip": {"scorer": {"label": label}}})
    ids = generator("nothing").integers(0, PLAIN.vocab, (1, 14)).astype(np.int32)
    _, cache = kvjax.prefill(made, ids[:, :12], recipe, max_length=16, logits="none")
    assert held(cache) == [[list(range(12))] * 2, [[]] * 2]
    logits, _ = kvjax.extend(made, ids[:, 12:13], cache)
    dense = Dense(made.params, PLAIN)
    for token in ids[0, :12]:
        dense.read(token)
    want = dense.read(ids[0, 12], [[list(range(12))] * 2, [[]] * 2])
    np.testing.assert_allclose(logits[0], want, atol=2e-4)
