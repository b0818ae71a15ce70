"""A saved cache is the same cache: bits, tree, what it answers, on any mesh; others are refused."""

import dataclasses
import errno
import functools
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import kvjax
from kvjax import api, checkpoint, codecs, leaf_file, sharding, struct
from kvjax.cache import init
from kvjax.cache.recipes import RECIPES, recipe
from kvjax.checkpoint import load_cache, save_cache, structure
from kvjax.config import CacheRecipe, LayerKind, ModelConfig, Store
from kvjax.decode import step
from kvjax.errors import InputError
from kvjax.params import abstract_params

LENGTH, SEEN = 96, (72, 55)
CONFIG = ModelConfig(
    "llama", vocab=32, width=16, mlp=16, heads=8, kv_heads=4, head_dim=8,
    kinds=(LayerKind(), LayerKind(window=16)), pattern=(0, 0, 1), context=256,
)  # fmt: skip
FULL = dataclasses.replace(CONFIG, kinds=(LayerKind(),), pattern=(0, 0))


@functools.cache
def model(seed=0, config=CONFIG):
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), abstract_params(config)
    )
    return api.Model(params, config, None)


def filled(made: CacheRecipe, config=CONFIG):
    """A cache of two rows, in the recipe's shapes, all leaves random: compiles nothing."""
    shapes = init.abstract_cache(config, made, len(SEEN), LENGTH, length=max(SEEN))
    rng, rows = np.random.default_rng(0), np.asarray(SEEN, np.int32)
    edge = np.maximum(rows - shapes.recipe.window, 0) if shapes.recipe.store else 0 * rows
    counters = {"seen": rows, "high": rows, "clock": rows - 3, "edge": edge, "budget": rows // 2}

    def fill(path, x):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name in counters:
            return jnp.asarray(counters[name])
        if name in ("base", "flags"):
            return jnp.zeros(x.shape, x.dtype)
        if name == "pos":  # some slots empty
            pos = rng.integers(0, max(edge.min(), 1), x.shape)
            return jnp.asarray(np.where(pos % 3, pos, 65535), x.dtype)
        if name == "owner":
            return jnp.asarray(rng.integers(-1, config.kv_heads, x.shape), x.dtype)
        if name in ("first", "count"):  # a page for each layer of a pool
            return jnp.indices(x.shape, x.dtype)[0] if name == "first" else jnp.ones_like(x)
        if jnp.issubdtype(x.dtype, np.floating):
            return jnp.asarray(rng.standard_normal(x.shape), x.dtype)
        return jnp.asarray(rng.integers(0, 256, x.shape, np.uint8)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape, x.weak_type) == (y.dtype, y.shape, y.weak_type)
        x, y = np.asarray(x), np.asarray(y)
        assert np.array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8))


def stepper(mine):
    """`step` of three tokens, compiled anew."""
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 6]])
    return jax.jit(lambda cache: step(mine.params, mine.config, cache, tokens))


@pytest.mark.parametrize("name", RECIPES)
def test_a_saved_cache_is_the_same_cache(name, tmp_path):
    made = recipe(name, **({"window": 8} if name == "dms" else {}))  # its own exceeds these texts
    cache, path = filled(made), tmp_path / "c.kvjax"
    save_cache(path, cache, model())
    assert_same(cache, load_cache(path, model(), recipe=made))
    assert os.listdir(tmp_path) == ["c.kvjax"]


@pytest.mark.parametrize("name", ["key_norm", "streaming_llm"])
def test_a_real_cache_goes_on_as_if_it_had_not_been_saved(name, tmp_path):
    mine = model(config=FULL)
    prompt = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, max(SEEN)))
    made = recipe(name, chunk=48)
    _, cache = api.prefill(mine, prompt, made, max_length=LENGTH, lengths=SEEN, logits="none")
    path = tmp_path / "c"
    save_cache(path, cache, mine)
    again = load_cache(path, mine, recipe=made)
    assert_same(cache, again)
    run = stepper(mine)
    assert_same(run(cache), run(again))
    assert run._cache_size() == 1  # the loaded cache compiles nothing anew


def test_a_joined_cache_can_be_saved(tmp_path):
    """Its body is closed, of another recipe than any in the table, with settings given as int."""
    made = CacheRecipe("joined", "after", stride=128, store=Store(page=16))
    cache = filled(made, FULL)
    group = cache.groups[0]
    bodies = tuple(b.replace(closed=True, temperature=2, exponent=0.5) for b in group.bodies)
    tail = jax.tree.map(lambda x: x[:, :, :, :LENGTH], group.tail)
    cache = cache.replace(groups=(group.replace(tail=tail, bodies=bodies),))
    save_cache(tmp_path / "c", cache, model(config=FULL))
    assert_same(cache, load_cache(tmp_path / "c", model(config=FULL)))


@struct.dataclass
class Odd:
    """A codec whose codes have one leaf of each awkward kind."""

    side: str = struct.static("k")
    group: int = struct.static(2)
    rope: str = struct.static("after")

    def encode(self, x, valid=None):
        narrow = jnp.clip(jnp.round(x), -2, 1)
        return {
            "bf16": x.astype(jnp.bfloat16),
            "e4m3": x.astype(jnp.float8_e4m3fn),
            "e5m2": x.astype(jnp.float8_e5m2),
            "int4": jnp.clip(jnp.round(x), -8, 7).astype(jnp.int4),
            "int2": narrow.astype(jnp.int2),
            "sign": x > 0,
            "packed": jnp.packbits(x > 0, axis=-1),
            "words": jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32),
            "shared": jnp.abs(x).max(axis=-1)[..., ::2].astype(jnp.float16),
            "empty": x[..., :0],
            "none": None,
        }

    def decode(self, codes, dtype):
        return sum(codes[n].astype(dtype) for n in ("bf16", "e4m3", "e5m2", "int4", "int2"))


def test_every_dtype_survives_in_codes_and_tail(tmp_path, monkeypatch):
    monkeypatch.setitem(codecs.CODECS, "odd", Odd)
    config = dataclasses.replace(FULL, dtype="bfloat16")
    mine = model(config=config)
    cache, path = filled(recipe("int8", codec="odd", page=16), config), tmp_path / "c"
    save_cache(path, cache, mine)
    again = load_cache(path, mine)
    assert_same(cache, again)
    run = stepper(mine)
    assert_same(run(cache), run(again))
    held = {leaf["dtype"] for leaf in structure(path)["leaves"].values()}
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "int2", "bool", "uint8"} <= held


def test_all_bit_patterns_of_all_dtypes_survive(tmp_path):
    bits = np.arange(4096, dtype=np.uint8)
    leaves = []
    for name, dtype in leaf_file.DTYPES.items():
        raw = bits % 2 if name == "bool" else bits % 16 if "4" == name[-1:] else bits
        raw = bits % 4 if name in ("int2", "uint2") else raw
        leaves += [(name, raw.view(dtype).reshape(2, -1)), (name, raw[:0].view(dtype))]
        leaves += [(name, raw[:8].view(dtype)[0].reshape(()))]
    leaf_file.write(tmp_path / "f", {"a": None}, leaves)
    fields, entries = leaf_file.read_header(tmp_path / "f")
    read = leaf_file.read_leaves(tmp_path / "f", entries)
    assert fields == {"a": None}
    for (name, x), entry, y in zip(leaves, entries, read, strict=True):
        assert (name, x.dtype, x.shape) == (entry.name, y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()


def test_a_naive_savez_would_lose_the_dtype(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.asarray(jnp.ones(2, jnp.bfloat16)))
    assert np.load(tmp_path / "x.npz")["x"].dtype != jnp.bfloat16


def on_mesh(mine, shape):
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = sharding.place(mine.params, sharding.param_specs(mine.params, mesh), mesh)
    return dataclasses.replace(mine, params=params, mesh=mesh)


@pytest.mark.filterwarnings("ignore:.*kv heads do not divide")
@pytest.mark.parametrize("name", ["snapkv", "int8"])
def test_it_opens_on_another_mesh(name, tmp_path):
    cache, path = filled(recipe(name)), tmp_path / "c"
    wide, tall = on_mesh(model(), (2, 4)), on_mesh(model(), (4, 2))
    spread = sharding.place(cache, sharding.cache_specs(cache, wide.mesh), wide.mesh)
    assert len(spread.groups[0].tail.k.sharding.device_set) == 8
    save_cache(path, spread, wide)
    assert_same(cache, load_cache(path, model()))
    for mine in (wide, tall):
        again = load_cache(path, mine)
        assert_same(cache, again)
        specs = sharding.cache_specs(cache, mine.mesh)
        assert jax.tree.map(lambda x: x.sharding.spec, again) == specs
    leaves = structure(path)["leaves"]
    assert sum(leaf["bytes"] for leaf in leaves.values()) == kvjax.nbytes(cache)


def refused(path, mine, *parts, **options):
    with pytest.raises(InputError) as error:
        load_cache(path, mine, **options)
    assert all(p in str(error.value) for p in parts), str(error.value)
    assert "\n" not in str(error.value)


def test_what_does_not_belong_is_refused_with_both_values(tmp_path):
    path = tmp_path / "c"
    save_cache(path, filled(recipe("int8")), model())
    mine, other = (checkpoint.identity(model(s))["weights"] for s in (0, 1))
    assert mine != other
    refused(path, model(1), "another model", mine[:12], other[:12])
    wider = model(config=dataclasses.replace(CONFIG, mlp=24))
    refused(path, wider, "another model", "config.mlp", "16", "24")
    refused(path, model(), "recipe.window", "32", "16", recipe=recipe("int8", window=16))
    refused(path, model(), "recipe.name", "int8", "exact", recipe=recipe("exact"))
    whole = path.read_bytes()
    path.write_bytes(whole[:8] + (7).to_bytes(8, "little") + whole[16:])
    refused(path, model(), "version 7", "reads 1")
    path.write_bytes(whole[:-1])
    refused(path, model(), str(len(whole)), str(len(whole) - 1))
    refused(tmp_path / "absent", model(), "no such file")


def test_one_changed_weight_of_any_layer_is_another_model():
    for layer in range(CONFIG.layers):
        params = model().params
        blocks = params.blocks.replace(up=params.blocks.up.at[layer].add(1e-3))
        other = dataclasses.replace(model(), params=params.replace(blocks=blocks))
        assert checkpoint.identity(other) != checkpoint.identity(model())


@pytest.mark.parametrize("field, value", [("seen", 97), ("edge", 73), ("clock", -1), ("flags", 16),
                                          ("budget", 97), ("high", 3)])  # fmt: skip
def test_counters_that_contradict_each_other_are_not_written(field, value, tmp_path):
    cache = filled(recipe("int8"))
    cache = cache.replace(**{field: getattr(cache, field).at[0].set(value)})
    with pytest.raises(InputError, match=f"{field}.*{value}|{value}.*{field}"):
        save_cache(tmp_path / "c", cache, model())
    assert not os.listdir(tmp_path)


def test_an_existing_file_is_kept_unless_told(tmp_path):
    path = tmp_path / "c"
    save_cache(path, filled(recipe("exact")), model())
    before = path.read_bytes()
    with pytest.raises(InputError, match="overwrite=True"):
        save_cache(path, filled(recipe("int8")), model())
    assert path.read_bytes() == before
    save_cache(path, filled(recipe("int8")), model(), overwrite=True)
    assert load_cache(path, model()).recipe.name == "int8"
    with pytest.raises(InputError, match="folder"):
        save_cache(tmp_path / "absent" / "c", filled(recipe("exact")), model())


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_leaves_the_old_file(call, tmp_path, monkeypatch):
    path = tmp_path / "c"
    save_cache(path, filled(recipe("exact")), model())
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(leaf_file.os, call, full)
    with pytest.raises(InputError, match="No space left"):
        save_cache(path, filled(recipe("int8")), model(), overwrite=True)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["c"]


def test_a_failing_write_leaves_nothing(tmp_path):
    cache, (soft, hard) = filled(recipe("exact")), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoint.identity(model())  # compiles
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(InputError, match="not written"):
            save_cache(tmp_path / "c", cache, model())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.listdir(tmp_path)


def test_a_killed_writer_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "c"
    save_cache(path, filled(recipe("exact")), model())
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(leaf_file.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_cache(path, filled(recipe("int8")), model(), overwrite=True)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["c"]
