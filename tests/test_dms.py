"""DMS: the gate, what streams, and what condense prunes."""

import dataclasses
import functools

import hard
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HYBRID, MAX, PLAIN, model, random_ids, random_tokens
from gating import LAYERS, N, gate_of, gated
from hard import Dense, fast_compile, held  # noqa: F401
from jax.sharding import AxisType

import kvjax
from kvjax import budgets, sharding
from kvjax.cache.cache import TRIMMED
from kvjax.config import LayerKind, Spec
from kvjax.errors import InputError
from kvjax.train import dms  # pyright: ignore[reportMissingImports]

W, T = 4, 24
NEAR = 2e-4  # float32 against float64 over tens of tokens; logits are of order 10
ALL = dict(stride=1, lookahead=3, window=W, page=4, keep=1.0)


@functools.partial(jax.jit, donate_argnums=0)
def one(cache, token, tables):
    """Reads a token [b 1] of a cache of PLAIN: its logits [b w], and the cache settled."""
    logits, cache = kvjax.step(model().params, PLAIN, cache, token, tables=tables)
    return logits[:, 0], kvjax.compress(cache, tables=tables)


@functools.partial(jax.jit, static_argnums=(2, 3))
def masked(gate, ids, window, config=PLAIN):
    """Logits [b t w] with the training mask, hard and without noise, and how much is closed."""
    return dms.masked(model().params, config, ids, gate, dms.Masked(window, 0.0))


def stream(recipe, ids, bias=None):
    """Logits [t w] of one row, token by token, and the cache."""
    cache, out = kvjax.init_cache(PLAIN, recipe, 1, MAX), []
    for token in ids[0]:
        logits, cache = one(cache, jnp.full((1, 1), token), {"scorer": gate_of(bias)})
        out.append(np.asarray(logits[0]))
    return np.stack(out), cache


class Card(Dense):
    """The float64 decoder over its full history, with the mask of the card: token j is seen at
    distance up to W, and further on unless token j + 1 has said to drop it."""

    def __init__(self):
        super().__init__(model().params, PLAIN)
        self.bits = [[[] for _ in range(N)] for _ in range(LAYERS)]
        self.gate = {k: np.asarray(x, np.float64) for k, x in gate_of().items()}

    def feed(self, token, monkeypatch):
        """Logits of the next token."""
        now, states, norm = len(self.k[0]), [], hard.norm
        stays = lambda bits: [p for p in range(now) if now - p <= W or not bits[p]]  # noqa: E731
        with monkeypatch.context() as m:
            m.setattr(hard, "norm", lambda *a: states.append(norm(*a)) or states[-1])
            out = self.read(token, [[stays(bits) for bits in heads] for heads in self.bits])
        for i, heads in enumerate(self.bits):
            y = states[2 * i] / np.sqrt(np.mean(states[2 * i] ** 2) + 1e-6) * self.gate["norm"][i]
            said = 100 * (y @ self.gate["weight"][i] + self.gate["bias"][i]) - 5
            for n, bits in enumerate(heads):
                bits += [said[n] > 0] if now else []
        return out

    def held(self):
        """Arrivals that a cache still has once it has settled."""
        now = len(self.k[0])
        stays = lambda bits: [p for p in range(now) if now - p <= W or not bits[p]]  # noqa: E731
        return [[stays(bits) for bits in heads] for heads in self.bits]


def test_streaming_is_masked_attention_over_the_full_history(monkeypatch):
    """Step by step in float64: logits, and who is held in each head; with no slot to spare too. The
    training mask without noise gives the same logits."""
    ids = random_ids(T, "dms", rows=1)
    cache, card = kvjax.init_cache(PLAIN, kvjax.recipe("dms", **ALL), 1, MAX), Card()
    want = []
    for token in ids[0]:
        logits, cache = one(cache, jnp.full((1, 1), token), {"scorer": gate_of()})
        want.append(card.feed(int(token), monkeypatch))
        np.testing.assert_allclose(logits[0], want[-1], atol=NEAR)
        assert held(cache) == card.held()
    bits = np.array([x[: T - W - 1] for heads in card.bits for x in heads])
    assert 0.2 < bits.mean() < 0.8 and len(set(bits.sum(axis=1))) > 1
    assert not np.asarray(cache.flags).any()
    got, closed = masked(gate_of(), ids, W)
    np.testing.assert_allclose(got[0], want, atol=NEAR)
    assert float(closed) == pytest.approx(np.array(card.bits).mean(), abs=1e-6)
    used = max(len(x) for heads in card.held() for x in heads)
    again, tight = stream(kvjax.recipe("dms", **ALL | {"slots": used}), ids)
    np.testing.assert_allclose(again, want, atol=NEAR)
    assert held(tight) == card.held() and not np.asarray(tight.flags).any()


def test_bits_of_zero_and_of_one():
    """All open: the model itself. All shut: a sliding window of W and the token itself."""
    ids = random_ids(T, "dms", rows=1)
    out, cache = stream(kvjax.recipe("dms", **ALL), ids, bias=-1.0)
    exact = kvjax.look(model().params, PLAIN, None, jnp.asarray(ids))[0]
    np.testing.assert_allclose(out, exact[0], atol=NEAR)
    assert held(cache) == [[list(range(T))] * N] * LAYERS
    out, cache = stream(kvjax.recipe("dms", **ALL), ids, bias=1.0)
    config = dataclasses.replace(PLAIN, kinds=(LayerKind(window=W + 1),))
    near = kvjax.look(model().params, config, None, jnp.asarray(ids))[0]
    np.testing.assert_allclose(out, near[0], atol=NEAR)
    assert held(cache) == [[list(range(T - W, T))] * N] * LAYERS
    for bias, want in ((-1.0, exact), (1.0, near)):
        got, closed = masked(gate_of(bias), ids, W)
        np.testing.assert_allclose(got, want, atol=NEAR)
        assert float(closed) == (bias > 0)


def test_a_prompt_then_a_token_is_the_longer_prompt():
    """Read one by one; and chunks of 8 leave the same in the first layer, whose hidden states
    attention has not touched: rows of two lengths, of which the pieces are padded."""
    ids = random_ids(T, "dms")
    read = functools.partial(kvjax.prefill, gated(), max_length=MAX)
    recipe = kvjax.recipe("dms", **ALL, chunk=1)
    _, cache = read(ids[:, :-1], recipe)
    got, cache = kvjax.extend(gated(), ids[:, -1:], cache)
    want, other = read(ids, recipe)
    np.testing.assert_allclose(got, want, atol=NEAR)
    assert [held(cache, r) for r in (0, 1)] == [held(other, r) for r in (0, 1)]
    _, wide = read(ids, recipe, chunk=8, lengths=[T, 19])
    assert held(wide)[0] == held(other)[0]
    assert held(wide, 1)[0] == held(read(ids[:, :19], recipe)[1], 1)[0]


def first_scores(ids):
    """Scores [n t] of the first layer, float64, 0 where there is none yet."""
    card = Dense(model().params, PLAIN)
    gate = {k: np.asarray(x, np.float64)[0] for k, x in gate_of().items()}
    out = np.zeros((N, len(ids)))
    for i, token in enumerate(ids[1:]):
        y = hard.norm(card.w.embed[token], card.w.blocks.attn_norm[0], PLAIN.eps)
        y = y / np.sqrt(np.mean(y * y) + 1e-6) * gate["norm"]
        out[:, i] = -(100 * (y @ gate["weight"] + gate["bias"]) - 5)
    return out


def test_without_room_the_lowest_scores_go_and_the_row_says_so():
    """The first layer, in one chunk: the best 3 of what is open and has left the window."""
    ids = random_ids(T, "dms", rows=1)
    recipe = kvjax.recipe("dms", **ALL | {"slots": W + 3}, chunk=T)
    _, cache = kvjax.prefill(gated(), ids, recipe, max_length=MAX)
    scores = first_scores(ids[0])[:, : T - W].round(6)
    want = [
        sorted(sorted((p for p in range(T - W) if s[p] >= 0), key=lambda p: (-s[p], p))[:3])
        for s in scores
    ]
    assert [x[: len(x) - W] for x in held(cache)[0]] == want
    assert np.asarray(cache.flags).tolist() == [TRIMMED]
    _, slow = stream(recipe, ids)  # one by one: a better one overwrites the worst
    assert held(slow)[0] == held(cache)[0] and np.asarray(slow.flags).tolist() == [TRIMMED]
    _, cache = kvjax.prefill(gated(), ids, kvjax.recipe("dms", **ALL, chunk=T), max_length=MAX)
    assert np.asarray(cache.flags).tolist() == [0]


@pytest.mark.parametrize("room", ["model", "head"])
def test_after_an_exact_prefill_bits_prune_once(room):
    """As in kvpress: dense prefill, then every open entry stays, and the window; read in chunks."""
    ids = random_ids(T, "dms", rows=1)
    recipe = kvjax.recipe("dms", **ALL, when="after", room=room)
    out, cache = kvjax.prefill(gated(), ids, recipe, max_length=MAX, chunk=10)
    exact = kvjax.prefill(model(), ids, kvjax.recipe("exact"), max_length=MAX, chunk=10)[0]
    np.testing.assert_allclose(out, exact, atol=1e-5)
    scores = first_scores(ids[0])
    want = [[p for p in range(T) if s[p] >= 0 or p >= T - W] for s in scores]
    assert held(cache)[0] == want
    assert (cache.pool is not None) == (room == "model")


@jax.jit
def grown(cache, tokens, looked, kept):
    """The cache with the first `kept` of tokens [b 3], of which `looked` were read."""
    tables, count = {"scorer": gate_of()}, jnp.full(2, looked)
    _, new = kvjax.look(model().params, PLAIN, cache, tokens, count=count, tables=tables)
    return kvjax.append(cache, new, jnp.full(2, kept))


def test_tokens_that_are_taken_back_leave_no_bit():
    """Drafts of 3 of which one is kept, appended or truncated, and then others: as if they had
    never been. Scores to 1e-4 of order 100: the old is subtracted and the new added."""
    ids, other = (jnp.asarray(random_ids(t, "draft", t)) for t in (10, 3))
    _, start = kvjax.prefill(gated(), ids[:, :6], kvjax.recipe("dms", **ALL), max_length=MAX)
    draft = jnp.concatenate([ids[:, 6:7], other[:, :2]], axis=1)
    caches = (
        grown(start, ids[:, 6:9], 1, 1),
        grown(start, draft, 3, 1),
        kvjax.truncate(grown(start, draft, 3, 3), 7),
    )
    stats = []
    for cache in caches:
        tail = grown(cache, ids[:, 7:10], 2, 2).groups[0].tail
        stats.append(np.asarray(tail.stat)[..., np.arange(5, 8) % tail.capacity])
    assert np.abs(stats[0]).min() > 1
    for stat in stats[1:]:
        np.testing.assert_allclose(stat, stats[0], atol=1e-4)


def test_threshold_with_room_in_each_head():
    """Two layers, two heads, two entries a head: by hand."""
    budget = budgets.build(Spec("threshold", (("room", "head"), ("tau", 0.0))))
    scores = jnp.asarray(
        [[[[3.0, 1, 2, -1], [-1, -2, -3, -4]]], [[[0.0, -1, 5, -9], [1, 1, 1, 1]]]]
    )
    pos = jnp.broadcast_to(jnp.arange(4), scores.shape)
    valid, none = jnp.ones(scores.shape, bool), jnp.zeros(scores.shape, bool)
    keep = budget(scores, valid, none, pos, jnp.array([2]))
    want = [[[[1, 0, 1, 0], [0, 0, 0, 0]]], [[[1, 0, 1, 0], [1, 1, 0, 0]]]]
    assert np.asarray(keep).astype(int).tolist() == want
    for count, over in ((2, True), (3, True), (4, False)):
        assert np.asarray(budget.over(scores, valid, none, pos, jnp.array([count]))) == [over]
        both = [budget.over(*(x[i] for x in (scores, valid, none, pos)), jnp.array([count]))
                for i in (0, 1)]  # fmt: skip
        assert [bool(x[0]) for x in both] == [count < 3, over]
    assert budget.streams and not budget.pooled and budgets.build(Spec("threshold")).pooled


@pytest.mark.parametrize("head", [0, 1])
def test_a_head_without_room_is_flagged_on_every_device(head):
    """Of row 1, one head keeps all that comes, which is too much; the device of the other knows."""
    devices, auto = jax.devices()[:4], (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto, devices=devices)
    cache = kvjax.init_cache(PLAIN, kvjax.recipe("dms", **ALL | {"slots": W + 2}), 2, MAX)
    here = jnp.full((LAYERS, 2, 12, N), -1.0).at[:, 1, :, head].set(1.0)
    new = random_tokens(12, "mesh").replace(evidence=({"here": here},))
    spread = sharding.place(cache, sharding.cache_specs(cache, mesh), mesh)
    with jax.set_mesh(mesh):
        got = jax.jit(kvjax.absorb_long)(spread, new, jnp.full(2, 12))
    shards = got.flags.addressable_shards
    flags = [(x.index[0].start or 0, np.asarray(x.data).tolist()) for x in shards]
    assert sorted(flags) == [(0, [0]), (0, [0]), (1, [TRIMMED]), (1, [TRIMMED])]
    recent = list(range(8, 12))
    want = [[0, 1, *recent] if n == head else recent for n in range(N)]
    assert held(got, 1) == [want] * LAYERS and held(got) == [[recent] * N] * LAYERS


def test_layers_with_a_window_of_their_own_have_no_part():
    """The rest all open: the model itself, streaming and in training."""
    ids, gate = random_ids(T, "dms", rows=1), gate_of(-1.0)
    one_ = dms.put(model(HYBRID), {"scorer": gate})
    want = jax.jit(kvjax.look, static_argnums=1)(one_.params, HYBRID, None, jnp.asarray(ids))[0]
    got, cache = kvjax.prefill(one_, ids, kvjax.recipe("dms", **ALL, chunk=8), max_length=MAX)
    np.testing.assert_allclose(got, want[:, -1], atol=NEAR)
    assert not np.asarray(cache.flags).any()
    run = jax.jit(lambda ids: dms.masked(one_.params, HYBRID, ids, gate, dms.Masked(W, 0.0)))
    np.testing.assert_allclose(run(ids)[0], want, atol=NEAR)


def test_what_cannot_work_is_refused():
    ids = random_ids(8, "dms")
    bare = dataclasses.replace(model(), tables={})
    wide = dms.put(model(), {"scorer": {**gate_of(), "weight": jnp.zeros((LAYERS, 9, N))}})
    read = lambda one_, **o: kvjax.prefill(  # noqa: E731
        one_, ids, kvjax.recipe("dms", **ALL | o), max_length=MAX
    )
    for run, words in (
        (lambda: read(bare), "needs gates of this model: train one with kvjax.train.dms.gates"),
        (lambda: read(wide), "maps 9 numbers to 2 kv heads and this model has 32 and 2"),
        (lambda: read(gated(), window=0), "window must be from 1"),
        (lambda: read(gated(), positions="read"), "heads differ: use positions='keep'"),
        (lambda: read(gated(), room="model"), "is dealt by condensing: use when='after'"),
        (lambda: kvjax.recipe("dms", room="row"), "unknown value of room 'row'"),
        (lambda: dms.gates(model(), ids, window=0), "window and ratio must be from 1, got 0"),
        (lambda: dms.gates(model(), ids, window=8), "of 8 tokens never leave the window of 8"),
        (lambda: dms.gates(model(), ids, window=2, batch=3), "batch is 3 of 2 texts"),
    ):
        with pytest.raises(InputError, match=words):
            run()
