"""Scorers fed by attention as tokens arrive: H2O and TOVA against their cards, in float64."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    HYBRID,
    LENGTHS,
    LONGEST,
    PLAIN,
    ROWS,
    generator,
    look,
    model,
    random_ids,
    run,
    small,
)
from evicting import Card, remembered
from hard import fast_compile, held  # noqa: F401
from holding import assert_same

import kvjax
from kvjax import scorers, struct
from kvjax.cache import slots
from kvjax.errors import InputError

NEAR = 2e-4  # float32 against float64, over tens of tokens; logits are of order 10
FULL = pytest.mark.full
BOTH = pytest.mark.parametrize("name", ["h2o", "tova"])
slower = pytest.mark.parametrize("name", ["h2o", pytest.param("tova", marks=FULL)])


def during(name, **options):
    sizes = {"stride": 4, "window": 4 if name == "h2o" else 1, "page": 4}
    return kvjax.recipe(name, when="during", **sizes | options)


TRACES = collections.Counter()


@functools.partial(jax.jit, donate_argnums=0)
def one(cache, token):
    """Reads a token [b 1] of a cache of PLAIN: its logits [b w], and the cache settled."""
    TRACES[cache.recipe] += 1
    logits, cache = kvjax.step(model(PLAIN).params, PLAIN, cache, token)
    return logits[:, 0], kvjax.compress(cache)


def agree(cache, logits, card):
    np.testing.assert_allclose(logits[0], card.expected, atol=NEAR)
    assert held(cache) == card.kept
    for layer, heads in enumerate(remembered(cache)):
        for n, stat in enumerate(heads):
            want = {p: card.stat[layer][n][p] for p in card.kept[layer][n]}
            assert stat == pytest.approx(want, abs=NEAR)


WAYS = [("h2o", 3, False), ("tova", 1, True)]
CARDS = [*WAYS, pytest.param("tova", 0, True, marks=FULL)]  # window 0: the newest competes


@pytest.mark.parametrize("name, window, last", CARDS)
def test_a_prompt_twelve_greedy_steps_and_a_second_turn(name, window, last):
    """What is kept, what is remembered of it and the logits are the card's, step by step.

    The prompt is one chunk: the card's dense prefill, then eviction to B = 12.
    """
    recipe, card = during(name, slots=12, window=window, stride=1), Card(12, window, last)
    whole, prompt = model(PLAIN), random_ids(15, "prompt", rows=1)
    logits, cache = kvjax.prefill(whole, prompt, recipe, max_length=64, chunk=16)
    card.expected = card.feed(prompt[0])
    agree(cache, logits, card)
    for turn in (12, 4):
        for _ in range(turn):
            token = int(np.argmax(card.expected))
            logits, cache = one(cache, jnp.full((1, 1), token, jnp.int32))
            card.expected = card.feed([token])
            agree(cache, logits, card)
        if turn == 12:
            more = random_ids(9, "more", rows=1)  # read in a chunk of 16, as the prompt
            logits, cache = kvjax.extend(whole, more, cache)
            card.expected = card.feed(more[0])
            agree(cache, logits, card)
    assert TRACES[cache.recipe] == 1


@pytest.mark.parametrize("name, window, last", WAYS)
def test_forty_tokens_one_at_a_time(name, window, last):
    """Stored is min(seen, 12), the next position is what was seen, and the logits are right."""
    recipe, card = during(name, slots=12, window=window, stride=1), Card(12, window, last)
    cache = kvjax.init_cache(PLAIN, recipe, 1, 64)
    for i, token in enumerate(generator("hard cases").integers(0, PLAIN.vocab, 40)):
        logits, cache = one(cache, jnp.full((1, 1), token, jnp.int32))
        card.expected = card.feed([int(token)])
        kept = held(cache)
        assert {len(a) for heads in kept for a in heads} == {min(i + 1, 12)}
        assert int(cache.seen[0]) == int(cache.clock[0]) == i + 1
    agree(cache, logits, card)
    if last:
        assert all(heads[0] == heads[1] for heads in kept)  # one set for a layer


@pytest.mark.parametrize("positions, block", [pytest.param("keep", 512, marks=FULL), ("read", 8)])
def test_sums_of_h2o_are_columns_of_the_attention(positions, block, monkeypatch):
    """While nothing is evicted, however the text is cut: and they add up to the queries, 25 and 18.

    To 1e-5 for each query: 25 sums of float32 softmax weights of a model of two layers.
    """
    monkeypatch.setattr(slots, "BLOCK", block)  # keys stored before RoPE are read block by block
    ids, recipe = random_ids(LONGEST, "columns"), during("h2o", keep=1.0, positions=positions)
    args = dict(max_length=48, lengths=LENGTHS, chunk=8, logits="none")
    cache = kvjax.prefill(model(PLAIN), ids, recipe, **args)[1]
    for row, length in enumerate(LENGTHS):
        card = Card(48, 4, False)
        card.feed(ids[row, :length])
        got = remembered(cache, row)
        for layer, head in np.ndindex(2, 2):
            assert got[layer][head] == pytest.approx(dict(card.stat[layer][head]), abs=NEAR)
            assert sum(got[layer][head].values()) == pytest.approx(length, abs=1e-5 * length)


@slower
def test_room_for_all_is_exact(name):
    """Budget >= length: the logits of no cache, in prefill, a second turn and single tokens.

    Within the tolerance of `test_lossless`: other blocks, hence other sums. In a hybrid.
    """
    whole, ids, then = model(HYBRID), random_ids(LONGEST, "exact"), random_ids(8, "then")
    texts = [[*ids[row, :n], *then[row]] for row, n in enumerate(LENGTHS)]
    texts = np.stack([np.pad(t, (0, LONGEST + 8 - len(t))) for t in texts]).astype(np.int32)
    want = np.asarray(look(whole.params, HYBRID, None, texts)[0])
    args = dict(max_length=48, lengths=LENGTHS, chunk=8)
    logits, cache = kvjax.prefill(whole, ids, during(name, keep=1.0), **args)
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 9)):
        right = [want[row, n + start - 1] for row, n in enumerate(LENGTHS)]
        np.testing.assert_allclose(logits, right, rtol=0, atol=1e-5 * np.abs(want).max())
        if start < 8:
            logits, cache = kvjax.extend(whole, then[:, start:stop], cache)


def filled(name, ids, lengths=LENGTHS):
    """A cache of 12 entries with texts, read in chunks of 8: one compilation for most tests."""
    recipe = during(name, slots=12, lookahead=2)
    return kvjax.prefill(model(), ids, recipe, max_length=48, lengths=lengths, chunk=8)


@slower
def test_decoding_on_the_device_is_step_by_step(name):
    """The nested scans give the tokens and the cache of single steps, from one trace; a row that
    stops remembers nothing more."""
    params, start, traces = model().params, jnp.array([5, 6]), []
    cache = filled(name, random_ids(LONGEST, "steps"))[1]

    def steps(end):
        token, now, done, out = start, cache, np.zeros(ROWS, bool), []
        for i in range(8):
            logits, new = look(params, PLAIN, now, token[:, None])
            now = run("append", now, new, (~done).astype(np.int32))
            now = run("compress", now) if i % 4 == 3 else now
            token = jnp.where(done, token, jnp.argmax(logits[:, 0], -1))
            out.append(np.where(done, -1, token))
            done = done | (np.asarray(token) == end)
        return np.stack(out, axis=1), now

    end = int(steps(-1)[0][1, 3])
    want, stepped = steps(end)

    @jax.jit
    def decode(cache, tokens):
        traces.append(1)
        return kvjax.decode(params, PLAIN, cache, tokens, jax.random.key(0), steps=8, stop=(end,))

    ids, made = decode(cache, start)
    decode(made, start)
    assert traces == [1] and ids.tolist() == want.tolist() and made.seen[1] <= 18 + 4
    for row in range(ROWS):
        assert held(made, row) == held(stepped, row)
        same_stat(made, stepped, row)


def same_stat(one, two, row, other=None):
    """Equal to 1e-4 of a query: the same sums in other blocks."""
    other = row if other is None else other
    for a, b in zip(remembered(one, row), remembered(two, other), strict=True):
        for x, y in zip(a, b, strict=True):
            assert x == pytest.approx(y, abs=1e-4)


@pytest.mark.parametrize("name, config", [("h2o", PLAIN), pytest.param("tova", HYBRID, marks=FULL)])
def test_a_row_is_the_same_alone(name, config):
    """Beside a longer row, padded, a text keeps and remembers what it does alone."""
    whole, ids = model(config), random_ids(LONGEST, "alone")
    args = dict(recipe=during(name, slots=12, lookahead=2), max_length=48, chunk=8)
    logits, cache = kvjax.prefill(whole, ids, lengths=LENGTHS, **args)
    for row, length in enumerate(LENGTHS):
        got, alone = kvjax.prefill(whole, ids[row : row + 1, :length], **args)
        np.testing.assert_allclose(got[0], logits[row], rtol=0, atol=1e-5 * np.abs(logits).max())
        assert held(alone) == held(cache, row)
        same_stat(alone, cache, 0, row)


@BOTH
def test_drafts_that_are_taken_back_leave_nothing(name):
    """A look of 1 + lookahead tokens keeps its queries apart: append takes the committed ones'."""
    params, cache = model().params, filled(name, random_ids(LONGEST, "drafts"))[1]
    draft, count = random_ids(3, "draft"), np.array([1, 2], np.int32)
    new = look(params, PLAIN, cache, draft, np.full(ROWS, 3, np.int32))[1]
    assert new.evidence[0]["here"].shape == (2, ROWS, 3, 2, 3)
    some = run("append", cache, new, count)
    wanted = run("append", cache, look(params, PLAIN, cache, draft, count)[1], count)
    for row in range(ROWS):
        same_stat(some, wanted, row)
        total = [sum(s.values()) for s in remembered(some, row)[0]]
        before = [sum(s.values()) for s in remembered(cache, row)[0]]
        gained = np.subtract(total, before) if name == "h2o" else total
        np.testing.assert_allclose(gained, count[row] if name == "h2o" else 1, atol=1e-4)
    assert_same(run("append", cache, new, np.zeros(ROWS, np.int32)), cache)


def test_others_carry_nothing_and_refuse_what_cannot_stream():
    """No leaf and no evidence without a scorer that streams; one sentence where it cannot."""
    cache = kvjax.init_cache(PLAIN, small("key_norm", when="during"), ROWS, 48)
    assert cache.groups[0].tail.stat is None and cache.groups[0].bodies[0].stat is None
    assert look(model(PLAIN).params, PLAIN, cache, random_ids(3, "few"))[1].evidence == ()
    for recipe, says in (
        (small("snapkv", when="during"), "use when='after'"),
        (during("h2o", reduce="max"), "reduce='max' cannot be added up"),
    ):
        with pytest.raises(InputError, match=says):
            kvjax.init_cache(PLAIN, recipe, 1, 48)


@struct.dataclass
class Arrival:
    """An observer: the sum of what enters a layer, once, when a token arrives."""

    def __call__(self, looked):
        score = looked.hidden.sum(axis=-1)[..., None]
        return {"here": jnp.broadcast_to(score, (*score.shape[:2], looked.k.shape[1]))}


@struct.dataclass
class AtArrival:
    decay = 1.0

    def streams(self):
        return Arrival()

    def __call__(self, seen):
        return seen.stat


def test_a_score_made_at_arrival_stays_with_its_token(monkeypatch):
    """As DMS and KVzap need it: nothing is read twice, and the best of the first layer stay."""
    monkeypatch.setitem(scorers.SCORERS, "accumulated", AtArrival)
    whole, ids = model(PLAIN), generator("arrival").permutation(PLAIN.vocab)[None, :30]
    recipe = during("h2o", slots=12, window=5)
    _, cache = kvjax.prefill(whole, ids, recipe, max_length=48, chunk=7, logits="none")
    x = np.asarray(whole.params.embed)[ids[0]]
    weight = np.asarray(whole.params.blocks.attn_norm[0])
    score = (x / np.sqrt((x * x).mean(-1, keepdims=True) + PLAIN.eps) * weight).sum(-1)
    best = sorted(np.argsort(-score[:25])[:7].tolist())
    for head, stat in zip(held(cache)[0], remembered(cache)[0], strict=True):
        assert head == [*best, *range(25, 30)]
        assert stat == pytest.approx({p: score[p] for p in head}, abs=1e-4)
