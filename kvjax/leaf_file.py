"""A file of named arrays under a JSON header: every dtype bit for bit, every byte checked.

Layout: a prefix (magic, format version, bytes of the header, sha256 of the header), the header,
then the leaves in its order, little-endian, each at the next multiple of 64 bytes and with its own
sha256. int4, int2 and their like take one byte an entry. safetensors would hold most of this, but
knows neither int4 nor checksums.
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from kvjax.errors import InputError

MAGIC, VERSION = b"KVJAXCAC", 1
PREFIX = struct.Struct("<8sQQ32s")
ALIGN = 64
MOST_JSON = 1 << 22  # bytes of a header: some ten thousand leaves
PIECE = 1 << 24  # bytes read at a time
BIG = 1 << 48  # above any size, offset or count

_PLAIN = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
_SMALL = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn int2 int4 uint2 uint4"
).split()
DTYPES = {n: np.dtype(n) for n in _PLAIN} | {n: np.dtype(getattr(ml_dtypes, n)) for n in _SMALL}


@dataclass(frozen=True)
class Leaf:
    """One array of a file: what it is, and where its bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int  # from the start of the file
    nbytes: int
    sha256: str


def write(path, fields: dict, leaves, *, overwrite: bool = False) -> None:
    """Writes header fields and leaves, pairs (name, array), one leaf on the host at a time.

    The file appears whole or not at all: it is written under another name in the same folder,
    synced and renamed. An existing one is replaced only with `overwrite`.
    """
    path = Path(path)
    _may_write(path, overwrite)
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        try:
            with open(part, "xb") as file:
                _write(file, fields, leaves)
                file.flush()
                os.fsync(file.fileno())
            _may_write(path, overwrite)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise InputError(
            f"{path}: not written ({error.strerror or error}); what was there is unchanged"
        ) from error


def _may_write(path, overwrite):
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{path}: give the name of a file in a folder that exists")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists already; pass overwrite=True to replace it")


def _write(file, fields, leaves):
    entries, end = [], 0
    for name, x in leaves:
        dtype = np.dtype(x.dtype)
        if dtype.name not in DTYPES:
            raise InputError(f"{name} has dtype {dtype.name}, which no file of kvjax holds")
        size = math.prod(x.shape) * dtype.itemsize
        entries.append(
            {"name": name, "dtype": dtype.name, "shape": list(x.shape), "offset": up(end),
             "bytes": size, "sha256": "0" * 64}
        )  # fmt: skip
        end = up(end) + size
    data = up(PREFIX.size + len(_text(fields, entries)))
    for entry, (_, x) in zip(entries, leaves, strict=True):
        raw = np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)
        entry["sha256"] = hashlib.sha256(raw.data).hexdigest()
        file.seek(data + entry["offset"])
        file.write(raw)
    file.truncate(data + end)
    text = _text(fields, entries)
    file.seek(0)
    file.write(PREFIX.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest()) + text)


def up(x: int) -> int:
    return -(-x // ALIGN) * ALIGN


def _text(fields, entries) -> bytes:
    text = json.dumps(fields | {"leaves": entries}, sort_keys=True, allow_nan=False)
    if len(text) > MOST_JSON:
        raise InputError(f"the header takes {len(text)} bytes, at most {MOST_JSON} are read")
    return text.encode()


def _sync_folder(folder):
    with contextlib.suppress(OSError):  # not every system syncs folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_header(path) -> tuple[dict, list[Leaf]]:
    """(fields, leaves) of a file, all checked against its size; reads no leaf."""
    path = Path(path)
    try:
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(PREFIX.size)
            if len(prefix) < PREFIX.size or prefix[:8] != MAGIC:
                raise InputError(
                    f"{path.name} begins with {prefix[:8]!r}, expected {MAGIC!r}: no kvjax cache"
                )
            _, version, length, digest = PREFIX.unpack(prefix)
            if version != VERSION:
                raise InputError(
                    f"{path.name} has format version {version}, this kvjax reads {VERSION}; "
                    "save it again with one kvjax"
                )
            if length > min(MOST_JSON, size - PREFIX.size):
                raise InputError(
                    f"{path.name} has {size} bytes and a header of {length}: cut or damaged"
                )
            text = file.read(length)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    if hashlib.sha256(text).digest() != digest:
        raise InputError(f"{path.name}: the header has another sha256 than recorded: damaged")
    fields = _parse(text, path.name)
    return fields, _leaves(fields.pop("leaves", None), up(PREFIX.size + length), size, path.name)


def _parse(text, name) -> dict:
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    try:
        fields = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: the header is no JSON ({str(error)[:80]})") from None
    if not isinstance(fields, dict):
        raise InputError(f"{name}: the header is a {type(fields).__name__}, expected an object")
    return fields


def _leaves(entries, data, size, name) -> list[Leaf]:
    """The leaves of a header, which follow each other without gap or overlap to the file's end."""
    if not isinstance(entries, list):
        raise InputError(f"{name}: the header lists no leaves")
    out, end = [], 0
    for i, entry in enumerate(entries):
        leaf = _leaf(entry, data, f"{name}: leaf {i}")
        if leaf.start != data + up(end):
            raise InputError(
                f"{name}: leaf {i} starts at byte {leaf.start}, expected {data + up(end)}"
            )
        end = up(end) + leaf.nbytes
        out.append(leaf)
    if data + end != size:
        raise InputError(f"{name} has {size} bytes, expected {data + end}: cut or damaged")
    return out


def _leaf(entry, data, where) -> Leaf:
    def get(key, kind):
        value = entry.get(key) if isinstance(entry, dict) else None
        if type(value) is not kind or isinstance(value, int) and not 0 <= value < BIG:
            raise InputError(f"{where} has {key} {repr(value)[:40]}, expected a {kind.__name__}")
        return value

    shape, dtype = get("shape", list), get("dtype", str)
    if len(shape) > 16 or not all(type(n) is int and 0 <= n < BIG for n in shape):
        raise InputError(f"{where} has shape {repr(shape)[:40]}, expected at most 16 whole numbers")
    if dtype not in DTYPES:
        raise InputError(f"{where} has dtype {dtype[:40]!r}, expected one of {', '.join(DTYPES)}")
    want, size = math.prod(shape) * DTYPES[dtype].itemsize, get("bytes", int)
    if size != want:
        raise InputError(f"{where} has {size} bytes, expected {want} of {dtype} {shape}")
    start = data + get("offset", int)
    return Leaf(get("name", str), tuple(shape), DTYPES[dtype], start, size, get("sha256", str))


def read_leaves(path, leaves: list[Leaf]) -> list[np.ndarray]:
    """The arrays of a file, each compared with its sha256."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return [_read(file, leaf, path.name) for leaf in leaves]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read(file, leaf, name) -> np.ndarray:
    raw, digest, done = np.empty(leaf.nbytes, np.uint8), hashlib.sha256(), 0
    file.seek(leaf.start)
    while done < leaf.nbytes:
        piece = raw[done : done + PIECE]
        got = file.readinto(piece.data)
        if not got:
            raise InputError(f"{name} ends after {done} of {leaf.nbytes} bytes of {leaf.name}: cut")
        digest.update(piece[:got].data)
        done += got
    if digest.hexdigest() != leaf.sha256:
        raise InputError(
            f"{name}: {leaf.name[:80]} has sha256 {digest.hexdigest()[:12]}, recorded was "
            f"{leaf.sha256[:12]!r}: damaged"
        )
    if leaf.dtype == np.bool_ and (raw > 1).any():
        raise InputError(f"{name}: {leaf.name[:80]} has bytes {raw.max()}, expected 0 or 1")
    return raw.view(leaf.dtype).reshape(leaf.shape)
