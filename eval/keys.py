"""Which code a result depends on: hashes of sources, without comments, docstrings and layout."""

import ast
import functools
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Iterable
from types import ModuleType

import jax
import numpy as np

from kvjax import budgets, codecs, reducers, scorers
from kvjax.config import CacheRecipe, to_json

# What every figure depends on. Tables and methods are not here: a new one changes no old result.
CORE = (
    "kvjax.api kvjax.attention kvjax.budgets.ask kvjax.budgets.best "
    "kvjax.codecs.min_max kvjax.codecs.packing kvjax.codecs.scales kvjax.codecs.turned "
    "kvjax.compare kvjax.decode kvjax.evidence kvjax.generate "
    "kvjax.inputs kvjax.layers kvjax.model kvjax.models.tokenizer kvjax.observing kvjax.params "
    "kvjax.repeating kvjax.sampling kvjax.scorers.seen kvjax.scorers.smoothing kvjax.shapes "
    "kvjax.cache.absorb "
    "kvjax.cache.cache kvjax.cache.condense kvjax.cache.init kvjax.cache.ops kvjax.cache.pool "
    "kvjax.cache.positions kvjax.cache.select kvjax.cache.sizes kvjax.cache.slots "
    "kvjax.cache.spelling kvjax.cache.state kvjax.cache.write kvjax.eval.one kvjax.eval.score "
    "kvjax.eval.rows kvjax.eval.grades kvjax.eval.sandbox"
).split()


def code_of(recipe: CacheRecipe) -> str:
    """Twelve hex digits for the code behind a result of `recipe`."""
    modules = {*CORE, *_method_modules(recipe)}
    return digest([to_json(recipe), *(_source(name) for name in sorted(modules))])


def content(tables) -> str:
    """Hex digits of arrays in dicts, such as the tables of a recipe; empty for none."""
    leaves = jax.tree_util.tree_leaves_with_path(tables)
    return digest(f"{at}{np.asarray(x).tobytes().hex()}" for at, x in leaves) if leaves else ""


def peer_code(told: dict, scripts: Iterable[str], packages: Iterable[str]) -> str:
    """The same for a result of a peer: what it is told, its adapter (the text) and its packages."""
    graded = (_source(name) for name in ("kvjax.eval.rows", "kvjax.eval.grades"))
    return digest([json.dumps(told, sort_keys=True), *packages, *map(stripped, scripts), *graded])


def digest(texts: Iterable[str]) -> str:
    """Twelve hex digits of some texts."""
    made = hashlib.sha256()
    for text in texts:
        made.update(hashlib.sha256(text.encode()).digest())
    return made.hexdigest()[:12]


def _method_modules(recipe: CacheRecipe) -> set[str]:
    found = set()
    if recipe.store is not None:
        pair = codecs.pair(recipe.store)
        found |= {type(x).__module__ for x in (pair.k, pair.v, pair.inside.k, pair.inside.v)}
    if recipe.choice is not None:
        found.add(type(scorers.build(recipe.choice.scorer)).__module__)
        found.add(type(budgets.build(recipe.choice.budget)).__module__)
    if recipe.reducer is not None:
        found.add(type(reducers.build(recipe.reducer)).__module__)
    return found


@functools.cache
def _source(name: str) -> str:
    module = sys.modules.get(name) or importlib.import_module(name)
    return stripped(_text(module))


def _text(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # typed at a prompt: nothing to read
        return module.__name__


def stripped(source: str) -> str:
    """A program's syntax tree without docstrings, as text."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            text = body[0].value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                body[0] = ast.Expr(ast.Constant(""))
    return ast.dump(tree)
