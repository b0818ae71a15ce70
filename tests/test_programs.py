"""kvjax inside other people's programs: their jit, vmap, scan, grad, mesh and serving loop."""

import dataclasses
import functools
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import kvjax
from kvjax import api, sharding
from kvjax.config import LayerKind, ModelConfig
from kvjax.params import abstract_params, init_params

PAGE = Path(__file__).parents[1] / "docs" / "programs.md"
CONFIG = ModelConfig(
    "llama", vocab=61, width=32, mlp=32, heads=8, kv_heads=4, head_dim=16,
    kinds=(LayerKind(),), pattern=(0, 0), context=4096,
)  # fmt: skip
HYBRID = dataclasses.replace(CONFIG, kinds=(LayerKind(), LayerKind(window=6)), pattern=(0, 1))
ODD = ModelConfig(
    "llama", vocab=61, width=32, mlp=32, heads=6, kv_heads=3, head_dim=16,
    kinds=(LayerKind(),), pattern=(0, 0), context=4096,
)  # fmt: skip
SMALL = dict(window=4, stride=4, lookahead=3, page=8)
KINDS = {  # a recipe of every kind of memory
    "exact": kvjax.recipe("exact", stride=4, lookahead=3),
    "int8": kvjax.recipe("int8", **SMALL),
    "scored": kvjax.recipe("key_norm", when="during", **SMALL),
    "streaming": kvjax.recipe("streaming_llm", stride=4, lookahead=3),
    "condensed": kvjax.recipe("snapkv", **SMALL),
    "pooled": kvjax.recipe("ada_snapkv", **SMALL),
    "condensed int8": kvjax.recipe("snapkv", codec="int8", **SMALL),
}
MAX = 64


def some(default, more):
    """Kinds of the default suite, and those left to `pytest -m full`."""
    return [*default, *(pytest.param(kind, marks=pytest.mark.full) for kind in more)]


@functools.cache
def weights(config=CONFIG):
    return init_params(config, jax.random.key(0), std=0.3)


def prompts(batch, length=20):
    return jax.random.randint(jax.random.key(1), (batch, length), 0, 61)


@functools.cache
def reader(recipe, config=CONFIG):
    """A compiled reading of prompts (int[b t], right padded) into a new cache."""

    @jax.jit
    def read(params, tokens, count):
        cache = kvjax.init_cache(config, recipe, tokens.shape[0], MAX)
        logits, new = kvjax.look(params, config, cache, tokens, count=count, logits="last")
        return jnp.argmax(logits, -1), kvjax.absorb_long(cache, new, count)

    return read


def filled(recipe, batch=2, config=CONFIG):
    counts = jnp.array([20, 13, 7, 16][:batch])
    return reader(recipe, config)(weights(config), prompts(batch), counts)


def one(params, cache, token, config=CONFIG):
    logits, cache = kvjax.step(params, config, cache, token[:, None])
    return jnp.argmax(logits[:, -1], -1), kvjax.compress(cache)


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


def mesh_of(*shape):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("kind", some(["int8"], ["scored", "pooled"]))
def test_sharded_equals_unsharded(kind):
    """Over 2 x 4 devices: equal tokens and leaves within 1e-5, and each leaf stays where it was."""
    recipe, mesh = KINDS[kind], mesh_of(2, 4)
    model = kvjax.Model(weights(), CONFIG, None)
    _, cache = kvjax.prefill(model, np.asarray(prompts(2)), recipe, max_length=MAX)
    go = jax.jit(functools.partial(kvjax.decode, config=CONFIG, steps=8))
    call = lambda w, c: go(w, cache=c, tokens=prompts(2)[:, 0], key=jax.random.key(0))  # noqa: E731
    want, plain = call(weights(), cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a pool has one row and is replicated
        specs = kvjax.cache_specs(cache, mesh)
    with jax.set_mesh(mesh):
        placed = sharding.place(cache, specs, mesh)
        params = sharding.place(weights(), sharding.param_specs(weights(), mesh), mesh)
        got, after = call(params, placed)
    assert (got == want).all()
    assert placed.groups[0].tail.k.addressable_shards[0].data.shape[1:3] == (1, 1)
    for a, b, c in zip(*map(jax.tree.leaves, (after, plain, placed)), strict=True):
        assert a.sharding.is_equivalent_to(c.sharding, a.ndim)
        if jnp.issubdtype(a.dtype, jnp.integer):  # codes may round the other way
            assert np.abs(np.asarray(a, np.int32) - np.asarray(b, np.int32)).max() <= 1
        else:
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_heads_that_do_not_divide_are_replicated_with_one_warning():
    cache = kvjax.abstract_cache(ODD, KINDS["int8"], 2, MAX)
    with pytest.warns(UserWarning, match="3 do not divide the mesh axis 'model' of 4") as record:
        specs = kvjax.cache_specs(cache, mesh_of(2, 4))
    assert len(record) == 1
    assert all("model" not in spec for spec in jax.tree.leaves(specs))
    assert specs.groups[0].tail.k[1] == "data"


def test_a_nan_in_one_head_flags_its_row_on_all_shards():
    _, cache = filled(KINDS["exact"])
    _, new = kvjax.look(weights(), CONFIG, cache, prompts(2, 1))
    new = new.replace(k=new.k.at[0, 1, 0, 3, 0].set(jnp.nan))
    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):
        placed = sharding.place(cache, kvjax.cache_specs(cache, mesh), mesh)
        flags = jax.jit(kvjax.append)(placed, new).flags
    for shard in flags.addressable_shards:
        assert (np.asarray(shard.data) == np.array([0, kvjax.NAN])[shard.index]).all()


@pytest.mark.parametrize("kind", ["condensed int8"])
def test_compiled_ahead_of_time_from_shapes_alone(kind):
    """abstract_cache and cache_specs lower and compile; the result runs on a real cache."""
    mesh = mesh_of(2, 4)

    def shapes(tree, specs):
        place = functools.partial(jax.sharding.NamedSharding, mesh)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(s)), tree, specs
        )

    cache, params = kvjax.abstract_cache(CONFIG, KINDS[kind], 2, MAX), abstract_params(CONFIG)
    specs = kvjax.cache_specs(cache, mesh), sharding.param_specs(params, mesh)
    rows = jax.sharding.NamedSharding(mesh, specs[0].seen)
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(one, donate_argnums=1)
            .lower(
                shapes(params, specs[1]), shapes(cache, specs[0]),
                jax.ShapeDtypeStruct((2,), jnp.int32, sharding=rows),
            )
            .compile()
        )  # fmt: skip
        real = kvjax.init_cache(CONFIG, KINDS[kind], 2, MAX)
        placed = sharding.place(real, specs[0], mesh)
        params = sharding.place(weights(), specs[1], mesh)
        _, after = compiled(params, placed, jax.device_put(jnp.zeros(2, jnp.int32), rows))
    assert after.seen.tolist() == [1, 1] and not after.flags.any()
