"""Logical axes to mesh axes: the only file that names a mesh axis.

Every leaf of a cache that grows with tokens is [layers, batch, rows, ...]; per-row numbers are
[batch]. A logical axis whose mesh axis is missing from the mesh, or does not divide, is replicated;
where kv heads do not divide the model axis a warning says so.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax.errors import InputError


@dataclass(frozen=True)
class Rules:
    """Mesh axis of each logical axis; None replicates."""

    batch: str | None = "data"
    rows: str | None = "model"
    heads: str | None = "model"
    kv_heads: str | None = "model"
    mlp: str | None = "model"
    vocab: str | None = "model"
    embed: str | None = None


RULES = Rules()

AXES = {  # logical axes of each weight
    "embed": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "q": (None, "heads", None, "embed"),
    "k": (None, "kv_heads", None, "embed"),
    "v": (None, "kv_heads", None, "embed"),
    "o": (None, "embed", "heads", None),
    "gate": (None, "mlp", "embed"),
    "up": (None, "mlp", "embed"),
    "down": (None, "embed", "mlp"),
    "q_bias": (None, "heads", None),
    "k_bias": (None, "kv_heads", None),
    "v_bias": (None, "kv_heads", None),
}


def _spec(shape, logical, mesh, rules) -> P:
    out = []
    for size, name in zip(shape, logical, strict=True):
        axis = getattr(rules, name) if name else None
        width = dict(mesh.shape).get(axis, 1) if axis else 1
        out.append(axis if axis and width > 1 and size % width == 0 else None)
    used = [a for a in out if a]
    if len(used) != len(set(used)):
        raise ValueError(f"{logical} puts two axes of one array on the mesh axes {used}")
    return P(*out)


def _warn(sizes, axis, mesh):
    """One warning for all leaves whose kv heads (or budget rows) a mesh axis does not divide."""
    width = dict(mesh.shape).get(axis, 1) if axis else 1
    odd = sorted({size for size in sizes if size % width})
    if odd:
        warnings.warn(
            f"kv heads or budget rows of {', '.join(map(str, odd))} do not divide the mesh axis "
            f"{axis!r} of {width}: those leaves are replicated over it", stacklevel=3,
        )  # fmt: skip


def param_specs(params, mesh, rules: Rules = RULES):
    """PartitionSpecs of a tree of weights (or of its shapes)."""

    def of(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        axes = AXES.get(name, (None,) * leaf.ndim)
        return _spec(leaf.shape, axes[len(axes) - leaf.ndim :], mesh, rules)  # no layers if apart

    return jax.tree_util.tree_map_with_path(of, params)


def cache_specs(cache: Any, mesh: Mesh | AbstractMesh, rules: Rules = RULES) -> Any:
    """PartitionSpecs of a cache, an abstract one too: batch and rows (of kv heads) are sharded.

    Warns once where the mesh does not divide the kv heads, which are then replicated.
    """
    _warn([x.shape[2] for x in jax.tree.leaves(cache) if x.ndim > 2], rules.rows, mesh)
    return _cache_specs(cache, mesh, rules)


def _cache_specs(cache, mesh, rules):
    def of(leaf):
        axes = {1: ("batch",), 2: (None, "batch")}.get(leaf.ndim, (None, "batch", "rows"))
        return _spec(leaf.shape, axes + (None,) * (leaf.ndim - len(axes)), mesh, rules)

    return jax.tree.map(of, cache)


def place(tree, specs, mesh):
    """Puts a tree of arrays on a mesh (its axes made Auto) by its specs."""
    mesh = auto(mesh)
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def auto(mesh: Mesh) -> Mesh:
    """The mesh of the same devices and names whose axes are all Auto: what kvjax computes on.

    `jax.make_mesh` makes Explicit axes unless told; there each operation must say its sharding.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def local(fn, cache, new, count, tables=None, *, agree=False):
    """Runs `fn(cache, new, count, tables)`, which treats rows and kv heads apart, on each shard.

    Without a mesh, or inside a caller's own shard_map, it is a call; with a mesh, the loops over
    rows stay inside a device and no cache leaf is gathered. agree: flags that a shard sets for its
    own heads are set on all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return fn(cache, new, count, tables)
    if AxisType.Explicit in mesh.axis_types:
        raise InputError(
            f"the mesh in force has Explicit axes {mesh.axis_names}; make it with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )
    specs = _cache_specs(cache, mesh, RULES)  # placing the cache has already warned
    row = specs.seen
    heads = specs.groups[0].tail.k[2] if specs.groups else None
    like = P(None, row[0], None, heads)
    new_specs = jax.tree.map(lambda x: like, new)
    by_head = {"features": P(None, heads)}  # of a state: an axis of kv heads after the layers
    table_specs = {x: by_head.get(x, P()) for x in tables} if isinstance(tables, dict) else P()

    def run(*args):
        made = fn(*args)
        if not agree or heads is None:
            return made
        flags = jax.lax.all_gather(made.flags, heads)
        return made.replace(flags=jnp.bitwise_or.reduce(flags, axis=0))

    return jax.shard_map(
        run, in_specs=(specs, new_specs, row, table_specs), out_specs=specs, check_vma=False
    )(cache, new, count, tables)


def by_rows(fn, *args):
    """Runs `fn(*args)`, all of whose arrays have the batch leading, on the rows of each shard.

    Without a mesh that shards the batch, or inside a caller's own shard_map, it is a call.
    """
    mesh, axis = jax.sharding.get_abstract_mesh(), RULES.batch
    width = 1 if mesh.empty else dict(mesh.shape).get(axis, 1)
    if width == 1 or mesh.manual_axes or jax.tree.leaves(args)[0].shape[0] % width:
        return fn(*args)
    assert axis is not None
    run = jax.shard_map(fn, in_specs=P(axis), out_specs=P(axis), axis_names={axis}, check_vma=False)
    return run(*args)
