"""The matrix of the laws: every recipe at small sizes, and one seeded source of tokens and cuts.

Shapes are tiny (2 rows, 2 layers, 2 kv heads of 2 query heads, 16 dims), so that a compilation
dominates a test: `run` compiles each operation once per (recipe, shapes) for all laws together.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tabled import PLAIN, generator, tables

import kvjax
from kvjax import codecs
from kvjax.cache import ops
from kvjax.cache.recipes import RECIPES, REST, options_of
from kvjax.config import CacheRecipe, LayerKind, ModelConfig, Rope
from kvjax.params import init_params

ROWS, LENGTHS, LONGEST, MAX = 2, (25, 18), 25, 48
PIECE, DRAFT, WINDOW = 8, 3, 4
HYBRID = ModelConfig(
    "mistral", vocab=61, width=32, mlp=32, heads=4, kv_heads=2, head_dim=16,
    kinds=(LayerKind(), LayerKind(window=6, rope=Rope(base=500.0))), pattern=(1, 0), context=4096,
)  # fmt: skip

TWICE = dataclasses.replace(HYBRID, pattern=(0, 1, 0))  # what sees everything is two groups


@dataclass(frozen=True)
class Case:
    """A recipe on a model."""

    name: str
    recipe: CacheRecipe
    config: ModelConfig = PLAIN
    quick: bool = True  # in the default tier

    @property
    def after(self) -> bool:
        return self.recipe.store is not None and self.recipe.when == "after"

    @property
    def edges(self) -> list[int]:
        """How many of LENGTHS have left the tail: whole groups, where all are kept."""
        if self.recipe.store is None:
            return [0 for _ in LENGTHS]
        size = 1 if self.recipe.choice else codecs.pair(self.recipe.store).group
        return [(n - self.recipe.window) // size * size for n in LENGTHS]

    def __str__(self) -> str:
        return self.name


def small(name: str, **options) -> CacheRecipe:
    """A recipe of the table with sizes cut down, so that pages, strides and windows turn over."""
    known = options_of(kvjax.recipe(name))
    wanted = dict(stride=4, lookahead=3, window=WINDOW, page=4)
    if RECIPES[name].recipe.window == REST:
        wanted.pop("window")
    if RECIPES[name].recipe.store is None:
        wanted.pop("window")
    return kvjax.recipe(name, **({k: v for k, v in wanted.items() if k in known} | options))


CODED = {  # pages of whole words, and groups that are smaller than a page and a head
    "int4": dict(page=8),
    "kivi": dict(page=16, group_size=4),
    "grouped": dict(page=8, group_size=8),
    "rotated": dict(page=8),
    "turboquant": dict(page=8),
}


def _cases():
    made = {name: small(name, **CODED.get(name, {})) for name in RECIPES}
    made |= {
        "key_norm during": small("key_norm", when="during", sinks=2),
        "key_norm during int8,raw": small("key_norm", when="during", codec=("int8", "raw")),
        "key_norm rerot": small("key_norm", positions="rerot"),
        "snapkv int8": small("snapkv", codec="int8"),
        "snapkv kivi": small("snapkv", codec="kivi", **CODED["kivi"]),
        "key_norm during raw,int4": small("key_norm", when="during", codec=("raw", "int4"), page=8),
        "ada_snapkv int4": small("ada_snapkv", codec="int4", page=8),
        "kivi after": small("kivi", when="after", **CODED["kivi"]),
        "ada_snapkv turboquant": small("ada_snapkv", codec="turboquant", page=8),
        "snapkv int8 rerot": small("snapkv", codec="int8", positions="rerot"),
        "ada_snapkv int8": small("ada_snapkv", codec="int8"),
        "kvzip int8": small("kvzip", codec="int8"),
        "dms": small("dms", keep=0.75),  # room for all: no gate speaks against random keys
        "razor": small("razor", keep=0.9),  # room for the three labelled heads of `tables`
        "pyramidkv rerot": small("pyramidkv", positions="rerot"),
        "int8 after": small("int8", when="after"),
        "raw during": small("int8", codec="raw"),
        "int8,raw": small("int8", codec=("int8", "raw")),
        "h2o during": small("h2o", when="during"),
        "tova during": small("tova", when="during", window=1, sinks=2),
    }
    hybrid = {
        "hybrid exact": small("exact"),
        "hybrid int8": small("int8"),
        "hybrid snapkv rerot": small("snapkv", positions="rerot"),
        "hybrid streaming_llm": small("streaming_llm"),
    }
    twice = {"twice kvzip": small("kvzip"), "twice ada_snapkv": small("ada_snapkv")}
    slow = (  # each of their parts is in a quicker case
        "key_norm during", "key_norm rerot", "snapkv int8", "int8 after", "raw during", "int8,raw",
        "ada_snapkv int8", "snapkv int8 rerot", "hybrid exact", "hybrid streaming_llm",
        "hybrid int8", "h2o during", "tova during",
        "pyramidkv", "tova", "expected_attention", "ada_expected", "kvzip int8",
        "kvzip", "kvzip_runs", "kvzip_uniform", "twice ada_snapkv", "chunkkv", "keydiff",
        "fp8", "int4", "grouped", "snapkv kivi", "key_norm during raw,int4", "ada_snapkv int4",
        "kivi after", "rotated", "turboquant", "ada_snapkv turboquant",
        "kvzap", "razor", "duo", "kvzip_heads", "less", "finch", "metasoft", "dms",
    )  # fmt: skip
    on = ((made, PLAIN), (hybrid, HYBRID), (twice, TWICE))
    return {k: Case(k, r, c, k not in slow) for some, c in on for k, r in some.items()}


CASES = _cases()
QUICK = ("exact", "hybrid raw during", "streaming_llm", "ada_snapkv")
LOSSLESS = {  # raw codec and room for all
    name: Case(name, recipe, config, name in QUICK)
    for name, recipe, config in (
        ("exact", small("exact"), PLAIN),
        ("hybrid exact", small("exact"), HYBRID),
        ("raw during", small("int8", codec="raw"), PLAIN),
        ("hybrid raw during", small("int8", codec="raw"), HYBRID),
        ("key_norm during", small("key_norm", when="during", keep=1.0), PLAIN),
        ("streaming_llm", small("streaming_llm", keep=1.0, window=WINDOW), PLAIN),
        ("key_norm", small("key_norm", keep=1.0), PLAIN),
        ("snapkv rerot", small("snapkv", keep=1.0, positions="rerot"), PLAIN),
        ("ada_snapkv", small("ada_snapkv", keep=1.0), PLAIN),
        ("hybrid snapkv", small("snapkv", keep=1.0), HYBRID),
        ("twice kvzip", small("kvzip", keep=1.0), TWICE),
    )
}


def random_tokens(t: int, *words, config=PLAIN, rows=ROWS) -> kvjax.Tokens:
    """Keys and values of t tokens, standard normal, as `look` would return them."""
    shape = (config.layers, rows, t, config.kv_heads, config.head_dim)
    rng = generator("tokens", *words)
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    return kvjax.Tokens(jnp.asarray(k), jnp.asarray(v))


def row_of(tree, row: int):
    """One row of a cache, as a batch of its own."""
    return jax.tree.map(lambda x: jnp.asarray(np.take(x, [row], min(x.ndim - 1, 1))), tree)


def random_ids(t: int, *words, rows=ROWS) -> np.ndarray:
    return generator("ids", *words).integers(0, PLAIN.vocab, (rows, t)).astype(np.int32)


@functools.cache
def model(config: ModelConfig = PLAIN) -> kvjax.Model:
    """Random weights, large enough that attention is far from uniform."""
    weights = init_params(config, jax.random.key(7), std=0.3)
    return kvjax.Model(weights, config, tokenizer=None, tables=tables(config.layers))


def tables_of(cache):
    """The tables that the cache's recipe reads layer by layer, or None."""
    made = cache and tables(cache.groups[-1].stop).get(cache.recipe.name)
    return None if made and "probes" in made else made


def cuts(rng, lengths=LENGTHS, piece=PIECE) -> list[np.ndarray]:
    """A way to feed rows of these lengths: counts [b] of each step, rows cut independently."""
    left, out = np.array(lengths), []
    while left.any():
        take = np.minimum(rng.integers(0, piece + 1, len(left)), left)
        out.append(take.astype(np.int32))
        left = left - take
    return [c for c in out if c.any()]


def pieces(x, counts, piece=PIECE, axis=2, start=0):
    """Steps of `piece` tokens from x [.. b t ..] (t on `axis`, rows before it), right padded."""
    x, at = np.asarray(x), np.zeros(x.shape[axis - 1], int) + start
    for count in counts:
        index = np.minimum(at[:, None] + np.arange(piece), x.shape[axis] - 1)
        shape = [1] * x.ndim
        shape[axis - 1 : axis + 1] = index.shape
        yield np.take_along_axis(x, index.reshape(shape), axis=axis)
        at = at + count


_OPS = {
    "absorb": lambda cache, new, n: ops.absorb_long(cache, new, n, tables=tables_of(cache)),
    "append": lambda cache, new, count: ops.append(cache, new, count),
    "compress": lambda cache: ops.compress(cache, tables=tables_of(cache)),
    "truncate": lambda cache, length: ops.truncate(cache, length),
}
_COMPILED = {}
_QUICK = {"xla_backend_optimization_level": "0"}  # halves the time of a compilation


def _executable(key, function, *args, **how):
    """The executable of a function for arguments of these shapes, compiled once."""
    shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(args))
    key = (key, jax.tree.structure(args), shapes)
    if key not in _COMPILED:
        _COMPILED[key] = jax.jit(function, **how).lower(*args).compile(_QUICK)
    return _COMPILED[key]


def compiled(op: str, cache, *args):
    """The executable of an operation on a cache it consumes."""
    return _executable(op, _OPS[op], cache, *args, donate_argnums=0)


def run(op: str, cache, *args):
    """An operation on a copy of the cache."""
    args = jax.tree.map(jnp.asarray, args)
    return compiled(op, cache, *args)(jax.tree.map(jnp.copy, cache), *args)


def look(params, config, cache, tokens, count=None):
    """`kvjax.look`, compiled once for each cache shape."""
    args = jax.tree.map(jnp.asarray, (params, cache, tokens, count))
    read = lambda params, cache, tokens, count: kvjax.look(  # noqa: E731
        params, config, cache, tokens, count=count, tables=tables_of(cache)
    )
    return _executable(("look", config), read, *args)(*args)


def probe(case: Case, cache, *words) -> np.ndarray:
    """Logits [b t w] of DRAFT tokens that read the cache: everything an attention can see of it."""
    weights = model(case.config).params
    return np.asarray(look(weights, case.config, cache, random_ids(DRAFT, "probe", *words))[0])


def feed(cache, tokens, counts, *, op="absorb", piece=PIECE):
    """Remembers K and V cut by `counts`; "append" compresses after each step."""
    parts = zip(
        pieces(tokens.k, counts, piece), pieces(tokens.v, counts, piece), counts, strict=True
    )
    for k, v, count in parts:
        cache = run(op, cache, kvjax.Tokens(jnp.asarray(k), jnp.asarray(v)), count)
        if op == "append":
            cache = run("compress", cache)
    return cache


@functools.cache
def filled(case: Case, seed: int = 0) -> kvjax.Cache:
    """A cache with LENGTHS tokens in its rows: condensed from a model's, or fed random K and V."""
    if case.after:
        ids = random_ids(LONGEST, seed)
        args = dict(max_length=MAX, lengths=LENGTHS, logits="none")
        return kvjax.prefill(model(case.config), ids, case.recipe, **args)[1]
    cache = kvjax.init_cache(case.config, case.recipe, ROWS, MAX)
    tokens = random_tokens(LONGEST, seed, config=case.config)
    return feed(cache, tokens, cuts(generator("fill", seed)))


def names(cases):
    """Parametrizes a law over cases; the slow ones wait for `pytest -m full`."""
    marks = {True: (), False: (pytest.mark.full,)}
    return pytest.mark.parametrize(
        "case", [pytest.param(c, marks=marks[c.quick], id=c.name) for c in cases]
    )


every = names(CASES.values())


def zeros(rows=ROWS):
    return jnp.zeros((rows,), jnp.int32)
