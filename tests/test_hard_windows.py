"""Hard cases of sliding windows: layers that see a window, before and after those that see all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, generator, model
from hard import NAMES, RAW, Dense, fast_compile, held, longer, small  # noqa: F401

import kvjax
from kvjax.config import LayerKind
from kvjax.errors import InputError

# --- case 4: TransformerLens#1005, transformers#30670: a short prompt in a batch ---

LENGTHS, STEPS, SLOTS = (3, 7, 10), 12, 6

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
