"""Hard cases 4 and 5 of other projects: padding in a batch, and length read from a window layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, generator, model
from hard import FIRST, NAMES, Dense, fast_compile, held, longer, small  # noqa: F401
from test_hard_cases import RAW

import kvjax
from kvjax.config import LayerKind
from kvjax.errors import InputError

# --- case 4: TransformerLens#1005, transformers#30670: a short prompt in a batch ---

LENGTHS, STEPS, SLOTS = (3, 7, 10), 12, 6
ROWS = [generator("row", n).permutation(PLAIN.vocab)[:n] for n in LENGTHS]
PAD = int(ROWS[1][2])  # an id that the texts use


def left():
    """Left padded, with a mask."""
    tokens = np.full((3, 10), PAD)
    for i, row in enumerate(ROWS):
        tokens[i, 10 - len(row) :] = row
    return tokens, dict(mask=np.arange(10) >= 10 - np.array(LENGTHS)[:, None])


def right():
    """Right padded, with lengths."""
    tokens = np.full((3, 10), PAD)
    for i, row in enumerate(ROWS):
        tokens[i, : len(row)] = row
    return tokens, dict(lengths=np.array(LENGTHS))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def greedy(params, config, cache, logits, used):
    """The next STEPS tokens [b steps], the logits that gave each, and the cache.

    The best id that is not in used [b w], nor given before: an id read twice has two keys of one
    norm, and rounding would choose between them.
    """

    def one(carry, _):
        cache, logits, used = carry
        token = jnp.argmax(jnp.where(used, -jnp.inf, logits), axis=-1).astype(jnp.int32)
        after, cache = kvjax.step(params, config, cache, token[:, None])
        used |= jnp.arange(config.vocab) == token[:, None]
        return (kvjax.compress(cache), after[:, 0], used), (token, logits)

    (cache, *_), (tokens, seen) = jax.lax.scan(one, (cache, logits, used), None, length=STEPS)
    return tokens.T, jnp.swapaxes(seen, 0, 1), cache


def answer(rows, tokens, recipe, **padding):
    """What was kept [row] after the prompt, its logits, then tokens and logits of the answer."""
    made = model(PLAIN)
    logits, cache = kvjax.prefill(made, tokens, recipe, max_length=32, logits="all", **padding)
    lengths = np.asarray(cache.seen)
    kept = [held(cache, row) for row in range(len(tokens))]
    last = jnp.stack([logits[i, n - 1] for i, n in enumerate(lengths)])
    used = np.stack([np.isin(np.arange(PLAIN.vocab), row) for row in rows])
    out, steps, cache = greedy(made.params, PLAIN, cache, last, used)
    assert np.asarray(cache.seen).tolist() == (lengths + STEPS).tolist()
    return kept, np.asarray(logits), np.asarray(out), np.asarray(steps)


@pytest.mark.parametrize(
    "name, when, positions", longer([v for v in FIRST if v[1] == "during"], "exact", "int8")
)
def test_a_batch_answers_as_each_row_alone(name, when, positions):
    recipe = small(name, when=when, positions=positions, slots=SLOTS, sinks=1, window=2, stride=4,
                   page=4)  # fmt: skip
    batches = [answer(ROWS, tokens, recipe, **padding) for tokens, padding in (left(), right())]
    alone = [answer([row], row[None], recipe) for row in ROWS]
    for kept, logits, out, steps in batches:
        for i, (row, one) in enumerate(zip(ROWS, alone, strict=True)):
            count = min(SLOTS, len(row)) if recipe.choice is not None else len(row)
            for heads in kept[i]:
                assert sum(map(len, heads)) == count * len(heads)
                assert all(0 <= p < len(row) for arrivals in heads for p in arrivals)
                assert all(len(set(arrivals)) == len(arrivals) for arrivals in heads)
            assert kept[i] == one[0][0]
            assert out[i].tolist() == one[2][0].tolist()
            np.testing.assert_allclose(logits[i, : len(row)], one[1][0], atol=1e-4)
            np.testing.assert_allclose(steps[i], one[3][0], atol=1e-4)
    np.testing.assert_array_equal(batches[0][2], batches[1][2])


@pytest.mark.parametrize(
    "name, when, positions",
    longer([v for v in FIRST if v[1] == "after" and v[0] != "int8"], "streaming_llm", "key_norm"),
)
def test_condensed_rows_answer_as_the_dense_reference(name, when, positions):
    """Each row alone in float64: its prompt seen whole, then what is kept and all that follows."""
    recipe = small(name, when=when, positions=positions, slots=SLOTS, sinks=1, window=2, stride=4,
                   page=4)  # fmt: skip
    kept, logits, out, steps = answer(ROWS, left()[0], recipe, **left()[1])
    _, cache = kvjax.prefill(model(PLAIN), ROWS[1][None], recipe, max_length=32, logits="none")
    assert kept[1] == held(cache)  # the row in the middle alone: each length compiles anew
    for i, row in enumerate(ROWS):
        assert _counts(recipe, kept[i], min(SLOTS, len(row)))
        for heads in kept[i]:
            assert all(0 <= p < len(row) for arrivals in heads for p in arrivals)
        dense = Dense(model(PLAIN).params, PLAIN)
        whole = np.stack([dense.read(token) for token in row])
        np.testing.assert_allclose(logits[i, : len(row)], whole, atol=RAW)
        expected = whole[-1]
        for j in range(STEPS):
            np.testing.assert_allclose(steps[i, j], expected, atol=RAW)
            fresh = np.where(
                np.isin(np.arange(PLAIN.vocab), [*row, *out[i, :j]]), -np.inf, expected
            )
            assert out[i, j] == np.argmax(fresh)
            later = list(range(len(row), len(row) + j))
            see = [[arrivals + later for arrivals in heads] for heads in kept[i]]
            expected = dense.read(out[i, j], see)


def _counts(recipe, layers, count, length=None):
    """Whether [layer][head] lists hold `count` entries a head: in a layer, or in the whole model.

    A budget of the whole model rounds half of all its entries, not of a head's.
    """
    sizes = [sum(map(len, heads)) for heads in layers]
    heads = len(layers[0])
    if recipe.choice.budget.name not in ("model", "pyramid"):
        return sizes == [count * heads] * len(layers)
    whole = recipe.choice.budget.name == "model" and length is not None
    total = round(0.5 * length * heads * len(layers)) if whole else count * heads * len(layers)
    return sum(sizes) == total


@pytest.mark.parametrize("name", longer([v[0] for v in FIRST if v[1] == "after"]))
def test_a_ratio_is_of_the_real_length(name):
    """Half of 3, 7 and 10 tokens (round half to even): 2, 4 and 5, whatever the padding."""
    recipe = small(name, when="after", positions="keep", keep=0.5, window=1, sinks=0, page=4)
    if recipe.choice is None or recipe.window < 0:
        pytest.skip("has no ratio, or its window takes the rest of the longest text")
    tokens, padding = left()
    _, cache = kvjax.prefill(model(PLAIN), tokens, recipe, max_length=32, logits="none", **padding)
    for row, (length, count) in enumerate(((3, 2), (7, 4), (10, 5))):
        assert _counts(recipe, held(cache, row), count, length)


def test_generate_takes_prompts_of_unequal_length():
    """The same tokens as each prompt alone, through the public loop, which pads with id 0."""
    prompts = [[0, 5, 0], [0, 9, 4, 0, 7, 7, 0], [3, 1, 4, 1, 5, 9, 2, 6, 0, 0]]
    together = kvjax.generate(model(PLAIN), prompts, max_new_tokens=STEPS, stop=())
    for prompt, tokens in zip(prompts, together.tokens, strict=True):
        dense = Dense(model(PLAIN).params, PLAIN)
        for token in prompt:
            logits = dense.read(token)
        for token in tokens:
            assert token == np.argmax(logits)
            logits = dense.read(token)
        assert len(tokens) == STEPS


# --- case 5: transformers PR#38156, a length read from layer 0, which is a window layer ---

WINDOW = 4
KINDS = (LayerKind(WINDOW), LayerKind())
ORDERS = {"window first": (0, 1), "full first": (1, 0)}
TEXT = generator("hybrid").integers(0, PLAIN.vocab, 24)


@functools.cache
def hybrid(order):
    config = dataclasses.replace(PLAIN, kinds=KINDS, pattern=order)
    return dataclasses.replace(model(PLAIN), config=config)


@functools.cache
def dense_logits(order, length=20):
    dense = Dense(hybrid(order).params, hybrid(order).config)
    return np.stack([dense.read(token) for token in TEXT[:length]])


@functools.partial(jax.jit, static_argnames="config")
def _append(params, config, cache, tokens):
    logits, cache = kvjax.step(params, config, cache, tokens)
    return logits, kvjax.compress(cache)


@functools.partial(jax.jit, static_argnames="config")
def _look(params, config, cache, tokens):
    return kvjax.look(params, config, cache, tokens)


def fill(made, recipe, length, path):
    """Logits [t w] of the first tokens of TEXT, and the cache, by one way of feeding them."""
    if path == "append":
        cache, out = kvjax.init_cache(made.config, recipe, 1, 32), []
        for token in TEXT[:length]:
            logits, cache = _append(made.params, made.config, cache, jnp.full((1, 1), token))
            out.append(np.asarray(logits[0, 0]))
        return np.stack(out), cache
    chunk = dict(whole=16, chunks=3)[path]
    logits, cache = kvjax.prefill(made, TEXT[None, :length], recipe, max_length=32, chunk=chunk,
                                  logits="all")  # fmt: skip
    return np.asarray(logits[0]), cache


@pytest.mark.parametrize("path", longer(["whole", "chunks", "append"], "whole"))
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_window_and_full_layers_in_either_order(order, path):
    """Length and next position are of the model; each layer shows what it should, and no more."""
    made, expected = hybrid(order), dense_logits(order)
    recipe = kvjax.recipe("exact", stride=1)
    for length in (3, 4, 5, 10):  # about the edge of the window, and well beyond
        logits, cache = fill(made, recipe, length, path)
        assert int(cache.seen[0]) == int(cache.clock[0]) == length
        np.testing.assert_allclose(logits, expected[:length], atol=RAW)
        after, _ = _look(made.params, made.config, cache, TEXT[None, length : length + 1])
        np.testing.assert_allclose(after[0, 0], expected[length], atol=RAW)
    uncached, _ = _look(made.params, made.config, None, TEXT[None, :10])
    np.testing.assert_allclose(uncached[0], expected[:10], atol=RAW)


@functools.partial(jax.jit, static_argnames="config")
def _touched(params, config, cache, tokens):
    """Size of the gradient of the last logits into each cached value, per group [l c]."""

    def last(values):
        groups = tuple(
            g.replace(tail=g.tail.replace(v=v)) for g, v in zip(cache.groups, values, strict=True)
        )
        logits, _ = kvjax.look(params, config, cache.replace(groups=groups), tokens)
        return jnp.sum(logits[:, -1] ** 2)

    grads = jax.grad(last)([g.tail.v for g in cache.groups])
    return [jnp.abs(g).sum(axis=(1, 2, 4)) for g in grads]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_each_layer_sees_exactly_its_positions(order):
    """The window counts the query: query 9 sees 6..9, query 4 sees 1..4, query 3 all of 0..3."""
    made = hybrid(order)
    for query, first in ((3, 0), (4, 1), (5, 2), (9, 6)):
        _, cache = fill(made, kvjax.recipe("exact", stride=1), query, "append")
        touched = _touched(made.params, made.config, cache, TEXT[None, query : query + 1])
        for group, size in zip(cache.groups, touched, strict=True):
            low = first if group.window else 0
            slots = {p % group.tail.capacity for p in range(low, query)}  # itself is not cached yet
            assert set(np.flatnonzero(np.asarray(size)[0]).tolist()) == slots
            assert held(cache)[group.start][0] == list(range(low, query))


def test_one_window_layer_alone_sees_its_window():
    """Without a cache: the gradient of query 9 reaches the embeddings of 6..9 and no others."""
    config = dataclasses.replace(PLAIN, kinds=KINDS, pattern=(0,))
    params = model(PLAIN).params
    params = params.replace(blocks=jax.tree.map(lambda w: w[:1], params.blocks))
    x = params.embed[TEXT[:10]][None]
    grad = jax.grad(lambda x: jnp.sum(kvjax.look(params, config, None, x)[0][:, -1] ** 2))(x)
    assert np.flatnonzero(np.abs(grad[0]).sum(-1)).tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_truncation_reaches_as_far_as_the_ring(order):
    """The window's ring of 8 slots holds 12..19 after 20 tokens: 16 can be reached, 14 cannot."""
    made, expected = hybrid(order), dense_logits(order)
    recipe = kvjax.recipe("exact", stride=1, lookahead=3)
    _, cache = fill(made, recipe, 20, "append")
    back = kvjax.truncate(cache, 16)
    assert int(back.seen[0]) == int(back.clock[0]) == 16
    for p in range(16, 20):  # read again, over the slots that were given up
        logits, back = _append(made.params, made.config, back, TEXT[None, p : p + 1])
        np.testing.assert_allclose(logits[0, 0], expected[p], atol=RAW)
    with pytest.raises(InputError, match="forget"):
        kvjax.truncate(cache, 14)
    _, short = fill(made, recipe, 5, "append")  # the ring has not wrapped: anything can be undone
    logits, _ = _append(made.params, made.config, kvjax.truncate(short, 1), TEXT[None, 1:2])
    np.testing.assert_allclose(logits[0, 0], expected[1], atol=RAW)


@pytest.mark.parametrize("name", longer(NAMES, "exact", "key_norm", "ada_snapkv"))
def test_every_recipe_on_a_window_layer_first(name):
    """Room for all: the logits of a run without cache. int8: within its own error."""
    made, expected = hybrid((0, 1)), dense_logits((0, 1))
    recipe = small(name, keep=1.0, slots=32, window=6, stride=2, page=4, positions="keep")
    _, cache = kvjax.prefill(made, TEXT[None, :15], recipe, max_length=32, logits="none")
    assert int(cache.seen[0]) == int(cache.clock[0]) == 15
    assert held(cache) == [[[12, 13, 14]] * 2, [list(range(15))] * 2]
    for p in range(15, 20):
        logits, cache = _append(made.params, made.config, cache, TEXT[None, p : p + 1])
        raw = recipe.store is None or recipe.store.k.name == "raw"
        np.testing.assert_allclose(logits[0, 0], expected[p], atol=RAW if raw else 0.5)
    assert int(cache.seen[0]) == 20


def test_a_window_longer_than_the_cache_is_a_plain_tail():
    """Window 16 in a cache of 10: nothing is forgotten, and an eleventh token overflows."""
    config = dataclasses.replace(PLAIN, kinds=(LayerKind(16),))
    params = model(config).params
    ids = jnp.asarray(generator(3).integers(0, config.vocab, (1, 11)), jnp.int32)
    want, _ = kvjax.look(params, config, None, ids[:, :10])
    step = jax.jit(lambda cache, t: kvjax.step(params, config, cache, t))
    cache, got = kvjax.init_cache(config, kvjax.CacheRecipe(), 1, 10), []
    for i in range(10):
        logits, cache = step(cache, ids[:, i : i + 1])
        got.append(logits)
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), want, atol=1e-3)
    assert cache.flags.tolist() == [0]
    full = step(cache, ids[:, 10:])[1]
    assert full.flags.tolist() == [kvjax.OVERFLOW] and full.seen.tolist() == [10]
