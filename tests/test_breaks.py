"""Faults that a tester found once: each stays mended."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.config import LayerKind, ModelConfig
from kvjax.params import init_params

CONFIG = ModelConfig("llama", 60, 32, 48, 4, 2, 8, (LayerKind(),), (0, 0), 96)


def model(window=None):
    config = CONFIG
    if window:
        kinds = (LayerKind(window), LayerKind())
        config = dataclasses.replace(CONFIG, kinds=kinds, pattern=(0, 1))
    return kvjax.Model(init_params(config, jax.random.key(0), std=0.3), config, None)


def ids(seed, t, b=2):
    return np.asarray(jax.random.randint(jax.random.key(seed), (b, t), 0, 60))


def kept(cache):
    pos = np.asarray(cache.groups[-1].bodies[0].pos)
    return [sorted(row[row < 65535].tolist()) for row in pos.reshape(-1, pos[0, 0, 0].size)]


def test_evidence_does_not_depend_on_the_room_of_sliding_rings():
    """The window that SnapKV reads again is longer than the stride: rings must reach back."""
    m, tokens = model(window=24), ids(1, 90)
    made = []
    for stride in (8, 96):
        options = dict(keep=0.4, window=32, page=8, kernel=1, stride=stride)
        _, cache = kvjax.prefill(m, tokens, kvjax.recipe("snapkv", **options), max_length=96)
        made.append(kept(cache))
    assert made[0] == made[1]
    _, short = kvjax.prefill(m, tokens, kvjax.recipe("exact", stride=8), max_length=96)
    with pytest.raises(kvjax.InputError, match="window=32"):
        kvjax.condense(m, short, kvjax.recipe("snapkv", window=32), tokens=tokens)


def test_a_joined_cache_does_not_reach_back_past_what_its_pieces_forgot():
    m = model(window=4)
    recipe = kvjax.recipe("exact", stride=4)
    _, one = kvjax.prefill(m, ids(1, 10), recipe, max_length=48)
    _, two = kvjax.prefill(m, ids(2, 30), recipe, max_length=48)
    joined = kvjax.join(m, [one, kvjax.truncate(two, 28)])
    _, plain = kvjax.prefill(m, ids(2, 30)[:, :28], recipe, max_length=48)
    with pytest.raises(kvjax.InputError, match="forget"):
        kvjax.truncate(joined, 34)
    near = kvjax.truncate(joined, 36)
    want, _ = kvjax.extend(m, ids(3, 2), kvjax.truncate(kvjax.join(m, [one, plain]), 36))
    np.testing.assert_allclose(kvjax.extend(m, ids(3, 2), near)[0], want, atol=2e-4)


def test_truncate_and_reset_share_nothing_with_the_cache_given():
    m = model()
    _, cache = kvjax.prefill(m, ids(1, 20), max_length=40)
    for made in (kvjax.truncate(cache, 12), kvjax.reset(cache, 1)):
        kvjax.extend(m, ids(2, 3), made)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))


def test_ids_outside_the_vocabulary_are_refused_everywhere():
    m, tokens = model(), ids(1, 20)
    _, cache = kvjax.prefill(m, tokens, max_length=40)
    snap = kvjax.recipe("snapkv", window=4)
    for call in (
        lambda: kvjax.extend(m, tokens + 1000, cache),
        lambda: kvjax.extend(m, tokens - 1000, cache),
        lambda: kvjax.prefill(m, tokens.astype(np.int64) + 2**32, max_length=40),
        lambda: kvjax.edit(m, cache, (1, 2), tokens[:, :2] + 999),
        lambda: kvjax.condense(m, cache, snap, tokens=tokens + 999),
        lambda: kvjax.condense(m, cache, snap, question=tokens + 999),
        lambda: kvjax.generate(m, [[99], [1]], cache=cache, max_new_tokens=2),
    ):
        with pytest.raises(kvjax.InputError, match="vocabulary has 60"):
            call()


def test_wrong_arguments_get_one_sentence():
    m, tokens = model(), ids(1, 20)
    _, cache = kvjax.prefill(m, tokens, max_length=90)
    for call in (
        lambda: kvjax.prefill(m, tokens, max_length=40, chunk=-1),
        lambda: kvjax.prefill(m, [[1, 2], [3]], max_length=40),
        lambda: kvjax.prefill(m, tokens, max_length=40, lengths=[2.7, 3.2]),
        lambda: kvjax.generate(m, [1.5, 2.5]),
        lambda: kvjax.generate(m, "text without a tokenizer"),
        lambda: kvjax.generate(m, [1, 2], temperature=float("nan")),
        lambda: kvjax.generate(m, [1, 2], temperature=float("inf")),
        lambda: kvjax.generate(m, [[1], [2]], cache=kvjax.fork(cache), max_new_tokens=80),
        lambda: kvjax.join(m, [cache] * 5),
        lambda: kvjax.truncate(cache, [5, 6, 7]),
        lambda: kvjax.truncate(cache, 5.5),
        lambda: kvjax.edit(m, cache, (1, 2), tokens[:, :2].T[:, :1].repeat(3, 0)),
        lambda: kvjax.select(cache, jnp.array([5])),
        lambda: kvjax.insert(cache, 7, kvjax.select(cache, jnp.array([0]))),
        lambda: kvjax.reset(cache, 9),
        lambda: kvjax.init_cache(CONFIG, kvjax.recipe("exact"), 0, 10),
        lambda: kvjax.decode(m.params, CONFIG, cache, jnp.ones(2, int), jax.random.key(0), steps=0),
    ):
        with pytest.raises(kvjax.InputError) as error:
            call()
        assert "\n" not in str(error.value)
    assert kvjax.generate(m, [jnp.array([1, 2, 3])], max_new_tokens=2).tokens


@pytest.mark.parametrize(
    "name, option",
    [
        ("snapkv", dict(kernel=0)), ("snapkv", dict(kernel="x")), ("snapkv", dict(kernel=[3])),
        ("snapkv", dict(kernel=2.5)), ("snapkv", dict(reduce="foo")), ("snapkv", dict(pool="min")),
        ("ada_snapkv", dict(alpha="x")), ("ada_snapkv", dict(alpha=2.0)),
        ("snapkv", dict(keep=True)),
        ("snapkv", dict(codec=3)), ("snapkv", dict(codec=())), ("snapkv", dict(codec=("int8",))),
        ("snapkv", dict(codec=("int8", 3))), ("key_norm", dict(fold=3)), ("snapkv", dict(name="x")),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_when_the_recipe_is_made(name, option):
    with pytest.raises(kvjax.InputError):
        kvjax.recipe(name, **option)


def test_a_deletion_may_not_empty_a_row():
    m = model()
    _, cache = kvjax.prefill(m, ids(1, 5), max_length=20, lengths=[5, 3])
    with pytest.raises(kvjax.InputError, match="without tokens"):
        kvjax.edit(m, cache, (0, 3), np.zeros((2, 0), int))
