"""Reads weights from a Hugging Face folder: config.json and safetensors files."""

import dataclasses
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np

from kvjax import models
from kvjax.config import ModelConfig
from kvjax.errors import InputError, unknown
from kvjax.models.stack import float_dtype, stack
from kvjax.params import Params

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
MOST_JSON = 1 << 23  # bytes of a header or json file; 4,096 layers of 12 tensors need 6 MB
PLAIN, INDEX = "model.safetensors", "model.safetensors.index.json"
TOWERS = ("vision_tower.", "multi_modal_projector.")  # of multimodal files: not the decoder's


def read(folder, dtype=None) -> tuple[Params, ModelConfig]:
    """(weights, config) of a folder, in `dtype` or by default the type the embedding is stored in.

    Only config.json and safetensors files are read; pickled weights and code never are.
    """
    folder = Path(folder)
    values = _json(folder / "config.json")
    by_type = {t: f for f in models.FAMILIES.values() for t in f.hf_types}
    kind = str(values.get("model_type"))[:60]
    if kind not in by_type:
        raise unknown("model_type in config.json", kind, by_type)
    family = by_type[kind]
    files = _files(folder)
    entries = {}
    for file in files:
        for name, entry in _entries(file).items():
            name = _plain_name(name)
            if name in entries:
                raise InputError(f"{file.name}: tensor {name[:80]} is in two files; get them again")
            entries[name] = entry
    values = {"tie_word_embeddings": "lm_head.weight" not in entries} | values
    config = family.config_from_hf(values)
    if dtype is None:
        embed = entries.get(family.hf_names["embed"])
        dtype = embed.dtype if embed else "float32"
    dtype = float_dtype(dtype)
    config = dataclasses.replace(config, dtype=dtype.name)

    def ignored(name):
        tied = config.style.tied and name == family.hf_names["head"]
        return tied or name.startswith(TOWERS) or name.endswith(".rotary_emb.inv_freq")

    with _Tensors(folder.name, entries) as tensors:
        return stack(tensors, family.hf_names, config, dtype, ignored=ignored), config


def _plain_name(name):
    """The name without what multimodal checkpoints, old and new, put around the text model."""
    for prefix, plain in (
        ("model.language_model.", "model."),
        ("language_model.", ""),
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ):
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name


def _json(path: Path) -> dict:
    """The object of a json file of sane size."""
    if not path.is_file():
        raise InputError(f"{path.parent}: there is no {path.name}; give a Hugging Face folder")
    size = path.stat().st_size
    if size > MOST_JSON:
        raise InputError(f"{path.name} has {size} bytes, expected at most {MOST_JSON}")
    return _parse(path.read_bytes(), path.name)


def _parse(raw: bytes, where) -> dict:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is no JSON ({str(error)[:80]}); get the file again") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: holds a {type(value).__name__}, expected an object")
    return value


def _files(folder: Path) -> list[Path]:
    """The weight files: one, or the shards that the index names."""
    if (folder / PLAIN).is_file():
        return [folder / PLAIN]
    if not (folder / INDEX).is_file():
        raise InputError(f"{folder}: there is neither {PLAIN} nor {INDEX}; get the folder again")
    shards = _json(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise InputError(f"{INDEX}: weight_map is no map of names to files; get the folder again")
    found = []
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard or "\\" in shard or "\0" in shard or shard == "..":
            raise InputError(f"{INDEX}: {shard[:80]!r} is a path, expected a plain file name")
        if not shard.endswith(".safetensors") or not (folder / shard).is_file():
            raise InputError(f"{INDEX}: {shard[:80]!r} is no safetensors file in {folder.name}")
        found.append(folder / shard)
    return found


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One tensor: its file, and where its values start there."""

    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int


def _entries(file: Path) -> dict[str, _Entry]:
    """The tensors of one file, each checked to lie inside it and over no other."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_JSON):
            raise InputError(
                f"{file.name}: header of {length} bytes in a file of {size}; get it again"
            )
        header = _parse(stream.read(length), file.name)
    header.pop("__metadata__", None)
    found, spans = {}, []
    for name, value in header.items():
        dtype, shape, begin, end = _fields(file, name, value)
        if not 0 <= begin <= end <= size - 8 - length:
            raise InputError(
                f"{file.name}: tensor {name[:80]} ends at byte {end} of {size - 8 - length}; "
                "get the file again"
            )
        if math.prod(shape) * dtype.itemsize != end - begin:
            raise InputError(
                f"{file.name}: tensor {name[:80]} has {end - begin} bytes, expected "
                f"{math.prod(shape) * dtype.itemsize} for shape {shape}; get the file again"
            )
        found[name] = _Entry(file, shape, dtype, 8 + length + begin)
        spans.append((begin, end, name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin < end:
            raise InputError(
                f"{file.name}: tensor {name[:80]} starts at byte {begin}, inside another that "
                f"ends at {end}; get the file again"
            )
        end = stop
    return found


def _fields(file, name, value):
    """(dtype, shape, begin, end) of one header entry."""

    def whole(key):
        items = value.get(key)
        good = isinstance(items, list) and len(items) <= 8
        if not good or not all(type(i) is int and 0 <= i < 1 << 48 for i in items):
            raise InputError(
                f"{file.name}: tensor {name[:80]} has {key} {str(items)[:40]}, expected a list of "
                "whole numbers; get the file again"
            )
        return tuple(items)

    if not isinstance(value, dict):
        raise InputError(f"{file.name}: entry {name[:80]} is no object; get the file again")
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(
            f"{file.name}: tensor {name[:80]} has dtype {str(dtype)[:20]!r}, expected one of "
            f"{', '.join(DTYPES)}; kvjax reads no others"
        )
    shape, span = whole("shape"), whole("data_offsets")
    if len(span) != 2:
        raise InputError(
            f"{file.name}: tensor {name[:80]} has {len(span)} data_offsets, expected 2; "
            "get the file again"
        )
    return DTYPES[dtype], shape, *span


class _Tensors:
    """The tensors of open safetensors files."""

    def __init__(self, where, entries):
        self.where, self._entries = where, entries
        self.shapes = {name: entry.shape for name, entry in entries.items()}
        self._open = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for stream in self._open.values():
            stream.close()

    def rows(self, name, start, stop) -> np.ndarray:
        """Rows start..stop in the stored type, [rows, columns]; a vector is one row."""
        entry = self._entries[name]
        if entry.file not in self._open:
            self._open[entry.file] = open(entry.file, "rb")
        columns = entry.shape[-1]
        row_bytes = columns * entry.dtype.itemsize
        stream = self._open[entry.file]
        stream.seek(entry.start + start * row_bytes)
        raw = stream.read((stop - start) * row_bytes)
        if len(raw) != (stop - start) * row_bytes:
            raise InputError(f"{self.where} changed while it was read; load it again")
        return np.frombuffer(raw, entry.dtype).reshape(stop - start, columns)
