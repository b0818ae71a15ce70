"""Codecs that turn vectors first: what rotation spreads, levels of TurboQuant, products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import generator, model, random_ids

import kvjax
from kvjax import codecs
from kvjax.codecs.turboquant import levels
from kvjax.codecs.turned import hadamard, orthogonal
from kvjax.config import Spec


def codec(name, **options):
    return codecs.build(Spec(name, tuple(options.items())), "k")


def back(made, x):
    return jax.jit(lambda x: made.decode(made.encode(x), jnp.float32))(x)


def random(*shape):
    return jnp.asarray(generator("turned", shape).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("basis", [hadamard, orthogonal])
@pytest.mark.parametrize("d", [16, 64, 80])
def test_bases_are_orthogonal(basis, d):
    """Products are what they were, and another process gets the same numbers."""
    matrix = basis(d).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-6)
    basis.cache_clear()
    assert np.array_equal(basis(d), matrix.astype(np.float32))


def test_a_single_large_channel_is_spread():
    """64 of channel 5 alone is 8 or -8 in all 64 channels, two levels at 1 bit: nothing is lost."""
    x = jnp.zeros((2, 64)).at[:, 5].set(64.0)
    made = codec("rotated", bits=1)
    assert np.unique(np.round(made.turn(x), 4)).tolist() == [-8, 8]
    np.testing.assert_allclose(back(made, x), x, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
def test_one_large_channel_does_not_take_the_levels_of_the_others(bits):
    """A channel of 20 beside normal numbers: the range of 23 falls to twice 20 / 8 + 2.4, 9.8, and
    the error with its square, to a fifth; a third is asked for."""
    x = random(4096, 64).at[:, 7].set(20.0)
    error = lambda name: float(((back(codec(name, bits=bits), x) - x) ** 2).mean())  # noqa: E731
    assert error("rotated") < error("grouped") / 3


LLOYD_MAX = {  # positive levels of N(0, 1), and the mean square error
    1: ([0.7979], 0.36338),
    2: ([0.4528, 1.5104], 0.117482),
    3: ([0.2451, 0.7560, 1.3439, 2.1519], 0.03455),
    4: ([0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326], 0.00950),
}


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_levels(bits):
    """Of many dimensions a coordinate is normal: the levels of Lloyd and Max."""
    made = levels(8192, bits) * 8192**0.5
    np.testing.assert_allclose(made[2 ** (bits - 1) :], LLOYD_MAX[bits][0], rtol=2e-3)
    assert np.array_equal(made, -made[::-1])


@pytest.mark.parametrize("bits, error", [(1, 0.359), (2, 0.1146), (3, 0.0334), (4, 0.00915)])
def test_distortion(bits, error):
    """Of 64 dimensions, measured in the card; and <x, x'> is 1 - D of |x|^2."""
    x = random(8192, 64)
    found, size = back(codec("turboquant", bits=bits), x), (x**2).sum(-1)
    assert float((((found - x) ** 2).sum(-1) / size).mean()) == pytest.approx(error, rel=0.02)
    assert float(((found * x).sum(-1) / size).mean()) == pytest.approx(1 - error, abs=0.004)


@pytest.mark.parametrize("bits, spread", [(2, 0.58), (3, 0.18), (4, 0.052)])
def test_products_of_prod_are_unbiased(bits, spread):
    """Products of unit vectors: no bias, and a variance of (pi / 2) D / d, D that of a bit less."""
    x, q = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (random(8192, 64),
            jnp.asarray(generator("q").normal(size=(8192, 64)), jnp.float32)))  # fmt: skip
    found = back(codec("turboquant", bits=bits, form="prod"), x)
    assert abs(float(((found - x) * x).sum(-1).mean())) < 0.004
    assert float(((found - x) * q).sum(-1).var()) * 64 == pytest.approx(spread, rel=0.06)


@pytest.mark.parametrize("name, codec", [
    ("int8", ("turboquant", "turboquant")), ("snapkv", ("rotated", "raw")),
    ("ada_snapkv", ("int8", "turboquant")),
])  # fmt: skip
def test_attending_in_the_basis_of_the_codes(name, codec, monkeypatch):
    """The same as attending to what is decoded, in an open body, in pages and in a pool."""
    recipe = kvjax.recipe(name, codec=codec, window=4, page=32)
    logits = []
    for inside in (True, False):
        if not inside:
            plain = lambda self, x: x  # noqa: E731
            monkeypatch.setattr(codecs.Pair, "inside", property(lambda self: self))
            monkeypatch.setattr(codecs.Pair, "turn_query", plain)
            monkeypatch.setattr(codecs.Pair, "turn_back", plain)
            jax.clear_caches()
        _, cache = kvjax.prefill(model(), random_ids(40), recipe, max_length=64)
        logits.append(kvjax.extend(model(), random_ids(3, "more"), cache, logits="all")[0])
    np.testing.assert_allclose(*logits, atol=2e-4)
