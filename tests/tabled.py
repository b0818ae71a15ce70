"""The small model, the one source of randomness, and tables as training would make them."""

import functools
import zlib

import numpy as np

from kvjax.cache.recipes import RECIPES
from kvjax.config import LayerKind, ModelConfig

PLAIN = ModelConfig(
    "llama", vocab=61, width=32, mlp=32, heads=4, kv_heads=2, head_dim=16,
    kinds=(LayerKind(),), pattern=(0, 0), context=4096,
)  # fmt: skip


def generator(*words) -> np.random.Generator:
    """The one source of randomness, by name."""
    return np.random.default_rng(zlib.crc32(repr(words).encode()))


@functools.cache
def tables(layers: int) -> dict:
    """What training or calibration would give to the recipes that need it, by name."""
    rng, n, d, r = generator("tables"), PLAIN.kv_heads, PLAIN.head_dim, 8
    random = lambda *x: (0.3 * rng.normal(size=(layers, *x))).astype(np.float32)  # noqa: E731
    labels = rng.random((layers, n)).astype(np.float32)
    features = {"q_in": random(n, d, 8), "q_out": random(n, 8, r), "k_in": random(n, d, 8),
                "k_out": random(n, 8, r), "mix": random(n, r, r), "size": random(n, r),
                "change": random(n, r)}  # fmt: skip
    made = {
        "labels": {"scorer": {"label": labels}},
        "surrogate": {
            "scorer": {"weights": {"out": random(PLAIN.width, n), "out_bias": random(n)}}
        },
        "less": {"features": features},
        "probe_attention": {"probes": random_probes()},
        "gate": {"scorer": {"norm": np.ones((layers, PLAIN.width), np.float32),
                            "weight": random(PLAIN.width, n), "bias": random(n)}},
    }  # fmt: skip
    out = {}
    for name, entry in RECIPES.items():
        for spec in (entry.recipe.choice and entry.recipe.choice.scorer, entry.recipe.fold):
            if spec is not None and spec.name in made:
                out[name] = made[spec.name]
    return out


def random_probes(count: int = 3, size: int = 5) -> dict:
    """Soft tokens that nobody trained: the basis is orthonormal, the selector random."""
    rng, m = generator("probes"), PLAIN.width
    basis = np.linalg.qr(rng.normal(size=(m, size)))[0].T
    weight, bias = rng.normal(size=(m, count, size)), rng.normal(size=(count, size))
    made = {"basis": basis, "weight": weight, "bias": bias, "size": np.ones(1)}
    return {name: x.astype(np.float32) for name, x in made.items()}
