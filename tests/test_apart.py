"""Weights apart (a leaf per layer): the same numbers, gradients and identity as stacked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import checkpoint
from kvjax.config import LayerKind, ModelConfig, Style
from kvjax.params import apart, init_params

HYBRID = ModelConfig(
    "gemma3", 50, 32, 48, 4, 2, 8, (LayerKind(6), LayerKind()), (0, 0, 1, 0), 256,
    Style(qk_norm=True, post_norms=True, qkv_bias=True, tied=False),
)  # fmt: skip


@pytest.fixture(scope="module")
def weights():
    stacked = init_params(HYBRID, jax.random.key(0), std=0.3)
    return stacked, apart(stacked)


def test_decoding_and_gradients_are_those_of_the_stack(weights):
    """Equal programs up to the order of float32 sums: logits of order 10, so 1e-4 absolute."""
    ids = jax.random.randint(jax.random.key(1), (2, 12), 0, 50)

    @jax.jit
    def run(params):
        cache = kvjax.init_cache(HYBRID, kvjax.CacheRecipe(), 2, 32)
        logits, new = kvjax.look(params, HYBRID, cache, ids)
        cache = kvjax.append(cache, new)
        out, _ = kvjax.decode(params, HYBRID, cache, ids[:, -1], jax.random.key(0), steps=6)
        return logits, out

    @jax.jit
    def slope(params):
        return jax.grad(lambda p: jnp.mean(kvjax.look(p, HYBRID, None, ids)[0] ** 2))(params)

    (logits, out), (logits2, out2) = (run(w) for w in weights)
    np.testing.assert_allclose(logits, logits2, atol=1e-4)
    np.testing.assert_array_equal(out, out2)
    one, two = (slope(w) for w in weights)
    for name in ("q", "down", "q_norm", "v_bias"):
        want = getattr(one.blocks, name)
        got = jnp.stack([getattr(block, name) for block in two.blocks])
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * float(jnp.abs(want).max()))


def test_memory_is_shared_and_identity_is_kept(weights):
    stacked, split = weights
    base = np.asarray(stacked.blocks.gate)
    for i, block in enumerate(split.blocks):
        assert np.shares_memory(np.asarray(block.gate), base[i])
    one, two = (checkpoint.identity(kvjax.Model(w, HYBRID, None)) for w in weights)
    assert one == two
    changed = stacked.replace(blocks=stacked.blocks.replace(o=stacked.blocks.o.at[2].add(1.0)))
    assert checkpoint.identity(kvjax.Model(changed, HYBRID, None)) != one
