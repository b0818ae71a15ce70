"""Reads weights and metadata from a GGUF file."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np

from kvjax import models
from kvjax.config import ModelConfig
from kvjax.errors import InputError, unknown
from kvjax.models import gguf_header
from kvjax.models.family import GGUF_NAMES
from kvjax.models.stack import float_dtype, stack
from kvjax.params import Params


def read(path, dtype=None) -> tuple[Params, ModelConfig, dict]:
    """(weights, config, metadata) of a GGUF file.

    Weights are dequantized to `dtype`, float32 by default, which is also the config's. The file
    is read a few rows at a time: it is not mapped, and no second copy of the weights is held.
    """
    path = Path(path)
    metadata, entries = gguf_header.read_header(path)
    arch = str(metadata.get("general.architecture"))[:60]
    families = {f.gguf_arch: f for f in models.FAMILIES.values() if f.gguf_arch}
    if arch not in families:
        raise unknown(f"architecture in {path.name}", arch, families)
    family = families[arch]
    dtype = float_dtype(dtype or "float32")
    with _Tensors(path, entries) as tensors:
        assert family.config_from_gguf is not None  # a family with a gguf_arch has it
        config = family.config_from_gguf(metadata, tensors)
        config = dataclasses.replace(config, dtype=dtype.name)
        params = stack(
            tensors,
            GGUF_NAMES,
            config,
            dtype,
            order=_order(config) if family.gguf_permuted else lambda field: None,
            shift=family.gguf_norm_shift,
            ignored=lambda name: name == "rope_freqs.weight",
        )
    return params, config, metadata


def _order(config: ModelConfig):
    """For q and k, the model's row that each row of the file holds.

    The converter pairs up what RoPE rotates together: rows p and p + d/2 of a head become
    2p and 2p + 1. Heads stay whole, so k is undone with its own number of heads.
    """

    def order(field):
        heads = {"q": config.heads, "k": config.kv_heads}.get(field)
        if heads is None:
            return None
        rows = np.arange(heads * config.head_dim).reshape(heads, 2, config.head_dim // 2)
        return rows.swapaxes(1, 2).ravel()

    return order


class _Tensors:
    """The tensors of an open GGUF file, dequantized as they are asked for."""

    def __init__(self, path, entries):
        self.where = path.name
        self.shapes = {name: entry.shape for name, entry in entries.items()}
        self._path, self._entries = path, entries

    def __enter__(self):
        self._file = open(self._path, "rb")
        return self

    def __exit__(self, *error):
        self._file.close()

    def rows(self, name, start, stop) -> np.ndarray:
        """Rows start..stop as float32, [rows, columns]; a vector is one row."""
        entry = self._entries[name]
        self._file.seek(entry.start + start * entry.row_bytes)
        raw = self._file.read((stop - start) * entry.row_bytes)
        if len(raw) != (stop - start) * entry.row_bytes:
            raise InputError(f"{self.where} changed while it was read; load it again")
        data = np.frombuffer(raw, np.uint8).reshape(stop - start, entry.row_bytes)
        if entry.type == gguf.GGMLQuantizationType.F16:
            return data.view(np.float16).astype(np.float32)
        if entry.type == gguf.GGMLQuantizationType.F32:
            return data.view(np.float32)
        return gguf.quants.dequantize(data, entry.type)
