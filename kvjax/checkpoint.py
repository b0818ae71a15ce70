"""Caches on disk: saved whole with what they belong to, opened on any mesh or refused by name."""

import dataclasses
import hashlib
import json
import os
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import leaf_file, sharding
from kvjax.cache import recipes
from kvjax.cache.cache import Cache, LayerCache, Tail
from kvjax.cache.pool import Pool
from kvjax.cache.slots import Slots
from kvjax.cache.state import State
from kvjax.cache.valid import check_shapes, check_values, same, short
from kvjax.config import CacheRecipe, from_json, to_json
from kvjax.errors import InputError
from kvjax.params import abstract_params

TYPES: dict[str, typing.Any] = {
    t.__name__: t for t in (Cache, LayerCache, Tail, Slots, State, Pool)
}
"""The nodes that a file may name. Nothing is imported or unpickled by name."""

DEEP = 16


def save_cache(
    path: str | os.PathLike[str], cache: Cache, model: Any, *, overwrite: bool = False
) -> None:
    """Writes a cache to one file: leaves bit for bit, recipe, positions, and whose cache it is.

    The file appears whole or not at all; an existing one is kept unless `overwrite`. A cache on a
    mesh is gathered a leaf at a time.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(cache)
    tree = _describe(jax.tree.unflatten(treedef, range(len(flat))))
    tree = json.loads(json.dumps(tree, default=lambda x: x.item()))  # settings of numpy
    names = [jax.tree_util.keystr(at) for at, _ in flat]
    same("the tree as it would be read", _treedef(tree, names), treedef)
    check_shapes(cache, model.config)
    check_values(cache)
    fields = {"model": identity(model), "cache": tree}
    leaves = [(name, x) for name, (_, x) in zip(names, flat, strict=True)]
    leaf_file.write(path, fields, leaves, overwrite=overwrite)


def load_cache(
    path: str | os.PathLike[str], model: Any, *, recipe: CacheRecipe | None = None
) -> Cache:
    """The cache of a file, placed on the mesh of `model`, whichever mesh it was saved from.

    Raises InputError if it is damaged, of another model or format version, or of another recipe
    than `recipe`. Nothing is read before the header fits the file and the model.
    """
    name = Path(path).name
    fields, leaves = leaf_file.read_header(path)
    same_model(name, fields.get("model"), identity(model))
    try:
        treedef = _treedef(fields.get("cache"), [x.name for x in leaves])
        cache = treedef.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
        if recipe is not None:
            _same_recipe(cache, recipe)
        check_shapes(cache, model.config)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    host = treedef.unflatten(leaf_file.read_leaves(path, leaves))
    try:
        check_values(host)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if model.mesh is None:
        return jax.tree.map(jax.device_put, host)
    return sharding.place(host, sharding.cache_specs(host, model.mesh), model.mesh)


def structure(path) -> dict:
    """What a cache file holds, its leaves unread: model, recipe, max_length, leaves by name."""
    fields, leaves = leaf_file.read_header(path)
    cache = fields.get("cache")
    if not isinstance(cache, dict) or not isinstance(fields.get("model"), dict):
        raise InputError(f"{Path(path).name}: the header describes no cache")
    return {
        "version": leaf_file.VERSION,
        "model": fields["model"],
        "recipe": cache.get("recipe"),
        "max_length": cache.get("max_length"),
        "bytes": sum(x.nbytes for x in leaves),
        "leaves": {
            x.name: {"dtype": x.dtype.name, "shape": x.shape, "bytes": x.nbytes} for x in leaves
        },
    }


def identity(model) -> dict:
    """Which model this is: its config, and a sha256 over a sample of every weight.

    The sample has up to 512 rows of the leading axis, so that every layer counts, and of each the
    first 64 entries at the middle of the axes between. Equal on every mesh, and for weights that
    are stacked or apart.
    """
    digest = hashlib.sha256()
    samples = jax.tree.leaves(_samples(model.params))
    whole = abstract_params(model.config, model.params.embed.dtype)
    for (at, x), part in zip(jax.tree.leaves_with_path(whole), samples, strict=True):
        digest.update(f"{jax.tree_util.keystr(at)} {part.dtype} {x.shape}".encode())
        digest.update(np.asarray(part).reshape(-1).view(np.uint8).data)
    return {"config": json.loads(to_json(model.config)), "weights": digest.hexdigest()}


@jax.jit
def _samples(params):
    if isinstance(params.blocks, tuple):  # layers apart: sampled one by one, then stacked
        one = [jax.tree.map(lambda x: _sample(x[None])[0], block) for block in params.blocks]
        blocks = jax.tree.map(lambda *x: _rows(jnp.stack(x)), *one)
    else:
        blocks = jax.tree.map(_sample, params.blocks)
    return jax.tree.map(_sample, params.replace(blocks=None)).replace(blocks=blocks)


def _sample(x):
    x = _rows(x)
    while x.ndim > 2:
        x = x[:, x.shape[1] // 2]
    return x[:, :64] if x.ndim == 2 else x


def _rows(x):
    return x[:: max(1, x.shape[0] // 256)]


def same_model(name, saved, mine):
    saved = saved if isinstance(saved, dict) else {}
    for part in ("config", "weights"):
        found = _difference(saved.get(part), mine[part], part)
        if found:
            raise InputError(
                f"{name} is of another model: its {found[0]} is {short(found[1])} and this model "
                f"has {short(found[2])}; load the model it was saved with"
            )


def _same_recipe(cache, recipe):
    wanted = recipes.resolve(recipe, cache.max_length)
    saved, mine = (json.loads(to_json(r)) for r in (cache.recipe, wanted))
    found = _difference(saved, mine, "recipe")
    if found:
        raise InputError(
            f"its {found[0]} is {short(found[1])} and {short(found[2])} was asked for; a cache "
            "keeps its recipe: leave recipe out, or make the cache again"
        )


def _difference(saved, mine, where) -> tuple | None:
    """(where, saved, mine) of the first place in which two JSON values differ; None if equal."""
    if isinstance(saved, dict) and isinstance(mine, dict):
        pairs = [(f"{where}.{k}", saved.get(k), mine.get(k)) for k in sorted(mine)]
        pairs += [(f"{where}.{k}", saved[k], None) for k in sorted(set(saved) - set(mine))]
    elif isinstance(saved, list) and isinstance(mine, list) and len(saved) == len(mine):
        pairs = [(f"{where}[{i}]", *p) for i, p in enumerate(zip(saved, mine, strict=True))]
    else:
        return None if saved == mine else (where, saved, mine)
    return next((d for d in (_difference(a, b, w) for w, a, b in pairs) if d), None)


# A tree as JSON: null, a leaf's number, a list (tuple), {"dict": ...}, or a node with its fields.


def _describe(node) -> typing.Any:
    if node is None or type(node) is int:
        return node
    if type(node) is tuple:
        return [_describe(x) for x in node]
    if type(node) is dict:
        return {"dict": {k: _describe(v) for k, v in node.items()}}
    name = type(node).__name__
    if TYPES.get(name) is not type(node):
        raise InputError(f"a cache that holds a {name} cannot be saved; files have {list(TYPES)}")
    out: dict[str, typing.Any] = {"type": name}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.metadata.get("pytree_node", True):
            out[field.name] = _describe(value)
        else:
            out[field.name] = dataclasses.asdict(value) if field.name == "recipe" else value
    return out


def _treedef(tree, names):
    """The tree that a header describes, whose leaves are those of `names` in order, each once."""
    cache = _rebuild(tree, range(len(names)))
    flat, treedef = jax.tree_util.tree_flatten_with_path(cache)
    same("order of the leaves", [x for _, x in flat], list(range(len(names))))
    same("names of the leaves", names, [jax.tree_util.keystr(at) for at, _ in flat])
    return treedef


def _rebuild(value, leaves, depth=0) -> typing.Any:
    if value is None:
        return None
    if type(value) is int and 0 <= value < len(leaves):
        return leaves[value]
    if depth < DEEP and isinstance(value, list):
        return tuple(_rebuild(x, leaves, depth + 1) for x in value)
    if depth < DEEP and isinstance(value, dict):
        if set(value) == {"dict"} and isinstance(value["dict"], dict):
            return {k: _rebuild(v, leaves, depth + 1) for k, v in value["dict"].items()}
        kind = TYPES.get(str(value.get("type")))
        if kind and set(value) == {"type", *(f.name for f in dataclasses.fields(kind))}:
            hints = typing.get_type_hints(kind)
            return kind(**{
                f.name: _rebuild(value[f.name], leaves, depth + 1)
                if f.metadata.get("pytree_node", True)
                else _setting(hints[f.name], value[f.name], f.name)
                for f in dataclasses.fields(kind)
            })  # fmt: skip
    what = value.get("type", value) if isinstance(value, dict) else value
    raise InputError(f"the header has {short(what)} in its tree, which is no part of a cache")


def _setting(kind, value, name):
    """A static field: of exactly the declared type."""
    if kind is CacheRecipe:
        try:
            made: typing.Any = from_json(CacheRecipe, json.dumps(value))
            return recipes.valid(made)
        except InputError:
            raise
        except (ValueError, TypeError) as error:
            raise InputError(f"the recipe in the header is not one: {str(error)[:120]}") from None
    if kind is float and type(value) is int and abs(value) < 1 << 31:
        return float(value)
    if type(value) not in (typing.get_args(kind) or (kind,)):
        raise InputError(f"{name} is {short(value)}, expected {kind}")
    if type(value) is int and not 0 <= value < 1 << 31:
        raise InputError(f"{name} is {short(value)}, expected at least 0 and below 2**31")
    return value
