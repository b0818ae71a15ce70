"""Hard case 4 of other projects: padding in a batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, generator, model
from hard import FIRST, RAW, Dense, fast_compile, held, longer, small  # noqa: F401

import kvjax

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
