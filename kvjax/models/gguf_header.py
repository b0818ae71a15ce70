"""Reads the header of a GGUF file and checks every number in it against the file's size.

Source: the GGUF specification, version 3 (version 2 has the same layout).
"""

import dataclasses
import math
import struct
from pathlib import Path

import gguf
import numpy as np

from kvjax.errors import InputError

SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9
MOST_ITEMS = 1 << 23  # array entries in the whole header; large vocabularies need under 2 ** 21
MOST_ENTRIES = 1 << 16  # tensors, or metadata fields
MOST_HEADER = 1 << 28  # bytes
TYPES = {
    int(t): t
    for t in (
        getattr(gguf.GGMLQuantizationType, name)
        for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K".split()
    )
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of the file: `shape` with rows first, `start` in bytes from the file's start."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    start: int
    row_bytes: int

    @property
    def size(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


def read_header(path: Path) -> tuple[dict, dict[str, Entry]]:
    """(metadata, tensors by name), or InputError with the first number that does not fit."""
    with open(path, "rb") as file:
        walk = _Walk(file, path.stat().st_size, path.name)
        magic = walk.take(4)
        if magic != b"GGUF":
            raise walk.bad(f"begins with {magic!r}, expected b'GGUF'")
        version = walk.number("I")
        if version not in (2, 3):
            raise walk.bad(f"has GGUF version {version}, expected 2 or 3 (little-endian)")
        tensors, fields = walk.number("Q"), walk.number("Q")
        if max(tensors, fields) > MOST_ENTRIES:
            raise walk.bad(
                f"announces {tensors} tensors and {fields} fields, expected under {MOST_ENTRIES}"
            )
        walk.fits(tensors, 24, "tensors")
        walk.fits(fields, 13, "metadata fields")
        metadata = {}
        for _ in range(fields):
            key = walk.text("a metadata key")
            if key in metadata:
                raise walk.bad(f"has metadata key {key[:60]!r} twice, expected once")
            metadata[key] = walk.value(walk.number("I"), key)
        if metadata.get("split.count", 1) not in (0, 1):
            raise walk.bad(f"is one of {metadata['split.count']} parts; merge them into one file")
        return metadata, _entries(walk, tensors, metadata.get("general.alignment", 32))


class _Walk:
    """Reads forward in a file and never past its end."""

    def __init__(self, file, size, name):
        self.file, self.size, self.name = file, size, name
        self.left = size
        self.items = MOST_ITEMS

    def bad(self, message):
        return InputError(f"{self.name} {message}; get the file again")

    def fits(self, count, each, what):
        """Raises unless `count` things of at least `each` bytes fit into the rest of the file."""
        if count * each > self.left:
            raise self.bad(f"announces {count} {what}, but has {self.left} bytes left for them")

    def take(self, size, what="a number") -> bytes:
        self.fits(size, 1, f"bytes of {what}")
        if self.size - self.left + size > MOST_HEADER:
            raise self.bad(f"has a header of over {MOST_HEADER} bytes, expected less")
        self.left -= size
        data = self.file.read(size)
        if len(data) != size:
            raise self.bad(f"ended {size - len(data)} bytes early while it was read")
        return data

    def number(self, code):
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self, what) -> str:
        raw = self.take(self.number("Q"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.bad(f"has {what[:60]!r} that is not UTF-8: {raw[:20]!r}") from None

    def value(self, kind, key):
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text(key)
        if kind != ARRAY:
            raise self.bad(f"has metadata type {kind} at {key[:60]!r}, expected 0 to 12")
        item, count = self.number("I"), self.number("Q")
        if item != STRING and item not in SCALARS:
            raise self.bad(f"has an array of type {item} at {key[:60]!r}, expected plain values")
        each = 8 if item == STRING else struct.calcsize("<" + SCALARS[item])
        self.fits(count, each, f"entries of {key[:60]!r}")
        self.items -= count
        if self.items < 0:
            raise self.bad(f"has over {MOST_ITEMS} array entries in its header, expected less")
        if item == STRING:
            return [self.text(key) for _ in range(count)]
        data = self.take(count * each, key)
        return np.frombuffer(data, "<" + SCALARS[item]).tolist()


def _entries(walk: _Walk, count, alignment) -> dict[str, Entry]:
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise walk.bad(f"has alignment {str(alignment)[:40]}, expected a power of two")
    found = {}
    for _ in range(count):
        name = walk.text("a tensor name")
        if name in found:
            raise walk.bad(f"has tensor {name[:60]!r} twice, expected once")
        axes = walk.number("I")
        if not 1 <= axes <= 4:
            raise walk.bad(f"has {axes} axes at tensor {name[:60]!r}, expected 1 to 4")
        dims = struct.unpack(f"<{axes}Q", walk.take(8 * axes))
        kind, offset = walk.number("I"), walk.number("Q")
        if kind not in TYPES:
            known = ", ".join(t.name for t in TYPES.values())
            raise walk.bad(f"has type {kind} at tensor {name[:60]!r}, expected one of {known}")
        found[name] = (dims, TYPES[kind], offset)
    start = walk.size - walk.left
    start += -start % alignment
    return _place(walk, found, start, alignment)


def _place(walk: _Walk, found, start, alignment) -> dict[str, Entry]:
    """Entries with absolute starts; each inside the file, aligned, and none over another."""
    entries = {}
    for name, (dims, kind, offset) in found.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if dims[0] % block:
            raise walk.bad(
                f"has rows of {dims[0]} at {name[:60]!r}, expected a multiple of {block}"
            )
        entry = Entry(tuple(reversed(dims)), kind, start + offset, dims[0] // block * block_bytes)
        if offset % alignment:
            raise walk.bad(
                f"has offset {offset} at {name[:60]!r}, expected one divisible by {alignment}"
            )
        end = entry.start + entry.size
        if end > walk.size:
            raise walk.bad(f"has {walk.size} bytes, but tensor {name[:60]!r} ends at {end}")
        entries[name] = entry
    last, end = "the header", start
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.start < end:
            raise walk.bad(f"has tensor {name[:60]!r} at {entry.start}, inside {last[:60]!r}")
        last, end = name, entry.start + entry.size
    return entries
