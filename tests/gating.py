"""Gates of DMS for tests: random ones, or of one bias."""

import jax.numpy as jnp
import numpy as np
from cases import PLAIN, generator, model

from kvjax.train import dms  # pyright: ignore[reportMissingImports]

LAYERS, N, M = PLAIN.layers, PLAIN.kv_heads, PLAIN.width


def gate_of(bias=None):
    """Gates of random weights, of which about half say drop; or of one bias alone."""
    rng = generator("gate")
    weight = rng.normal(size=(LAYERS, M, N)) * (0.3 if bias is None else 0.0)
    made = {
        "norm": rng.uniform(0.5, 1.5, (LAYERS, M)),
        "weight": weight,
        "bias": np.full((LAYERS, N), bias or 0.0),
    }
    return {k: jnp.asarray(x, jnp.float32) for k, x in made.items()}


def gated(bias=None):
    return dms.put(model(), {"scorer": gate_of(bias)})
