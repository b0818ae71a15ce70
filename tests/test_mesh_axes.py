"""Meshes as `jax.make_mesh` gives them, with Explicit axes: taken by a Model, refused in force."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, ROWS, filled, model, random_tokens
from jax.sharding import AxisType

import kvjax
from kvjax import checkpoint, sharding


@pytest.fixture(scope="module")
def explicit():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4],
                         axis_types=(AxisType.Explicit,) * 2)  # fmt: skip
    assert set(mesh.axis_types) == {AxisType.Explicit}
    return mesh


def test_auto_keeps_devices_and_names(explicit):
    made = sharding.auto(explicit)
    assert made.axis_types == (AxisType.Auto,) * 2
    assert made.axis_names == explicit.axis_names and (made.devices == explicit.devices).all()
    assert sharding.auto(made) == made


def test_a_model_on_an_explicit_mesh_gives_what_one_device_gives(explicit, tmp_path):
    """Weights placed on that very mesh; prefill, extend, a file and generate place caches on it."""
    one = model(CASES["exact"].config)
    spread = sharding.place(one.params, sharding.param_specs(one.params, explicit), explicit)
    four = dataclasses.replace(one, params=spread, mesh=explicit)
    ids = np.arange(2 * 12).reshape(2, 12) % 40
    want, _ = kvjax.prefill(one, ids, max_length=48)
    got, cache = kvjax.prefill(four, ids, max_length=48)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())
    assert cache.groups[0].tail.k.sharding.spec[1:3] == ("data", "model")
    checkpoint.save_cache(tmp_path / "cache", cache, four)
    read = checkpoint.load_cache(tmp_path / "cache", four)
    assert read.groups[0].tail.k.sharding.mesh.axis_types == (AxisType.Auto,) * 2
    prompt = [[1, 2], [3, 4]]
    texts = [kvjax.generate(m, prompt, max_new_tokens=3).tokens for m in (one, four)]
    assert texts[0] == texts[1]


def test_an_explicit_mesh_in_force_is_refused_in_one_sentence(explicit):
    cache, new = filled(CASES["exact"]), random_tokens(1, "new")
    with jax.set_mesh(explicit), pytest.raises(kvjax.InputError, match="Explicit axes.*AxisType.A"):
        kvjax.append(cache, new, jnp.ones(ROWS, jnp.int32))
