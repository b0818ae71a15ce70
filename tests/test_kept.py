"""What is kept is what kvpress 0.5.5 keeps, on SmolLM2 in float32: tests/golden/make_kept.py.

Sets are identical, but for entries whose score lies within 1e-5 (relative) of the threshold: those
the golden file marks as near. Each row names the options that make kvjax do what kvpress does.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cache import condense as condensing
from kvjax.cache import sizes
from kvjax.cache.slots import unpack_pos
from kvjax.observing import gather

GOLDEN = np.load(Path(__file__).parent / "golden" / "kept.npz")
KEEPS = GOLDEN["keeps"].tolist()
PREFIX = int(GOLDEN["prefix"])
PAPER = {"count": "paper"}  # int(keep * length), and the card's own arithmetic of a budget
CARD = {"window": 0, **PAPER}  # kvjax adds a window to methods that have none
SNAP = {"window": 64, "kernel": 5, "pool": "avg", **PAPER}
SAFE = {"budget": "pooled", "floor": "whole", **PAPER}  # the window counts into the floor
LINES = {
    "snapkv": ("snapkv", SNAP),
    "pyramidkv": ("pyramidkv", SNAP),
    "pyramidkv_16": ("pyramidkv", SNAP | {"window": 16, "beta": 5}),
    "tova": ("tova", PAPER),
    "knorm": ("key_norm", CARD),
    "expected_attention": ("expected_attention", PAPER),
    "keydiff": ("keydiff", PAPER),
    "streaming_llm": ("streaming_llm", {"when": "after", "positions": "keep", **PAPER}),
    "observed_attention": ("h2o", {"per_query": True, **CARD}),
    "column_sums": ("h2o", CARD),
    "chunkkv_knorm": ("chunkkv", {"scorer": "key_norm", "size": 20, "reuse": 1, **CARD}),
    "chunkkv_snapkv": ("chunkkv", SNAP | {"window": 60, "size": 20, "reuse": 1}),
    "adakv_snapkv": ("snapkv", SNAP | SAFE),
    "adakv_expected_attention": ("expected_attention", SAFE),
    "kvzip": ("kvzip", {"first": PREFIX}),
    "kvzip_256": ("kvzip", {"first": PREFIX, "part": 256}),
    "kvzip_plus": ("kvzip", {"first": PREFIX, "plus": True}),
    "kvzip_layerwise": ("kvzip", {"first": PREFIX, "budget": "pooled", "alpha": 0.0}),
}
SHAPE = (30, 3)


@functools.cache
def model():
    return kvjax.load("smollm2-135m")


@functools.cache
def read(text, zipped):
    """The ids of a text, and its exact cache."""
    ids = GOLDEN[f"{text}.kvzip.ids" if zipped else f"{text}.ids"][None]
    cache = kvjax.prefill(model(), ids, max_length=ids.shape[1], logits="none")[1]
    return ids, cache


def mask(text, method, which, length):
    """Golden masks [keeps, layers, heads, length]."""
    rows = GOLDEN[f"{text}.{method}.{which}"]
    count = SHAPE[0] * SHAPE[1] * length
    return np.stack([np.unpackbits(r, count=count).reshape(*SHAPE, length) for r in rows]) > 0


def kept(cache, length):
    """Which arrivals each layer and head holds, [layers, heads, length], of the first row."""
    out = np.zeros((*SHAPE, length), bool)
    out[..., int(cache.edge[0]) :] = True
    for group in cache.groups:
        for body in group.bodies:
            pos = np.asarray(unpack_pos(body.pos))[:, 0].reshape(*SHAPE, -1)
            layer, head, slot = np.nonzero(pos >= 0)
            out[layer, head, pos[layer, head, slot]] = True
    if (pool := cache.pool) is not None:
        pos, owner = np.asarray(unpack_pos(pool.pos))[0, 0, 0], np.asarray(pool.owner)[0, 0, 0]
        for layer, (first, count) in enumerate(
            zip(pool.first[:, 0], pool.count[:, 0], strict=True)
        ):
            for page in range(int(first), int(first + count)):
                out[layer, owner[page], pos[page][pos[page] >= 0]] = True
    return out


def keep_of(method, text, index, ids):
    """The fraction that keeps as many entries as kvpress, which rounds the number it drops down."""
    if not method.startswith("kvzip"):
        return KEEPS[index]
    entries = SHAPE[0] * SHAPE[1] * ids.shape[1]
    dropped = int(entries * (1 - KEEPS[index]))
    return (entries - dropped) / entries


QUICK = (
    "pyramidkv_16", "expected_attention", "keydiff", "chunkkv_snapkv", "adakv_snapkv", "kvzip_256",
)  # fmt: skip
CASES = [
    pytest.param(m, t, marks=() if (m in QUICK and t == "short") else (pytest.mark.full,))
    for m in LINES
    for t in ("long", "short")
    if (m, t) != ("kvzip_layerwise", "short")  # rounded over heads there, per head here
]


@pytest.mark.parametrize("method, text", CASES)
def test_kept_sets_are_those_of_kvpress(method, text):
    name, options = LINES[method]
    ids, exact = read(text, method.startswith("kvzip"))
    length = ids.shape[1]
    want, near = (mask(text, method, which, length) for which in ("kept", "near"))
    for index in range(len(KEEPS)):
        recipe = kvjax.recipe(name, keep=keep_of(method, text, index, ids), **options)
        got = kept(kvjax.condense(model(), exact, recipe, tokens=ids), length)
        wrong = (got != want[index]) & ~near[index]
        assert not wrong.any(), f"{wrong.sum()} of {want[index].sum()} entries at {KEEPS[index]}"
        assert got.sum() == want[index].sum()


@pytest.mark.full
@pytest.mark.parametrize("method", [m for m in LINES if f"long.{m}.scores" in GOLDEN])
def test_scores_are_those_of_kvpress(method):
    """To 2e-4 of the largest of a layer: float32 in another order (float64 differs by 6e-5)."""
    name, options = LINES[method]
    recipe = kvjax.recipe(name, keep=0.5, **options)
    ids, exact = read("long", method.startswith("kvzip"))
    lengths = np.array([ids.shape[1]])
    counts = sizes.counts(recipe, lengths)
    evidence = gather(model(), exact, recipe, counts, ids, None)
    edge = exact.seen - recipe.window
    scored = jax.jit(
        lambda cache, seen: condensing._scores(
            cache, cache.groups[0], seen, edge, model().config, recipe, None
        )
    )(exact, (evidence or [None])[0])
    scored = np.asarray(scored)[GOLDEN["layers"], 0][..., :: int(GOLDEN["stride"])]
    want = GOLDEN[f"long.{method}.scores"]
    at = np.arange(lengths[0])[:: int(GOLDEN["stride"])]
    sinks = recipe.choice.sinks if not method.startswith("kvzip") else 0
    open_ = (at < int(edge[0])) & (at >= sinks)  # kvpress writes max + 1 over what it protects
    got, want = scored[..., open_], want[..., open_]
    scale = np.abs(want).max(axis=-1, keepdims=True)
    ratio = (got * want).sum() / (want * want).sum()  # sums and means rank alike
    np.testing.assert_allclose(got / ratio / scale, want / scale, rtol=0, atol=2e-4)
