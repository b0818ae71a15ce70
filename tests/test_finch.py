"""Finch: chunks read with the question, what it looks at kept, closed up and numbered anew."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HYBRID, PLAIN, generator, look, model
from float64 import dense, rope
from holding import assert_same

import kvjax
from kvjax import finch
from kvjax.cache import positions
from kvjax.cache.slots import unpack_pos
from kvjax.config import Rope
from kvjax.layers import rms_norm
from kvjax.model import observe
from kvjax.scorers.question_attention import QuestionMass

CONFIG = dataclasses.replace(PLAIN, context=64)
TEXT = generator("finch").integers(0, PLAIN.vocab, (2, 90)).astype(np.int32)
QUESTION = generator("finch question").integers(0, PLAIN.vocab, (2, 5)).astype(np.int32)
CHUNK, ROOM = 16, 120


def made():
    return kvjax.Model(model(PLAIN).params, CONFIG, None)


def recipe(**options):
    return kvjax.recipe("finch", **(dict(chunk=CHUNK, page=8, slots=14) | options))


@functools.cache
def read(t, lengths, made_with):
    args = dict(question=QUESTION, max_length=ROOM, lengths=lengths)
    return kvjax.prefill(made(), TEXT[:, :t], made_with, **args)


def answer(cache):
    """Logits [b q w] of the question after the cache."""
    return np.asarray(look(made().params, CONFIG, cache, QUESTION)[0])


def held(cache, row):
    """Arrivals in the body, [l n k], of one row: the same number in every head."""
    pos = np.asarray(unpack_pos(cache.groups[0].bodies[0].pos))[:, row]
    return np.array([[sorted(h[h >= 0].tolist()) for h in layer.reshape(2, -1)] for layer in pos])


class Reference:
    """The card's steps for one row in float64: keys are kept as they are before RoPE."""

    def __init__(self):
        self.c = config = CONFIG
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), made().params)
        n, d = config.kv_heads, config.head_dim
        self.k = [np.zeros((n, 0, d)) for _ in range(config.layers)]
        self.v = [np.zeros((n, 0, d)) for _ in range(config.layers)]
        self.at = [np.zeros((n, 0), int) for _ in range(config.layers)]  # arrivals

    def norm(self, x, g):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.eps) * g

    def read(self, tokens):
        """Logits [t w]; of each layer keys, values and weights [h t s], what is held first."""
        c, w = self.c, self.w
        x, keys, values, weights = w.embed[tokens], [], [], []
        for i in range(c.layers):
            b = jax.tree.map(lambda a, i=i: a[i], w.blocks)
            y = self.norm(x, b.attn_norm)
            q = np.einsum("tm,hdm->htd", y, b.q)
            k = np.concatenate([self.k[i], np.einsum("tm,ndm->ntd", y, b.k)], 1)
            v = np.concatenate([self.v[i], np.einsum("tm,ndm->ntd", y, b.v)], 1)
            t, s = len(tokens), k.shape[1]
            see = np.arange(s) <= (s - t + np.arange(t))[:, None]
            base, out, rows = c.kinds[0].rope.base, [], []
            for h in range(c.heads):
                head = h * c.kv_heads // c.heads
                key = rope(k[head], np.arange(s), base)
                query = rope(q[h], s - t + np.arange(t), base)
                out.append(dense(query, key, v[head], see, c.scale)[0])
                score = np.where(see, query @ key.T * c.scale, -np.inf)
                rows.append(np.exp(score - score.max(1, keepdims=True)))
                rows[-1] /= rows[-1].sum(1, keepdims=True)
            x = x + np.einsum("htd,mhd->tm", np.stack(out), b.o)
            y = self.norm(x, b.mlp_norm)
            gate = y @ b.gate.T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ b.up.T)) @ b.down.T
            keys, values, weights = [*keys, k], [*values, v], [*weights, np.stack(rows)]
        return self.norm(x, w.norm) @ w.embed.T, keys, values, weights

    def chunk(self, tokens, first, question, keep, normalise=True, share="layer", window=0):
        logits, self.k, self.v, _ = self.read(tokens)
        new = np.tile(first + np.arange(len(tokens)), (self.c.kv_heads, 1))
        self.at = [np.concatenate([a, new], 1) for a in self.at]
        weights = self.read(question)[3]
        for i, rows in enumerate(weights):
            s, q = self.k[i].shape[1], len(question)
            if normalise:
                rows = rows * ((s + 1 + np.arange(q)) / (s + q))[None, :, None]
            score = rows.sum(1)[:, :s].reshape(self.c.kv_heads, -1, s).sum(1)
            score = np.tile(score.sum(0), (len(score), 1)) if share == "layer" else score
            score[:, s - window :] = np.inf
            best = np.sort(np.argsort(-score, axis=1, kind="stable")[:, :keep], axis=1)
            for store in (self.k, self.v):
                store[i] = np.take_along_axis(store[i], best[..., None], 1)
            self.at[i] = np.take_along_axis(self.at[i], best, 1)
        return logits


def reference(row, length, made_with, **how):
    """The reference after a text, and the logits of its last chunk."""
    ref, logits = Reference(), None
    for i, keep in enumerate(finch.kept(made_with, length, CHUNK)):
        piece = TEXT[row, i * CHUNK : min((i + 1) * CHUNK, length)]
        logits = ref.chunk(piece, i * CHUNK, QUESTION[row], keep, **how)
    return ref, logits


OTHER = dict(normalise=False, share="head", window=3)


@pytest.mark.parametrize("options, how", [({}, {}), (OTHER | dict(count="paper"), OTHER)])
def test_against_the_steps_in_float64(options, how):
    """Two rows of unequal length, 90 tokens in a model with a context of 64: the same tokens are
    kept in every layer and head, and the logits of chunk and question agree."""
    with_ = recipe(**options)
    logits, cache = read(90, (90, 61), with_)
    got = answer(cache)
    for row, length in enumerate((90, 61)):
        ref, last = reference(row, length, with_, **how)
        count = finch.kept(with_, length, CHUNK)[-1]
        assert cache.clock[row] == count == ref.at[0].shape[1]
        np.testing.assert_array_equal(
            held(cache, row), np.stack(ref.at)[..., : count - with_.window]
        )
        np.testing.assert_allclose(logits[row], last[-1], atol=2e-4)  # logits of order 10, float32
        np.testing.assert_allclose(got[row], ref.read(QUESTION[row])[0], atol=2e-4)
    assert cache.seen.tolist() == [90, 61] and cache.recipe.name == "finch"
    alike = [np.array_equal(*layer) for row in (0, 1) for layer in held(cache, row)]
    assert all(alike) == (not options), "one set for all heads of a layer"


def test_one_compilation_for_all_chunks_and_lengths():
    """What is kept does not depend on the length, so neither do the shapes: cost is linear."""
    read(90, (90, 61), recipe())
    before = finch._chunk._cache_size()
    read(70, (70, 33), recipe())
    read(40, (40, 40), recipe())
    assert finch._chunk._cache_size() == before


def test_room_for_all_is_exact():
    """What the whole text fits into, the question after it included: the exact cache's logits."""
    logits, cache = read(40, (40, 27), recipe(slots=64))
    want, exact = kvjax.prefill(made(), TEXT[:, :40], max_length=ROOM, lengths=(40, 27))
    np.testing.assert_allclose(logits, want, atol=2e-4)
    np.testing.assert_allclose(answer(cache), answer(exact), atol=2e-4)
    assert cache.clock.tolist() == [40, 27]


@pytest.mark.full
def test_one_chunk_is_kvpress_s_one_pass():
    """A chunk that holds all is an exact reading, then one choice: what `condense` does."""
    with_ = recipe(chunk=48)
    _, exact = kvjax.prefill(made(), TEXT[:, :40], max_length=ROOM, lengths=(40, 27))
    want = kvjax.condense(made(), exact, with_, question=QUESTION)
    _, got = read(40, (40, 27), with_)
    np.testing.assert_array_equal(held(got, 0), held(want, 0))
    np.testing.assert_allclose(answer(got), answer(want), atol=2e-4)
    assert got.clock.tolist() == want.clock.tolist() == [14, 14]


def test_counts():
    """The card's: T 4096, target 1096 with a question of 96, so cf 5; chunks of 512 add 102."""
    paper = kvjax.recipe("finch", slots=1000, count="paper")
    assert finch.kept(paper, 4096, 512).tolist() == [102 * i for i in range(1, 9)]
    assert finch.kept(kvjax.recipe("finch", slots=1000), 4096, 512).tolist() == [
        125, 250, 375, 500, 625, 750, 875, 1000,
    ]  # fmt: skip
    assert finch.kept(paper, 900, 512).tolist() == [512, 900]  # it fits: nothing is dropped
    for keep in (0.01, 0.3, 0.77, 1.0):
        for length in (1, 5, 511, 513, 2000):
            steps = finch.kept(kvjax.recipe("finch", keep=keep), length, 512)
            assert steps[-1] == max(round(keep * length), 1)
            sizes = np.diff([0, *np.minimum(512 * np.arange(1, len(steps) + 1), length)])
            assert (np.diff([0, *steps]) <= sizes).all()  # never more than there are


def test_a_key_is_turned_once():
    """After six chunks: keys of layer 0, which depend on their token alone, are those before RoPE
    turned by their rank, to the last bits of float32."""
    cache = read(90, (90, 61), recipe())[1]
    block = jax.tree.map(lambda x: x[0], made().params.blocks)
    x = jnp.take(made().params.embed, TEXT[0], axis=0)
    raw = jnp.einsum("tm,ndm->ntd", rms_norm(x, block.attn_norm, CONFIG.eps, CONFIG.style), block.k)
    want = positions.turn(raw[:, held(cache, 0)[0, 0]], jnp.arange(14), Rope())
    got = cache.groups[0].bodies[0].codes[0][0, 0].reshape(2, -1, 16)[:, :14]
    np.testing.assert_allclose(got, want, atol=4e-6)


def test_rerot():
    """R(j - p) RoPE(k, p) is RoPE(k, j); two moves are one. Angles of up to 900 in float32."""
    rng = generator("rerot")
    k, p, j = rng.normal(size=(9, 16)), rng.integers(0, 900, 9), rng.integers(0, 900, 9)
    start = jnp.asarray(rope(k, p, 10_000.0), jnp.float32)
    once = positions.move(start, jnp.asarray(j - p), Rope())
    np.testing.assert_allclose(once, rope(k, j, 10_000.0), atol=2e-4)
    twice = positions.move(
        positions.move(start, jnp.asarray(7 - p), Rope()), jnp.asarray(j - 7), Rope()
    )
    np.testing.assert_allclose(twice, once, atol=2e-4)


def test_normalised_rows():
    """Rows sum to 1; normalised to what they see over what there is: 41 .. 45 of 45."""
    exact = kvjax.init_cache(CONFIG, kvjax.recipe("exact"), 2, 48)
    exact = exact.replace(seen=jnp.full((2,), 40), clock=jnp.full((2,), 40))  # of zeros
    seen = observe(
        made().params, CONFIG, exact, jnp.asarray(QUESTION), QuestionMass(), logits="none"
    )
    sums = np.asarray(seen[1].evidence[0]["sums"])  # [l b h s]
    np.testing.assert_allclose(sums.sum(-1), (41 + 42 + 43 + 44 + 45) / 45, rtol=1e-5)


@pytest.mark.full
def test_a_recent_window_and_a_codec():
    """The newest four of each row stay exact, the rest is coded, later tokens follow in a body of
    their own; room for all, so the logits are the exact ones within the error of int8."""
    _, cache = read(40, (40, 27), recipe(slots=64, window=4, codec="int8"))
    assert cache.edge.tolist() == [36, 23] and cache.seen.tolist() == [40, 27]
    _, exact = kvjax.prefill(made(), TEXT[:, :40], max_length=ROOM, lengths=(40, 27))
    more = lambda c: kvjax.extend(made(), TEXT[:, 40:55], c)[1]  # noqa: E731
    cache, exact = more(kvjax.fork(cache)), more(exact)
    np.testing.assert_allclose(answer(cache), answer(exact), atol=0.5)


def test_the_cache_is_like_any_other(tmp_path):
    """Smaller than an exact one, saved and read back, and generated from past the context of 64."""
    _, cache = read(90, (90, 61), recipe())
    exact = kvjax.init_cache(PLAIN, kvjax.recipe("exact"), 2, ROOM)
    assert kvjax.nbytes(cache) < 0.8 * kvjax.nbytes(exact)  # a tail for 59 later tokens is in it
    kvjax.save_cache(tmp_path / "c", cache, made())
    assert_same(kvjax.load_cache(tmp_path / "c", made()), cache)
    tokens = kvjax.generate(made(), list(QUESTION), cache=kvjax.fork(cache), max_new_tokens=3,
                            stop=()).tokens  # fmt: skip
    assert [t[0] for t in tokens] == answer(cache)[:, -1].argmax(-1).tolist()


@pytest.mark.parametrize(
    "options, args, said",
    [
        ({}, dict(question=None), "pass question="),
        (dict(positions="keep"), {}, "positions='rerot'"),
        (dict(slots=60), {}, "74 in all, and the model's context is 64"),
        ({}, dict(question=QUESTION[:1]), "2 rows and the question has 1"),
        ({}, dict(max_length=50), "90 tokens and max_length is 50"),
        (dict(share="heads"), {}, "did you mean 'head'"),
        ({}, dict(logits="hidden"), "'last', 'all' or 'none'"),
    ],
)
def test_what_cannot_work_is_refused(options, args, said):
    with pytest.raises(kvjax.InputError, match=said):
        kvjax.prefill(made(), TEXT, recipe(**options),
                      **(dict(question=QUESTION, max_length=ROOM) | args))  # fmt: skip


def test_sliding_windows_are_refused():
    with pytest.raises(kvjax.InputError, match="sliding-window"):
        kvjax.prefill(model(HYBRID), TEXT, recipe(), question=QUESTION, max_length=ROOM)


def test_condense_needs_the_question_or_a_window():
    _, exact = kvjax.prefill(made(), TEXT[:, :40], max_length=48)
    with pytest.raises(kvjax.InputError, match="pass question="):
        kvjax.condense(made(), exact, recipe(), tokens=TEXT[:, :40])
