"""Damaged and hostile cache files end in an InputError or in the same cache: no other exception,
no hang, no gigabyte."""

import copy
import hashlib
import json

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import assert_same, filled, model
from test_hostile_files import HUGE, bounded

from kvjax import leaf_file
from kvjax.cache.recipes import recipe
from kvjax.checkpoint import load_cache, save_cache, structure
from kvjax.errors import InputError

MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
ODD = [*HUGE, -1, 0.5, float("1e308"), None, True, "", "x" * 99, [], {}, [0], {"type": "Cache"}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(path, bytes, cache) of a file with a pool, positions, and a sliding-window layer."""
    path, cache = tmp_path_factory.mktemp("hostile") / "c", filled(recipe("kvzip", codec="int8"))
    save_cache(path, cache, model())
    return path, path.read_bytes(), cache


def survives(path):
    """The cache of the file, or None if it was refused in one short line."""
    with bounded():
        try:
            structure(path)
            return load_cache(path, model())
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            return None


def split(whole):
    """(header, leaf data) of a file."""
    length = int.from_bytes(whole[16:24], "little")
    start = leaf_file.PREFIX.size
    return json.loads(whole[start : start + length]), whole[leaf_file.up(start + length) :]


def signed(header, data) -> bytes:
    """A file whose header is well signed, whatever it says."""
    text = json.dumps(header).encode()
    prefix = leaf_file.PREFIX.pack(
        leaf_file.MAGIC, leaf_file.VERSION, len(text), hashlib.sha256(text).digest()
    )
    whole = prefix + text
    return whole + bytes(leaf_file.up(len(whole)) - len(whole)) + data


def places(value, at=()):
    """Paths of everything inside a JSON value."""
    if at:
        yield at
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*at, key))


def replaced(header, at, value):
    header = copy.deepcopy(header)
    inner = header
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return header


@MANY
@given(data=st.data())
def test_flipped_and_cut_bytes(saved, data):
    path, whole, cache = saved
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        near = data.draw(st.sampled_from([8, 24, 56, 4000, len(whole) - 1]))
        damaged[data.draw(st.integers(0, near))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.sampled_from([None, 0, 7, 56, len(whole) // 2, len(whole) - 1]))
    path.write_bytes(damaged[:cut])
    again = survives(path)
    if again is not None:  # padding was hit
        assert_same(cache, again)


@MANY
@given(data=st.data())
def test_header_lengths_of_any_size(saved, data):
    path, whole, _ = saved
    length = data.draw(st.sampled_from(HUGE)).to_bytes(8, "little")
    at = data.draw(st.sampled_from([8, 16]))
    path.write_bytes(whole[:at] + length + whole[at + 8 :])
    again = survives(path)
    assert again is None or path.read_bytes() == whole


@MANY
@given(data=st.data())
def test_well_signed_headers_that_lie(saved, data):
    path, whole, cache = saved
    header, leaves = split(whole)
    area = data.draw(st.sampled_from(["leaves", "cache", "cache", "model"]))
    paths = [p for p in places(header) if p[0] == area]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(paths))
        try:
            header = replaced(header, at, data.draw(st.sampled_from(ODD)))
        except (KeyError, IndexError, TypeError):
            continue  # the first change took the place of the second
    path.write_bytes(signed(header, leaves))
    survives(path)


def lie(saved, at, value, *parts):
    path, whole, _ = saved
    header, leaves = split(whole)
    path.write_bytes(signed(replaced(header, at, value), leaves))
    with pytest.raises(InputError) as error:
        load_cache(path, model())
    assert all(p in str(error.value) for p in parts), str(error.value)


GROUP, BODY = ("cache", "groups", 0), ("cache", "groups", 0, "bodies", 0)
POOL = ("cache", "pool")


@pytest.mark.parametrize(
    "at, value, parts",
    [
        (("cache", "type"), "os.system", ["os.system"]),
        (("cache", "max_length"), 40, ["max_length", "40"]),
        (("cache", "recipe", "keep"), 2.0, ["keep", "2.0"]),
        (("cache", "recipe", "store", "k", "name"), "rav", ["rav", "'raw'"]),
        (("cache", "recipe", "store", "k", "options"), [["group", 0]], ["not valid"]),
        (("cache", "recipe", "store", "k", "name"), "raw", ["codes"]),
        (("cache", "recipe", "choice", "budget", "name"), "uniform", ["pooled", "0", "None"]),
        (("cache", "recipe", "chunk"), 0, ["chunk", "0"]),
        (("cache", "seen"), 0, ["order of the leaves"]),
        ((*GROUP, "stop"), 1, ["tail.k", "[2,", "[1,"]),
        ((*GROUP, "window"), 8, ["window", "8", "None"]),
        ((*GROUP, "bodies"), [], ["order of the leaves"]),
        ((*BODY, "page"), 64, ["page", "64", "32"]),
        ((*BODY, "heads"), 2, ["no part of a cache"]),
        ((*BODY, "closed"), True, ["closed", "pool"]),
        ((*GROUP, "pooled"), None, ["pooled", "None", "0"]),
        ((*GROUP, "pooled"), 1, ["pooled", "1", "0"]),
        (POOL, None, ["order of the leaves"]),
        ((*POOL, "page"), 64, ["page", "64", "32"]),
        ((*POOL, "most"), 0, ["most", "0"]),
        ((*POOL, "most"), 2**20, ["most", str(2**20)]),
        ((*POOL, "type"), "Slots", ["Slots", "no part of a cache"]),
        ((*BODY, "closed"), 1, ["closed", "1", "bool"]),
        ((*BODY, "temperature"), 0.0, ["temperature", "0.0"]),
        (("leaves", 0, "offset"), 64, ["starts at byte"]),
        (("leaves", 1, "offset"), 0, ["starts at byte"]),
        (("leaves", 0, "shape", 0), 2**40, ["bytes", str(2**40)]),
        (("leaves", 0, "dtype"), "object", ["object", "bfloat16"]),
        (("leaves", 0, "dtype"), "int32", ["int32", "float32"]),
        (("leaves", 0, "sha256"), "0" * 64, ["sha256", "0" * 12]),
        (("model", "config", "layers"), 3, ["another model", "layers", "3"]),
    ],
)
def test_each_lie_is_named(saved, at, value, parts):
    lie(saved, at, value, *parts)


def test_deep_and_wide_headers(saved):
    path, whole, _ = saved
    header, leaves = split(whole)
    deep = [0]
    for _ in range(400):
        deep = [deep]
    path.write_bytes(signed(replaced(header, ("cache", "groups"), deep), leaves))
    assert survives(path) is None
    text = b'{"cache": ' + b"[" * 200_000
    prefix = leaf_file.PREFIX.pack(leaf_file.MAGIC, 1, len(text), hashlib.sha256(text).digest())
    path.write_bytes(prefix + text)
    assert survives(path) is None
    number = b'{"leaves": ' + b"9" * 100_000 + b"}"
    prefix = leaf_file.PREFIX.pack(leaf_file.MAGIC, 1, len(number), hashlib.sha256(number).digest())
    path.write_bytes(prefix + number)
    assert survives(path) is None


def test_positions_that_lie_are_refused(saved):
    path, whole, cache = saved
    header, data = split(whole)
    flat = jax.tree_util.tree_leaves_with_path(cache)
    for i, (at, _) in enumerate(flat):
        name, entry = jax.tree_util.keystr(at), header["leaves"][i]
        if not name.endswith(
            (".pos", ".owner", ".first", ".count", ".base", ".seen", ".edge", ".high")
        ):
            continue
        start, stop = entry["offset"], entry["offset"] + entry["bytes"]
        bad = data[:start] + b"\x7f" * (stop - start) + data[stop:]
        digest = hashlib.sha256(bad[start:stop]).hexdigest()
        path.write_bytes(signed(replaced(header, ("leaves", i, "sha256"), digest), bad))
        with pytest.raises(InputError, match="must be at least"):
            load_cache(path, model())
