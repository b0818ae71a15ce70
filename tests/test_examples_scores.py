"""One example for each score that looks along: of three to twelve tokens, verifiable by hand."""

import jax.numpy as jnp
import numpy as np
from cases import PLAIN, generator, model

import kvjax
from kvjax import scorers
from kvjax.attention import Query
from kvjax.config import Rope, Spec
from kvjax.evidence import Looked, Mass
from kvjax.observing import gather
from kvjax.scorers import Seen
from kvjax.scorers.reconstruction import Repeating


def looked(q, k, here, first, lse=0.0):
    """One layer of one head and one row: queries q [t d] at arrivals first .. first + t - 1, keys k
    [c d] of arrivals 0 .. c - 1 (none if first is 0), own keys here [t d]; scale 1."""
    q, k, here = (jnp.asarray(x, jnp.float32)[None, None] for x in (q, k, here))
    at = (first + jnp.arange(q.shape[2]))[None]
    rows = jnp.swapaxes(q, 1, 2)
    slots = jnp.arange(k.shape[2])
    pos = jnp.where(slots < first, slots, -1)[None]
    lse = jnp.broadcast_to(jnp.asarray(lse, jnp.float32)[None, ..., None], rows.shape[:3])
    return Looked(Query(rows, at, 1.0), rows, k, k, pos, here, lse, rows[:, :, 0])


def seen(k, heads=1, v=None, **more):
    """Entries of one row; k [s d], alike in all kv heads."""
    k = jnp.broadcast_to(jnp.asarray(k, jnp.float32), (1, heads, *np.shape(k)))
    v = k if v is None else jnp.asarray(v, jnp.float32)[None, None]
    pos = jnp.broadcast_to(jnp.arange(k.shape[2]), k.shape[:3])
    return Seen(k, v, pos, jnp.array([k.shape[2]]), **more)


def score(name, seen, **options):
    return np.asarray(scorers.build(Spec(name, tuple(options.items())))(seen))[0]


def zero_keys():
    """A model whose keys are all zero: attention is uniform over what a query sees."""
    made = model(PLAIN)
    blocks = made.params.blocks
    params = made.params.replace(blocks=blocks.replace(k=jnp.zeros_like(blocks.k)))
    return kvjax.Model(params, PLAIN, None)


def evidence(made, recipe, tokens=12):
    """What the recipe's scorer sees of so many tokens: a dict of leaves [l b ...]."""
    ids = generator("ids").integers(0, PLAIN.vocab, (1, tokens)).astype(np.int32)
    exact = kvjax.prefill(made, ids, max_length=16, logits="none")[1]
    (got,) = gather(made, exact, recipe, np.array([tokens]), ids, None)
    return {name: np.asarray(x) for name, x in got.items()}


def test_reconstruction_of_uniform_attention():
    """All keys zero, 4 sinks, chunks of 4: the first token of a chunk that is repeated sees 4 + 4
    keys and itself, 1/9 each; those after it see more. Sinks are not repeated: 0."""
    scorer = Spec("reconstruction", (("first", 4), ("part", 4)))
    made = evidence(zero_keys(), kvjax.recipe("kvzip", scorer=scorer))["maxima"]
    assert made.shape == (2, 1, 2, 16)
    np.testing.assert_allclose(made[..., 4:12], 1 / 9, rtol=1e-6)
    assert not made[..., :4].any() and not made[..., 12:].any()


def test_reconstruction_of_two_queries():
    """Keys (ln 6, 0), 0, 0 and own keys 0. Query (1, 0) sees the chunk and itself: 6, 1, 1, 1 of 9.
    Query 0, one later, sees five keys alike: 1/5. The maxima are 2/3, 1/5, 1/5."""
    x = looked([[1, 0], [0, 0]], [[np.log(6), 0], [0, 0], [0, 0]], np.zeros((2, 2)), first=3)
    got = Repeating(jnp.int32(0), 3, sinks=0)(x)["maxima"]
    np.testing.assert_allclose(got[0, 0], [2 / 3, 1 / 5, 1 / 5], rtol=1e-6)


def test_reconstruction_depends_on_its_chunks():
    """A chunk is the softmax's denominator: with chunks of 6 and no sinks, 1/(6 + 1)."""
    scorer = Spec("reconstruction", (("part", 6),))
    recipe = kvjax.recipe("kvzip", scorer=scorer, sinks=0)
    made = evidence(zero_keys(), recipe)["maxima"]
    np.testing.assert_allclose(made[..., :12], 1 / 7, rtol=1e-6)


def test_accumulated_attention():
    """Three causal queries whose weights are (1), (1, 2)/3, (1, 1, 2)/4: their sums are 19/12,
    11/12, 1/2, which add up to the number of queries. per_query divides by 3, 2, 1."""
    q = [[0, 0, 0], [0, np.log(2), 0], [0, 0, np.log(2)]]
    x = looked(q, np.zeros((3, 3)), np.eye(3), first=0, lse=np.log([1, 3, 4]))
    sums = Mass()(x)["sums"]
    np.testing.assert_allclose(sums[0, 0], [19 / 12, 11 / 12, 1 / 2], rtol=1e-6)
    entries = seen(np.eye(3), evidence={"sums": sums})
    np.testing.assert_allclose(score("accumulated", entries)[0], sums[0, 0])
    got = score("accumulated", entries, per_query=True)[0]
    np.testing.assert_allclose(got, [19 / 36, 11 / 24, 1 / 2], rtol=1e-6)


def test_accumulated_attention_of_a_model():
    """Each of 12 queries spends a weight of 1: the sums of every head add up to 12."""
    sums = evidence(model(PLAIN), kvjax.recipe("h2o"))["sums"]
    assert sums.shape == (2, 1, 4, 16) and (sums >= 0).all()
    np.testing.assert_allclose(sums.sum(-1), 12, rtol=1e-5)


def test_last_attention():
    """Two query heads, (1/2, 1/4, 1/4) and (0, 1/2, 1/2): the mean 1/4, 3/8, 3/8, in every head."""
    sums = jnp.array([[[0.5, 0.25, 0.25], [0, 0.5, 0.5]]])
    got = score("last_attention", seen(np.zeros((3, 2)), heads=2, evidence={"sums": sums}))
    assert got.tolist() == [[0.25, 0.375, 0.375]] * 2


def test_expected_attention_of_equal_queries():
    """All queries are (1, 0) once rotated to the next position, 4, so nothing is to be expected:
    attention to (ln 2, 0), (ln 3, 0), (0, 0) is 2/6, 3/6, 1/6, times value norms 3, 2, 6. Token 0
    is not counted."""
    back = np.array([[np.cos(4), -np.sin(4)]])  # (1, 0) turned by -4, at base ** 0 = 1 a position
    moments = {
        "count": jnp.array([3.0]),
        "mean": jnp.asarray(back, jnp.float32)[None],
        "spread": jnp.zeros((1, 1, 2, 2)),
    }
    k = [[9, 9], [np.log(2), 0], [np.log(3), 0], [0, 0]]
    entries = seen(k, v=[[5, 0], [0, 3], [2, 0], [0, 6]], evidence=moments, rope=Rope())
    got = score("expected_attention", entries, future=1, first=1)[0]
    np.testing.assert_allclose(got, [0, 1, 1, 1], atol=1e-5)  # cos and sin of 4 in float32
    plain = score("expected_attention", entries, future=1, first=1, value_norm=False)[0]
    np.testing.assert_allclose(plain, [0, 1 / 3, 1 / 2, 1 / 6], atol=1e-5)


def test_expected_attention_of_spread_queries():
    """A query of mean 0 and variance 2 ln 2 along the first axis: E exp(q.k) = exp(k' S k / 2), so
    keys 0 and (1, 0) weigh 1 and 2."""
    moments = {
        "count": jnp.array([4.0]),
        "mean": jnp.zeros((1, 1, 2)),
        # alike in both axes, as rotation mixes them; `spread` is a sum over the four
        "spread": 4 * 2 * np.log(2) * jnp.eye(2)[None, None],
    }
    entries = seen([[0, 0], [1, 0]], v=[[1, 0], [0, 1]], evidence=moments, rope=Rope())
    got = score("expected_attention", entries, future=1, first=0)[0]
    np.testing.assert_allclose(got, [1 / 3, 2 / 3], rtol=1e-5)


def test_key_diff():
    """Directions (1, 0) thrice and (0, 1): their sum is (3, 1), the cosines to it are 3 and 1 over
    the root of 10. The odd one is kept, whatever its length."""
    got = score("key_diff", seen([[1, 0], [2, 0], [0, 5], [1, 0]]))[0]
    far, near = -1 / np.sqrt(10), -3 / np.sqrt(10)
    np.testing.assert_allclose(got, [near, near, far, near], rtol=1e-6)


def test_kvzip_runs_takes_the_neighbours_along():
    """Tokens 0 and 3 are looked at, 5 a little: with a kernel of 3 they lend their scores to the
    tokens beside them; a token that does not compete lends none."""
    needed = np.array([[[1.0, 0.0, 0.0, 5.0, 0.0, 0.5]]], np.float32)
    of = lambda **more: seen(np.zeros((6, 2)), evidence={"maxima": jnp.asarray(needed)}, **more)  # noqa: E731
    assert score("reconstruction", of()).tolist() == needed[0].tolist()
    runs = score("reconstruction", of(), kernel=3)
    assert runs.tolist() == [[1.0, 1.0, 5.0, 5.0, 5.0, 0.5]]
    rest = jnp.asarray([[[True, True, True, False, True, True]]])
    assert score("reconstruction", of(open=rest), kernel=3).tolist() == [[1, 1, 0, 0, 0.5, 0.5]]
