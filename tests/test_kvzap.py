"""KVzap: the surrogate, its training, and what a threshold keeps of its scores."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HYBRID, MAX, PLAIN, generator, model, random_ids, small
from holding import arrivals, assert_same

import kvjax
from kvjax.attention import Query
from kvjax.cache import sizes
from kvjax.cache.cache import TRIMMED
from kvjax.cache.condense import chosen
from kvjax.errors import InputError
from kvjax.evidence import Looked
from kvjax.inputs import checked
from kvjax.observing import gather
from kvjax.scorers.surrogate import Remembered, predict
from kvjax.tables import load_tables, save_tables
from kvjax.train import kvzap

LAYERS, N, M, F = PLAIN.layers, PLAIN.kv_heads, PLAIN.width, 5
LENGTHS = (40, 31)
HALF = small("kvzap", keep=0.5, sinks=2, window=6)


def round_half(length):
    """Entries of all layers and heads that HALF keeps beyond its window."""
    return round(0.5 * LAYERS * N * length) - 6 * LAYERS * N


def random_tables(kind="mlp", layers=LAYERS, width=M, heads=N):
    rng = generator("surrogate", kind)
    shapes = {"out": (width, heads), "out_bias": (heads,)}
    if kind == "mlp":
        shapes = {"inner": (width, F), "inner_bias": (F,), "out": (F, heads), "out_bias": (heads,)}
    made = {k: jnp.asarray(rng.normal(size=(layers, *s)), jnp.float32) for k, s in shapes.items()}
    return {"scorer": {"weights": made}}


def with_tables(tables=None, config=PLAIN):
    tables = random_tables() if tables is None else tables
    return dataclasses.replace(model(config), tables={"kvzap": tables})


def prefill(recipe, surrogate=None, *words):
    ids, one = random_ids(max(LENGTHS), "kvzap", *words), surrogate or with_tables()
    return kvjax.prefill(one, ids, recipe, max_length=MAX, lengths=LENGTHS, chunk=20)


def kept(cache):
    """The arrivals that stay in the pool for each (layer, row, head), [l b n] of sorted lists."""
    pool = cache.pool
    pos, owner = np.asarray(pool.pos[0, :, 0]).astype(int), np.asarray(pool.owner[0, :, 0])
    first, count = np.asarray(pool.first), np.asarray(pool.count)
    pos = np.where(pos == 65535, -1, pos)
    out = {}
    for l, b in np.ndindex(first.shape):  # noqa: E741
        for n in range(N):
            mine = slice(first[l, b], first[l, b] + count[l, b])
            held = pos[b, mine][owner[b, mine] == n]
            out[l, b, n] = sorted(held[held >= 0].tolist())
    return out


def by_hand(tables, lengths=LENGTHS):
    """Scores [l b n t], float64, of the hidden states that `Entering` sees of the whole prompt."""
    ids, count = random_ids(max(lengths), "kvzap"), jnp.asarray(lengths, jnp.int32)
    cache = kvjax.init_cache(PLAIN, kvjax.recipe("exact"), len(lengths), MAX)
    _, hidden = kvzap._read(model().params, PLAIN, cache, ids, count)
    h = np.concatenate([np.asarray(x) for x in hidden]).astype(np.float64)  # [l b t m]
    w = {k: np.asarray(x, np.float64) for k, x in tables["scorer"]["weights"].items()}
    if "inner" in w:
        h = np.einsum("lbtm,lmf->lbtf", h, w["inner"]) + w["inner_bias"][:, None, None]
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / np.sqrt(2)))
    y = np.einsum("lbtf,lfn->lbtn", h, w["out"]) + w["out_bias"][:, None, None]
    return y.swapaxes(2, 3)


def best(scores, total):
    """What stays of scores [l b n t] if total(length) entries do, sinks first, like `kept`.

    Equal ids have equal scores in layer 0: the earlier stays, then the lower layer and head.
    """
    out = {}
    for b, length in enumerate(LENGTHS):
        s = scores[:, b, :, : length - 6].round(4)
        s[..., :2] = np.inf
        layer, head, pos = (x.ravel() for x in np.indices(s.shape))
        order = np.lexsort((head, layer, pos, -s.ravel()))[: total(length)]
        stays = np.zeros(s.size, bool)
        stays[order] = True
        stays = stays.reshape(s.shape)
        out |= {(i, b, n): np.flatnonzero(stays[i, n]).tolist() for i, n in np.ndindex(LAYERS, N)}
    return out


@pytest.mark.parametrize("kind", ["mlp", pytest.param("linear", marks=pytest.mark.full)])
def test_it_keeps_what_the_surrogate_scores_highest(kind):
    """Against scores by hand, one budget for all layers and heads, read in chunks of 20."""
    tables = random_tables(kind)
    cache = prefill(HALF, with_tables(tables))[1]
    assert kept(cache) == best(by_hand(tables), round_half)


@pytest.mark.full
def test_condensing_later_keeps_the_same():
    one, ids = with_tables(), random_ids(max(LENGTHS), "kvzap")
    exact = prefill(kvjax.recipe("exact"), one)[1]
    assert kept(kvjax.condense(one, exact, HALF, tokens=ids)) == kept(prefill(HALF, one)[1])


def test_logits_of_the_prompt_are_those_of_exact_prefill():
    """Bit for bit, and another prompt compiles nothing."""
    out, want = (prefill(recipe)[0] for recipe in (HALF, kvjax.recipe("exact")))
    assert np.asarray(out).tobytes() == np.asarray(want).tobytes()
    sizes = kvjax.api._read._cache_size()
    prefill(HALF, None, "other")
    assert kvjax.api._read._cache_size() == sizes


def stays(tau, keep):
    """The mask [l b n t] of a threshold with room for `keep`, from scores by hand."""
    scores = by_hand(random_tables())
    recipe = small("kvzap", budget="threshold", tau=tau, keep=keep, sinks=2, window=6)
    wide = np.pad(scores, [(0, 0)] * 3 + [(0, MAX - scores.shape[-1])]).astype(np.float32)
    exact, evidence = prefill(kvjax.recipe("exact"))[1], ({"scores": jnp.asarray(wide)},)
    numbers = sizes.counts(recipe, LENGTHS), sizes.wants(PLAIN, recipe, LENGTHS)
    return scores, np.asarray(chosen(exact, evidence, *numbers, PLAIN, recipe)[0][0])


def test_thresholds_that_keep_all_and_nothing():
    """All that the window leaves; or the sinks alone."""
    for tau, keep, stop in ((-1e30, 1.0, [34, 25]), (1e30, 0.5, [2, 2])):
        mask = stays(tau, keep)[1]
        want = np.arange(MAX) < np.asarray(stop)[:, None]
        assert (mask == want[:, None]).all()


def test_a_threshold_is_per_head_and_counts_by_itself():
    """Every entry at or above tau stays, and no other; the number depends on text and head."""
    values = np.unique(by_hand(random_tables()).round(4))
    tau = float(values[len(values) // 2 :][:2].mean())
    scores, mask = stays(tau, 1.0)
    for b, edge in enumerate((34, 25)):
        assert (mask[:, b, :, 2:edge] == (scores[:, b, :, 2:edge] >= tau)).all()
        assert mask[:, b, :, :2].all() and not mask[:, b, :, edge:].any()
    assert len(np.unique(mask.sum(axis=-1))) > 4


def test_a_threshold_without_room_drops_the_lowest_and_says_so():
    low = small("kvzap", budget="threshold", tau=-1e30, keep=0.5, sinks=2, window=6)
    cache = prefill(low)[1]
    assert np.asarray(cache.flags).tolist() == [TRIMMED, TRIMMED]
    assert kept(cache) == best(by_hand(random_tables()), round_half)
    assert checked(cache) is cache  # a note, which stops nothing


def test_it_streams():
    """The prompt read at once: each head keeps its best of what left the tail."""
    recipe = small("kvzap", when="during", budget="uniform", slots=16, sinks=2, window=4)
    ids = random_ids(max(LENGTHS), "kvzap")
    args = dict(max_length=MAX, lengths=LENGTHS, chunk=max(LENGTHS))
    cache = kvjax.prefill(with_tables(), ids, recipe, **args)[1]
    scores, edge = by_hand(random_tables()), np.asarray(cache.edge)
    pos = arrivals(cache, cache.groups[0])[1][0].reshape(LAYERS, 2, N, -1)
    stat = np.asarray(cache.groups[0].bodies[0].stat).reshape(pos.shape)
    for l, b, n in np.ndindex(LAYERS, 2, N):  # noqa: E741
        s = scores[l, b, n, : edge[b]].copy()
        s[:2] = np.inf
        held = pos[l, b, n] >= 0
        mine = pos[l, b, n][held]
        assert held.sum() == 12 and s[mine].min() >= np.sort(s)[-12] - 1e-4
        np.testing.assert_allclose(stat[l, b, n][held], scores[l, b, n][mine], rtol=0, atol=1e-4)


def test_drafts_bring_their_scores_one_by_one():
    """A look that may be taken back in part keeps apart what each token brings."""
    x, pos = jnp.ones((1, 3, N, 16)), jnp.arange(3)[None]
    keys = jnp.swapaxes(x, 1, 2)
    hidden = jnp.asarray(generator("drafts").normal(size=(1, 3, M)), jnp.float32)
    looked = Looked(
        Query(x, pos, 1.0), x, keys, keys, pos, keys, x[..., 0], hidden,
        tables=jax.tree.map(lambda w: w[0], random_tables()),
    )  # fmt: skip
    alone = np.asarray(Remembered()(looked)["here"])
    apart = np.asarray(Remembered()(looked.replace(apart=True))["here"])
    assert alone.shape == (1, 3, N) and apart.shape == (1, 3, N, 3)
    assert np.array_equal(apart.sum(-1), alone) and np.array_equal(apart[:, 1, :, 1], alone[:, 1])


def test_ridge_finds_a_linear_map():
    rng = generator("ridge")
    x, w, b = rng.normal(size=(400, 6)) + 3, rng.normal(size=(6, 2)), rng.normal(size=2)
    found = kvzap.ridge(x, x @ w + b, alpha=0.0)
    np.testing.assert_allclose(found["out"], w, atol=1e-6)
    np.testing.assert_allclose(found["out_bias"], b, atol=1e-5)
    some = kvzap.ridge(x, x @ w + b, alpha=1.0)  # 400 tokens of variance 1 outweigh it
    np.testing.assert_allclose(some["out"], w, atol=0.01)
    assert np.abs(kvzap.ridge(x, x @ w + b, alpha=1e9)["out"]).max() < 1e-5


def test_an_mlp_fits_what_no_line_does():
    """|x| of inputs far from standard: the mlp explains it, ridge nothing."""
    rng = generator("mlp")
    x = (rng.normal(size=(2, 900, 3)) * 50 + [7, -300, 0]).astype(np.float32)
    y = np.abs(x - [7, -300, 0])[..., :2].astype(np.float32)
    w = kvzap.mlp(x, y, 16, epochs=600, seed=0, progress=False)
    error = np.square(np.asarray(jax.vmap(predict)(w, x)) - y).mean(axis=1) / y.var(axis=1)
    assert error.max() < 0.05
    line = [predict(kvzap.ridge(a, b), a) for a, b in zip(x, y, strict=True)]
    assert (np.square(np.asarray(line) - y).mean(axis=1) / y.var(axis=1)).min() > 0.9


@pytest.mark.parametrize("config", [PLAIN, pytest.param(HYBRID, marks=pytest.mark.full)])
def test_a_surrogate_of_a_tiny_model(config, tmp_path):
    """Trained on random ids, saved, loaded and used; layers with a window have no part in it."""
    texts = list(random_ids(72, "train", rows=8))
    one = model(config)
    tables = kvzap.surrogate(one, texts, kind="linear", length=(24, 24), progress=False)
    weights = tables["scorer"]["weights"]
    assert weights["out"].shape == (config.layers, M, N)
    assert [bool(x.any()) for x in weights["out"]] == [k == 0 for k in config.pattern]
    save_tables(tmp_path / "a", tables, one)
    assert_same(load_tables(tmp_path / "a", one), tables)
    with pytest.raises(InputError, match="is of another model"):
        load_tables(tmp_path / "a", model(HYBRID if config == PLAIN else PLAIN))
    if config == PLAIN:
        found = kvzap.pieces(one, texts, 4, (24, 24), 0)
        assert kvzap.agreement(one, tables, found).mean() > 0.2  # of tokens it has seen
        return
    one = dataclasses.replace(one, tables={"kvzap": tables})
    cache = kvjax.prefill(one, random_ids(30, "use"), small("kvzap"), max_length=MAX)[1]
    assert int(cache.seen[0]) == 30


def test_targets_are_the_scores_of_kvzip_plus():
    """Learned from: what a condense with kvzip scores, as logarithms."""
    ids, one = random_ids(24, "target", rows=1), model()
    ((hidden, score),) = kvzap.scored(one, ids.tolist())
    assert hidden.shape == (LAYERS, 24, M) and score.shape == (LAYERS, N, 24)
    _, exact = kvjax.prefill(one, ids, max_length=24)
    recipe = kvjax.recipe("kvzip", plus=True, keep=0.5, sinks=0)
    seen = gather(one, exact, recipe, sizes.counts(recipe, [24]), ids, None)
    numbers = sizes.counts(recipe, [24]), sizes.wants(PLAIN, recipe, [24])
    keep = np.asarray(chosen(exact, seen, *numbers, PLAIN, recipe)[0][0])[:, 0]
    assert keep.sum() == keep.size / 2 and score[keep].min() >= score[~keep].max()
    assert np.exp(score).max() > 1000 * kvzap.FLOOR


@pytest.mark.parametrize("tables, words", [
    (random_tables(layers=3), r"\['scorer'\]\['weights'\]\['inner'\] has shape \(3, 32, 5\) and "
     "the model 2 layers"),
    (random_tables(width=9), r"the surrogate has .*'inner': \(9, 5\).* needs .*'inner': \(32, 5\)"
     ".*: train one"),
    (random_tables("linear", heads=3), r"'out': \(32, 3\).*needs {'out': \(32, 2\)"),
    ({}, "this recipe needs a surrogate of this model: train one with kvjax.train.kvzap"),
])  # fmt: skip
def test_a_surrogate_of_another_model_is_refused(tables, words):
    with pytest.raises(InputError, match=words):
        prefill(small("kvzap"), with_tables(tables))


def test_wrong_arguments():
    for options, words in (
        ({"kind": "mpl"}, "unknown kind 'mpl'; did you mean 'mlp'"),
        ({"tokens": 0}, "tokens is 0; give a whole number, 1 or more"),
        ({"alpha": -1.0}, "alpha is -1.0; give a finite number, 0 or more"),
        ({"texts": "text"}, "texts is a string; give a list of strings"),
        ({"texts": ["text"]}, "this model has no tokenizer: give texts as lists of ids"),
        ({"texts": [[1]]}, "the 1 texts have no piece of two tokens"),
        ({"length": (1, 1)}, r"length is \(1, 1\) and the context 4096"),
    ):
        with pytest.raises(InputError, match=words):
            kvzap.surrogate(model(), **({"texts": [[1, 2]]} | options))
    with pytest.raises(InputError, match="tau is inf; give a finite score"):
        small("kvzap", budget="threshold", tau=float("inf"))


def test_pieces():
    """Lengths within the range; a rest that is shorter is left out, a short text is whole."""
    found = kvzap.pieces(model(), [list(range(60)) * 4, [5] * 7], 99, (20, 30), 0)
    assert [len(x) for x in found][-1] == 7 and all(20 <= len(x) <= 30 for x in found[:-1])
    joined = [i for x in found[:-1] for i in x]
    assert joined == (list(range(60)) * 4)[: len(joined)] and len(joined) > 200
    few = kvzap.pieces(model(), [list(range(60)) * 4], 3, (20, 30), 0)
    assert len(few) == 3 and few[0][0] == 0
