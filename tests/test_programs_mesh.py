"""kvjax inside a program that runs on a mesh."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CONFIG, KINDS, MAX, ODD, filled, mesh_of, one, prompts, some, weights

import kvjax
from kvjax import sharding
from kvjax.params import abstract_params


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
