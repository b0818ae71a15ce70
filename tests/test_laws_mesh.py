"""The mesh law: a cache and a model spread over devices give what one device gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, DRAFT, ROWS, filled, model, random_tokens, run
from jax.sharding import AxisType

import kvjax
from kvjax import sharding

STEPS = 8  # two strides
full = pytest.mark.full
KINDS = [  # a ring and a body in order; scored slots; a pool and what follows it; read by rank
    "hybrid int8",
    pytest.param("key_norm during", marks=full),
    pytest.param("ada_snapkv int8", marks=full),
    pytest.param("streaming_llm", marks=full),
    pytest.param("hybrid exact", marks=full),
    pytest.param("snapkv", marks=full),
]


@pytest.fixture(scope="module")
def mesh():
    devices, auto = jax.devices()[:4], (AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=auto, devices=devices)


def place(tree, specs, mesh):
    return sharding.place(tree, specs(tree, mesh), mesh)


@pytest.mark.filterwarnings("ignore:kv heads or budget rows")  # a pool has one row for all heads
@pytest.mark.parametrize("name", KINDS)
def test_sharded_equals_unsharded(name, mesh):
    """Decoding on a (2, 2) mesh gives the tokens and the cache of one device.

    Sums over heads and mlp are split in two, so floats agree to 1e-5 of the largest; int8 codes may
    then fall to the next level.
    """
    case = CASES[name]
    cache, params, config = filled(case), model(case.config).params, case.config
    tokens, key = jnp.array([3, 5]), jax.random.key(0)
    decode = jax.jit(lambda p, c, t: kvjax.decode(p, config, c, t, key, steps=STEPS))
    want_ids, want = decode(params, cache, tokens)
    specs = sharding.cache_specs(cache, mesh)
    assert specs.groups[0].tail.k[1:3] == ("data", "model") and specs.seen[0] == "data"
    spread = sharding.place(cache, specs, mesh)
    weights = place(params, sharding.param_specs, mesh)
    assert weights.blocks.q.sharding.spec[1] == "model"
    with jax.set_mesh(mesh):
        got_ids, got = decode(weights, spread, tokens)
    assert np.array_equal(got_ids, want_ids)
    assert np.asarray(got.seen).tolist() == [25 + STEPS, 18 + STEPS]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        near = {"int8": 1, "float32": 1e-5 * max(np.abs(y).max(), 1)}.get(str(x.dtype), 0)
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=near)


def test_nan_in_one_head_is_flagged_on_every_device(mesh):
    """The flag of a row does not depend on which device holds the head with the NaN."""
    case = CASES["int8"]
    cache, new = filled(case), random_tokens(DRAFT, "new")
    spread = place(cache, sharding.cache_specs, mesh)
    for head in range(2):
        bad = new.replace(k=new.k.at[0, 1, 0, head, 0].set(jnp.nan))
        with jax.set_mesh(mesh):
            got = jax.jit(kvjax.append)(spread, bad, jnp.full((ROWS,), DRAFT, jnp.int32))
        held = {(s.index[0].start or 0): [] for s in got.flags.addressable_shards}
        for shard in got.flags.addressable_shards:
            held[shard.index[0].start or 0].append(np.asarray(shard.data).tolist())
        assert held == {0: [[0], [0]], 1: [[kvjax.NAN], [kvjax.NAN]]}
    want = run("append", cache, bad, np.full(ROWS, DRAFT, np.int32))
    assert np.asarray(want.flags).tolist() == [0, kvjax.NAN]
