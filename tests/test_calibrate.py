"""Labels of heads: what reading random blocks and samples finds, on circuits made by hand too."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HYBRID, model, random_ids
from float64 import dense

import kvjax
from kvjax import calibrate
from kvjax.attention import Query
from kvjax.config import LayerKind, ModelConfig, Rope, Style
from kvjax.evidence import Looked
from kvjax.params import abstract_params

WORDS, D = 32, 64
CIRCUIT = ModelConfig(  # of 32 rotary pairs the first are fast, the last 16 stand still
    "llama", vocab=WORDS, width=1 + 2 * WORDS, mlp=4, heads=4, kv_heads=2, head_dim=D,
    kinds=(LayerKind(rope=Rope(base=1e12)),), pattern=(0, 0), context=512,
    style=Style(query_scale=1.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def circuit():
    """An induction circuit by hand. The residual is [one, token, token before].

    Layer 0: kv head 0 looks at the token before and writes it; kv head 1 looks at itself.
    Layer 1: kv head 0 looks for its token among "token before"; kv head 1 for its token.
    The second query head of each kv head asks for nothing: the maximum over both is the label.
    """
    zero = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), abstract_params(CIRCUIT))
    blocks = zero.blocks.replace(attn_norm=zero.blocks.attn_norm + 1)
    fast, still = np.arange(4), np.concatenate([np.arange(16, 32), 32 + np.arange(16, 32)])
    turn = 1e12 ** (-fast / 32)
    token, before = 1 + np.arange(WORDS), 1 + WORDS + np.arange(WORDS)
    for layer, head in ((0, 0), (0, 1)):  # by position
        back = 1 - head
        blocks.k[layer, head, fast, 0] = 1.0
        blocks.q[layer, 2 * head, fast, 0] = 30 * np.cos(back * turn)
        blocks.q[layer, 2 * head, 32 + fast, 0] = -30 * np.sin(back * turn)
    blocks.v[0, 0, np.arange(WORDS), token] = 1.0
    blocks.o[0, before, 0, np.arange(WORDS)] = 1.0
    for head, what in ((0, before), (1, token)):  # by content
        blocks.k[1, head, still, what] = 1.0
        blocks.q[1, 2 * head, still, token] = 30.0
    embed = np.zeros((WORDS, CIRCUIT.width), np.float32)
    embed[:, 0], embed[np.arange(WORDS), token] = 1.0, 1.0
    params = jax.tree.map(jnp.asarray, zero.replace(embed=embed, blocks=blocks, norm=zero.norm + 1))
    return kvjax.Model(params, CIRCUIT, tokenizer=None)


def test_an_induction_circuit_is_labelled(circuit):
    """The head that looks for what followed is the best by induction, the one that looks for the
    same token the best by echo; the local heads of the first layer are neither."""
    found = calibrate.razor(circuit, block=20, induction=0.25, echo=0.0)
    assert found.heads == [(1, 0)] and found.scores["induction"][1, 0] > 0.4
    assert calibrate.razor(circuit, block=20, induction=0.0, echo=0.25).heads == [(1, 1)]
    both = calibrate.razor(circuit, block=20, induction=0.25, echo=0.25)
    assert both.heads == [(1, 0), (1, 1)]
    for name in ("induction", "echo"):
        assert found.scores[name][0].max() < 0.1
    on = both.on(circuit, "razor").tables["razor"]["scorer"]["label"]
    assert np.asarray(on).tolist() == [[0, 0], [1, 1]]


def test_shares_and_ties():
    """ceil(share * heads) are labelled, and of equal scores the first."""
    scores = np.array([[0.5, 0.5, 0.1], [0.5, 0.9, 0.0]])
    assert calibrate.best(scores, 0.5).tolist() == [[1, 1, 0], [0, 1, 0]]
    many = [int(calibrate.best(scores, x).sum()) for x in (0.0, 0.01, 1 / 6, 0.17, 1.0)]
    assert many == [0, 1, 1, 2, 6]


def test_scores_are_those_of_dense_attention():
    """In two chunks the observer gathers what float64 softmax rows have at i - K and i - K + 1."""
    rng, block, first, t, h, n, d = np.random.default_rng(4), 5, 1, 21, 4, 2, 8
    q, k = (rng.normal(size=(1, x, t, d)).astype(np.float32) for x in (h, n))
    see, scale = np.tril(np.ones((t, t), bool)), 0.5
    rows, lse = [], []
    for head in range(h):
        p, l1 = dense(q[0, head], k[0, head // 2], np.eye(t), see, scale)  # values: which key
        rows.append(p)
        lse.append(l1)
    lse = np.stack(lse, 1)[None].astype(np.float32)
    watch, seen = calibrate.Copying(block, first), None
    for start, stop in ((0, 8), (8, 21)):
        pos = jnp.arange(start, stop)[None]
        held = jnp.asarray(np.where(np.arange(t)[:, None] < start, k, 0))
        query = Query(jnp.asarray(np.swapaxes(q[:, :, start:stop], 1, 2)), pos, scale)
        slot = jnp.where(jnp.arange(t) < start, jnp.arange(t), -1)[None]
        here, total = jnp.asarray(k[:, :, start:stop]), jnp.asarray(lse[:, start:stop])
        now = watch(Looked(query, query.q, held, held, slot, here, total, jnp.zeros((1, t, 2))))
        seen = now if seen is None else watch.merge(seen, now)
    asked = range(first + block, t)
    for name, back in (("echo", block), ("induction", block - 1)):
        want = [sum(p[i, i - back] for i in asked) for p in rows]
        np.testing.assert_allclose(seen[name][0], want, rtol=1e-5)


def test_windows_are_not_labelled():
    """Sliding-window layers have no scores, no labels, and no share of the heads."""
    found = calibrate.razor(model(HYBRID), block=7, induction=0.5, echo=0.0)
    assert found.label.sum(axis=1).tolist() == [0, 1]
    for scores in found.scores.values():
        assert (scores[0] == 0).all() and (scores[1] > 0).all()
    ids, first = calibrate.copies(model(HYBRID), 7, 0)
    assert first == 0 and np.array_equal(ids, np.tile(ids[:, :7], 4))


def test_kvzip_labels():
    """Zero keys: every query shares its attention evenly, the first one among 4 sinks, 20 tokens
    and itself. With real keys labels are those of the texts, and of two texts the larger."""
    ids, flat = random_ids(24, "sample"), model()
    blocks = flat.params.blocks.replace(k=jnp.zeros_like(flat.params.blocks.k))
    flat = dataclasses.replace(flat, params=flat.params.replace(blocks=blocks))
    label = calibrate.kvzip_heads(flat, ids[:1]).label
    np.testing.assert_allclose(label, np.full((2, 2), 1 / 25), rtol=1e-6)
    one, two, both = (calibrate.kvzip_heads(model(), x).label for x in (ids[:1], ids[1:], ids))
    assert np.array_equal(both, np.maximum(one, two)) and (one != two).any()


def test_what_is_refused():
    """One sentence for what cannot work."""
    for text, ask in (
        ("use block=1023", lambda: calibrate.razor(model(), block=2000)),
        ("texts", lambda: calibrate.kvzip_heads(model(), "one text")),
        ("after the first 4", lambda: calibrate.kvzip_heads(model(), random_ids(3))),
        ("no tokenizer", lambda: calibrate.kvzip_heads(model())),
    ):
        with pytest.raises(kvjax.InputError, match=text):
            ask()


@pytest.mark.full
def test_smollm2_has_retrieval_heads(capsys):
    """The real model: 14 of its 90 heads at most are labelled, none in the first layer; it copies,
    so its best head puts more than half of its attention on what followed."""
    whole, start = kvjax.load(), time.perf_counter()
    found = calibrate.razor(whole, block=200)
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n{seconds:.1f} s", found.heads, {k: x.max() for k, x in found.scores.items()})
    assert 13 <= len(found.heads) <= 14 and found.scores["induction"].max() > 0.5
    assert all(layer > 0 for layer, _ in found.heads)
