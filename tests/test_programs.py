"""kvjax inside other people's programs: their jit, vmap, scan, grad, mesh and serving loop."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CONFIG, HYBRID, KINDS, MAX, filled, one, prompts, reader, some, weights

import kvjax
from kvjax import api

PAGE = Path(__file__).parents[1] / "docs" / "programs.md"


def test_the_page_runs():
    """Every block of docs/programs.md, in order, as one program."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S):
        line = PAGE.read_text("utf-8")[: PAGE.read_text("utf-8").index(block)].count("\n")
        exec(compile("\n" * line + block, str(PAGE), "exec"), names)


@pytest.mark.parametrize(
    "kind",
    some(
        ("exact", "scored", "streaming", "pooled", "condensed int8"),
        ("int8", "condensed", "hybrid"),
    ),
)
def test_donation_is_full(kind):
    """A donated cache is updated in place: every byte aliased, every buffer consumed."""
    config = HYBRID if kind == "hybrid" else CONFIG
    make = dict(config=config, recipe=KINDS.get(kind, KINDS["int8"]), batch=2,
                max_length=MAX, length=32)  # fmt: skip
    cache, token, params = kvjax.init_cache(**make), np.zeros(2, np.int32), weights(config)
    step = jax.jit(functools.partial(one, config=config), donate_argnums=1)
    compiled = step.lower(params, cache, token).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == kvjax.nbytes(cache)
    _, after = compiled(params, cache, token)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    like = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert like(after) == like(kvjax.abstract_cache(**make))
    assert not after.flags.any()


@pytest.mark.parametrize("kind", ["streaming"])
def test_a_step_is_traced_once(kind):
    """Thirty steps, rows of unequal lengths and a reset: one trace."""
    traces = []

    def counted(params, cache, token):
        traces.append(1)
        return one(params, cache, token)

    step = jax.jit(counted, donate_argnums=1)
    token, cache = filled(KINDS[kind])
    for i in range(30):
        token, cache = step(weights(), cache, token)
        if i == 10:
            cache = kvjax.reset(cache, 1)
    assert len(traces) == 1 and step._cache_size() == 1
    assert not cache.flags.any() and cache.seen.tolist() == [50, 19]


@pytest.mark.parametrize("kind", some(["streaming"], ["exact", "condensed"]))
def test_prefill_compiles_once_whatever_the_prompt(kind):
    """After one prompt, others compile nothing (condensing: in its size class)."""
    compiled, listening = [], [True]

    def listen(event, seconds, **_):
        if listening[0] and event.endswith("backend_compile_duration"):
            compiled.append(event)

    model = kvjax.Model(weights(), CONFIG, None)
    before = api._read._cache_size()
    rows = 1 + list(KINDS).index(kind)  # a batch of its own: the exact reading is shared
    lengths = (103, 102, 101) if kind == "condensed" else (103, 9, 65, 64, 17)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length in lengths:
            tokens = np.arange(rows * length).reshape(rows, length) % 61
            kvjax.prefill(model, tokens, KINDS[kind], max_length=160, chunk=32)
            if length == lengths[0]:
                first = len(compiled)
    finally:
        listening[0] = False
    assert api._read._cache_size() == before + 1
    assert first > 0 and len(compiled) == first


@pytest.mark.parametrize("kind", some([], ["scored"]))
def test_vmap_over_seeds(kind):
    """Seeds over one cache equal each alone; and caches, stacked, go on as each alone."""
    token, cache = filled(KINDS[kind])
    go = functools.partial(kvjax.decode, weights(), CONFIG, steps=4, temperature=1.0)
    alone = jax.jit(lambda cache, token, key: go(cache, token, key))
    keys = jax.random.split(jax.random.key(7), 2)
    many, caches = jax.jit(jax.vmap(alone, in_axes=(None, None, 0)))(cache, token, keys)
    more, _ = jax.jit(jax.vmap(alone))(caches, many[..., -1], keys)
    for i, key in enumerate(keys):
        want, mine = alone(cache, token, key)
        assert (many[i] == want).all()
        assert (more[i] == alone(mine, want[:, -1], key)[0]).all()
    assert len({tuple(x) for x in np.asarray(many[:, 0]).tolist()}) > 1  # seeds do differ


@pytest.mark.parametrize("kind", some(["int8"], ["scored", "pooled"]))
def test_serving_equals_each_alone(kind):
    """Conversations that join and leave a batch at different times say what each says alone."""
    recipe = KINDS[kind]
    step = jax.jit(one)
    put, free = jax.jit(kvjax.insert), jax.jit(kvjax.reset)
    arrive = {0: (0, 20), 2: (1, 9), 5: (0, 13), 6: (1, 17)}  # at this step: row, prompt length

    def begin(when):
        """The first token and the cache of a conversation; one condensed if its recipe does."""
        _, length = arrive[when]
        tokens = jax.random.randint(jax.random.key(when), (1, 20), 0, 61)
        if recipe.when == "after":
            model = kvjax.Model(weights(), CONFIG, None)
            out, cache = kvjax.prefill(model, np.asarray(tokens), recipe, max_length=MAX)
            return jnp.argmax(out, -1), cache
        return reader(recipe)(weights(), tokens, jnp.array([length]))

    started = {when: begin(when) for when in arrive}
    template = jax.tree.map(lambda x: x, started[0][1])
    batch = kvjax.reset(kvjax.reset(kvjax.select(template, jnp.array([0, 0])), 0), 1)
    token, owner, said = jnp.zeros(2, jnp.int32), {}, {when: [] for when in arrive}
    for t in range(10):
        if t in arrive:
            row = arrive[t][0]
            first, cache = started[t]
            batch = put(free(batch, row), row, cache)
            token, owner[row] = token.at[row].set(first[0]), t
        token, batch = step(weights(), batch, token)
        for row, when in owner.items():
            said[when].append(int(token[row]))
    for when, heard in said.items():
        token, cache = started[when]
        for word in heard:
            token, cache = step(weights(), cache, token)
            assert word == int(token[0])
    assert not batch.flags.any()


def test_verification_appends_only_what_is_accepted():
    """Look at four drafts, append count[b]: the same cache as reading only those."""
    _, cache = filled(KINDS["int8"])
    drafts, count = prompts(2, 4), jnp.array([3, 1])
    look = jax.jit(functools.partial(kvjax.look, weights(), CONFIG))
    append, pick = jax.jit(kvjax.append), jax.jit(kvjax.select)
    mine = append(cache, look(cache, drafts)[1], count)
    ask = prompts(2, 1)
    got, _ = look(mine, ask)
    for row, n in enumerate([3, 1]):
        single = pick(cache, jnp.array([row]))
        _, only = look(single, drafts[row : row + 1, :n])
        want, _ = look(append(single, only), ask[row : row + 1])
        np.testing.assert_allclose(got[row], want[0], atol=1e-4)  # float32 sums in other blocks
    assert (mine.seen == cache.seen + count).all()


def test_embeddings_are_inputs():
    """Embeddings of ids give what the ids give, and have gradients."""
    _, cache = filled(KINDS["int8"])
    ids = prompts(2, 3)
    rows = weights().embed[ids]
    look = jax.jit(functools.partial(kvjax.look, weights(), CONFIG))
    np.testing.assert_allclose(look(cache, rows)[0], look(cache, ids)[0], atol=1e-5)
    gradient = jax.jit(jax.grad(lambda x: look(cache, x)[0].sum()))(rows)
    assert gradient.shape == rows.shape and bool((gradient != 0).all())


@pytest.mark.parametrize("kind", some(["exact"], ["condensed int8"]))
def test_training_through_a_cache(kind):
    """The gradient of split_floats' leaves equals a finite difference; join undoes it."""
    model = kvjax.Model(weights(), CONFIG, None)
    _, cache = kvjax.prefill(model, np.asarray(prompts(2)), KINDS[kind], max_length=MAX)
    floats, join = kvjax.split_floats(cache)
    for a, b in zip(jax.tree.leaves(join(floats)), jax.tree.leaves(cache), strict=True):
        assert a is b
    assert sum(x.size for x in floats) < sum(x.size for x in jax.tree.leaves(cache))
    ids = prompts(2, 2)
    value = jax.jit(lambda f: kvjax.look(weights(), CONFIG, join(f), ids)[0][..., :5].sum())
    slope = jax.jit(jax.grad(value))(floats)
    keys = jax.random.split(jax.random.key(5), len(floats))
    along = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, floats, strict=True)]
    want = sum(float((s * a).sum()) for s, a in zip(slope, along, strict=True))
    h = 1e-3
    ahead, behind = ([f + s * h * a for f, a in zip(floats, along, strict=True)] for s in (1, -1))
    got = float(value(ahead) - value(behind)) / (2 * h)
    assert want != 0 and abs(got - want) < 0.02 * abs(want) + 1e-2  # float32 differences at 1e-3


def test_training_without_a_cache():
    """Gradients of all weights are finite, and a step along them lowers the loss."""
    tokens = prompts(2)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        logits, _ = kvjax.look(params, CONFIG, None, tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -picked.mean()

    before, slope = loss(weights())
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(slope))
    after, _ = loss(jax.tree.map(lambda w, g: w - 1e-2 * g, weights(), slope))
    assert after < before
