"""Tables of a model in a file: what was trained or calibrated for it."""

import os
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import leaf_file
from kvjax.cache.recipes import RECIPES
from kvjax.checkpoint import identity, same_model
from kvjax.config import CacheRecipe
from kvjax.errors import InputError
from kvjax.models import fetch

END = ".tables"


def save_tables(path: str | os.PathLike[str], tables, model: Any, *, overwrite: bool = False):
    """Writes tables, dicts of arrays [l ...], with the identity of their model.

    The file appears whole or not at all; an existing one is kept unless `overwrite`.
    """
    leaves = []
    for at, leaf in jax.tree_util.tree_flatten_with_path(tables)[0]:
        if not all(isinstance(step, jax.tree_util.DictKey) for step in at):
            raise InputError(f"tables{jax.tree_util.keystr(at)} is not in a dict of dicts")
        leaves.append((jax.tree_util.keystr(at, simple=True, separator="/"), leaf))
    leaf_file.write(path, {"model": identity(model), "tables": 1}, leaves, overwrite=overwrite)


def load_tables(path: str | os.PathLike[str], model: Any) -> dict[str, Any]:
    """The tables of a file; InputError if it is damaged, or of another model."""
    name = Path(path).name
    fields, leaves = leaf_file.read_header(path)
    if fields.get("tables") != 1:
        raise InputError(f"{name} holds no tables")
    same_model(name, fields.get("model"), identity(model))
    made: dict[str, Any] = {}
    for leaf, value in zip(leaves, leaf_file.read_leaves(path, leaves), strict=True):
        *folders, last = leaf.name.split("/")
        at = made
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = jnp.asarray(value)
    return made


def folder(model: str | os.PathLike[str]) -> Path:
    """Where `kvjax train` puts the tables of a model, and `load` finds them."""
    return fetch.cache_folder() / "tables" / Path(model).name


def found(name: str | os.PathLike[str], model: Any) -> dict[str, Any]:
    """The tables by recipe that were trained for a model.

    A file that is damaged or of another model, of weights of another dtype say, is left out with a
    warning: only the recipe that needs it cannot be used.
    """
    made = {}
    for path in sorted(folder(name).glob(f"*{END}")):
        try:
            made[path.stem] = load_tables(path, model)
        except InputError as error:
            warnings.warn(
                f"{path} is left out: {error}; `kvjax train {path.stem} --force` makes it anew",
                stacklevel=3,
            )
    return made


def missing(recipe: CacheRecipe, tables: dict[str, Any]) -> str | None:
    """What a recipe needs of a model and has not got, as a sentence; None if it can be used."""
    entry = RECIPES.get(recipe.name)
    if entry is None or not entry.needs or recipe.name in tables:
        return None
    if recipe.name == "finch":
        return None if recipe.window else f"finch needs {entry.needs}: kvjax.prefill(question=)"
    return (
        f"{recipe.name} needs {entry.needs}: run `kvjax train {recipe.name}` once, or set "
        f"model.tables[{recipe.name!r}]"
    )
