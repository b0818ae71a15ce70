"""Stacks a checkpoint's tensors into Params, holding little more than the result."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import ModelConfig
from kvjax.errors import InputError, unknown
from kvjax.models.family import Tensors
from kvjax.params import Params, abstract_params

CHUNK_BYTES = 4 << 20  # of float32 rows read at a time
ALIGNMENT = 64  # jax takes a numpy buffer over without a copy where its address divides by this


def stack(
    tensors: Tensors,
    names: Mapping[str, str],
    config: ModelConfig,
    dtype,
    *,
    order: Callable[[str], np.ndarray | None] = lambda field: None,
    shift: float = 0.0,
    ignored: Callable[[str], bool] = lambda name: False,
) -> Params:
    """The weights of `config` in `dtype`. Names and shapes are checked before anything is read.

    `order(field)[r]` is the row of the model that the file's row r holds; `shift` is taken off
    norm weights before they are rounded to `dtype`.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract_params(config, dtype))
    plan = []
    for path, leaf in leaves:
        field = path[-1].name
        stacked = len(path) > 1
        shape = _stored_shape(field, leaf.shape[1:] if stacked else leaf.shape)
        count = config.layers if stacked else 1
        files = [names[field].format(i=i) for i in range(count)]
        for name in files:
            _check_shape(tensors, name, shape)
        plan.append((leaf, field, files, shape))
    known = {name for _, _, files, _ in plan for name in files}
    extra = next((n for n in tensors.shapes if n not in known and not ignored(n)), None)
    if extra is not None:
        raise InputError(
            f"{tensors.where}: tensor {extra[:80]} of shape {tensors.shapes[extra]} has no place "
            f"in a {config.family} model; kvjax cannot run this variant"
        )
    out = []
    for leaf, field, files, shape in plan:
        values = aligned(leaf.shape, leaf.dtype)
        rows = values.reshape(len(files), *(shape if len(shape) == 2 else (1, *shape)))
        for name, target in zip(files, rows, strict=True):
            off = shift if field.endswith("norm") else 0.0
            _copy(tensors, name, target, order(field), off)
        out.append(jax.device_put(values))
    return jax.tree.unflatten(treedef, out)


def float_dtype(dtype) -> np.dtype:
    """The numpy dtype that a name of a float type stands for."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise unknown("dtype", str(dtype), ("float32", "bfloat16", "float16"))
    return found


def aligned(shape, dtype) -> np.ndarray:
    """An empty array whose address jax can take over."""
    dtype = jnp.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _stored_shape(field, shape):
    """The matrix or vector that checkpoints store for one layer of a leaf: heads are flattened."""
    if field in ("q", "k", "v"):
        return (shape[0] * shape[1], shape[2])
    if field == "o":
        return (shape[0], shape[1] * shape[2])
    if field.endswith("bias"):
        return (shape[0] * shape[1],)
    return tuple(shape)


def _check_shape(tensors, name, expected):
    found = tensors.shapes.get(name)
    if found is None:
        raise InputError(
            f"{tensors.where}: tensor {name} is missing, expected shape {expected}; "
            "get the file again"
        )
    if tuple(found) != tuple(expected):
        raise InputError(
            f"{tensors.where}: tensor {name} has shape {tuple(found)}, expected {expected}; "
            "get the file again"
        )


def _copy(tensors, name, target, order, shift):
    """Writes one tensor into `target` [rows, columns], a few rows at a time."""
    rows, columns = target.shape
    step = max(1, CHUNK_BYTES // (4 * columns))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        with np.errstate(all="ignore"):
            part = tensors.rows(name, start, stop)
            part = (part - shift if shift else part).astype(target.dtype, copy=False)
        if not np.isfinite(part).all():
            raise InputError(
                f"{tensors.where}: tensor {name} holds NaN or infinity in rows {start} to "
                f"{stop - 1} as {target.dtype}; get the file again or name another dtype"
            )
        if order is None:
            target[start:stop] = part
        else:
            target[order[start:stop]] = part
