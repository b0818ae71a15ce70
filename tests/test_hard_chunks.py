"""Hard cases of reading in pieces: however a prompt is cut, the same is kept."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, generator, model
from hard import (  # noqa: F401
    APART,
    BUDGET,
    CHOOSING,
    IDS,
    VARIANTS,
    absorb_long,
    fast_compile,
    held,
    longer,
    small,
)

import kvjax
from kvjax import scorers
from kvjax.cache.recipes import RECIPES

NAN, INF = float("nan"), float("inf")

# --- case 3: VeloxQuant-MLX#84, each chunk taken for a whole prompt ---

SPLITS = {"1x64": [64], "4x16": [16] * 4, "7,7,...,1": [7] * 9 + [1]}
STREAMING = sorted(  # by each token's own key, so that cuts do not matter
    {v[0] for v in VARIANTS if v[1] == "during" and v[0] in APART}
    & {n for n in CHOOSING if scorers.reads(RECIPES[n].recipe.choice) is None}
)


@pytest.mark.parametrize("codec", ["raw", pytest.param("int8", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", STREAMING)
def test_chunks_are_one_prompt(name, codec):
    """Given keys and values: the same 16 rows for every split, and never more on the way.

    Two rows of 64 and 41 tokens, so that a row can also end in the middle of a chunk.
    """
    recipe = small(name, when="during", positions="keep", slots=16, sinks=4, window=4, page=4,
                   codec=codec)  # fmt: skip
    rng, lengths = generator("chunks"), np.array([64, 41])
    k, v = rng.normal(size=(2, 2, 2, 64, 2, 16)).astype(np.float32)  # [l b t n d]
    found = []
    for split in SPLITS.values():
        cache, start = kvjax.init_cache(PLAIN, recipe, 2, 64), 0
        for size in split:
            count = np.clip(lengths - start, 0, size)
            wide = np.zeros((2, 2, max(split), 2, 16), np.float32)  # one shape a split
            wide[:, :, :size] = k[:, :, start : start + size]
            other = np.zeros_like(wide)
            other[:, :, :size] = v[:, :, start : start + size]
            new = kvjax.Tokens(jnp.asarray(wide), jnp.asarray(other))
            cache = absorb_long(cache, new, jnp.asarray(count))
            start += size
            for row in range(2):
                assert all(len(a) <= 16 for heads in held(cache, row) for a in heads)
        found.append([held(cache, row) for row in range(2)])
    assert found[0] == found[1] == found[2]
    for row, length in enumerate(lengths.tolist()):
        for layer, head in itertools.product(range(2), range(2)):
            arrivals = found[0][row][layer][head]
            assert len(arrivals) == 16 and arrivals[:4] == [0, 1, 2, 3]
            assert arrivals[-4:] == list(range(length - 4, length))
            if name == "key_norm":
                norms = np.linalg.norm(k[layer, row, 4 : length - 4, head], axis=-1)
                assert arrivals[4:-4] == sorted((4 + np.argsort(norms)[:8]).tolist())
            if name == "streaming_llm":
                assert arrivals == [0, 1, 2, 3, *range(length - 12, length)]


@pytest.mark.parametrize("name", longer(CHOOSING, *STREAMING))
def test_prefill_in_chunks_keeps_the_same(name):
    """Through the model. Streaming, the keys of later layers depend on the cuts: layer 0 only."""
    by_attention = scorers.reads(RECIPES[name].recipe.choice) is not None  # of what was there then
    when = "during" if name in STREAMING and not by_attention else "after"
    recipe = small(name, when=when, positions="keep", slots=16, sinks=4, window=4, page=4)
    made = []
    for split in SPLITS.values():
        _, cache = kvjax.prefill(model(PLAIN), IDS[None], recipe, max_length=64, chunk=split[0],
                                 logits="none")  # fmt: skip
        made.append(held(cache)[: 1 if when == "during" else 2])
        every = held(cache)
        if BUDGET[name] not in ("heads", "labelled"):
            assert np.mean([len(arrivals) for heads in every for arrivals in heads]) == 16
        for heads in every:
            for arrivals in heads:
                assert arrivals[-4:] == [60, 61, 62, 63]
                assert BUDGET[name] in ("pooled", "pyramid") or arrivals[:4] == [0, 1, 2, 3]
    assert made[0] == made[1] == made[2]
