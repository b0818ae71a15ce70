"""Records of a user's file, checked one by one: what is wrong is told with its line and field."""

import csv
import io
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvjax import commands
from kvjax.errors import InputError

Found = Iterator[tuple[str, dict]]  # where a record is, for messages, and the record
KINDS = {str: "text", list: "a list of texts"}


def read(path: str, split: str) -> Found:
    """The records of a jsonl, csv or parquet file, or of a hub data set (`split` of it)."""
    if not path:
        raise InputError("the task needs a file: give it as asked,path=FILE")
    file = pathlib.Path(path).expanduser()
    if file.suffix in (".jsonl", ".json", ".csv", ".parquet") and not file.is_file():
        raise InputError(f"there is no file {path!r}; check the path")
    if file.suffix in (".jsonl", ".json"):
        return jsonl(path)
    if file.suffix == ".csv":
        return _csv(file)
    if file.suffix == ".parquet":
        return _dataset(path, "train", "parquet", data_files=str(file))
    if file.exists():
        raise InputError(f"{path!r} is no jsonl, csv or parquet file; name it by what it holds")
    return _dataset(path, split, path)


def jsonl(path: str) -> Found:
    """The objects in a file of one JSON object a line; empty lines are passed over."""
    if not path:
        raise InputError("the task needs a file: give it as longbench,path=FILE")
    file = pathlib.Path(path).expanduser()
    return parsed(file.name, commands.read_text(str(file)))


def parsed(name: str, text: str) -> Found:
    """The objects in a text of one JSON object a line; `name` is for messages."""
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: expected a JSON object, found bad JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected a JSON object, found {_short(row)}")
        yield where, row


def _csv(file) -> Found:
    most = csv.field_size_limit(sys.maxsize)  # contexts are longer than its 128 kB
    try:
        # not splitlines: it also cuts at form feeds, which are text
        rows = list(
            csv.DictReader(io.StringIO(commands.read_text(str(file)), newline=""), strict=True)
        )
    except csv.Error as error:
        raise InputError(f"{file.name}: bad CSV: {error}; write it anew") from None
    finally:
        csv.field_size_limit(most)
    for number, row in enumerate(rows, 1):
        yield f"{file.name}, record {number}", {k: v for k, v in row.items() if v}


def _dataset(path, split, name, **options) -> Found:
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        raise InputError(
            f"{path!r} is read with the package datasets; pip install 'kvjax[eval]'"
        ) from None
    try:
        rows = datasets.load_dataset(name, split=split, **options)
    except Exception as error:  # of any library below: it becomes part of our sentence
        said = f"{type(error).__name__}: {error!s:.200}"
        raise InputError(
            f"{path!r} is no local file and cannot be read as a data set with split={split!r} "
            f"({said}); check the name and the split, or give a jsonl file"
        ) from None
    for number, row in enumerate(rows, 1):
        yield f"{path}, record {number}", {k: v for k, v in row.items() if v is not None}


def all_of(found: Found, parse: Callable[[str, dict], Any]) -> list[tuple[str, Any]]:
    """Every record with where it is, parsed, before anything is made of the first."""
    rows = [(where, parse(where, row)) for where, row in found]
    if not rows:
        raise InputError("the file holds no questions; give at least one record")
    return rows


def get(where: str, row: dict, name: str, kind: type, *, empty: bool = False) -> Any:
    """A field that must be there: text (str), or a list of texts."""
    if name not in row:
        raise InputError(
            f"{where}: field {name!r} is missing: expected {KINDS[kind]}, found only the fields "
            f"{', '.join(map(repr, row)) or '(none)'}"
        )
    value = row[name]
    right = isinstance(value, kind)
    if right and kind is list:
        right = all(isinstance(v, str) and v.strip() for v in value)
    if right and not _unicode(value):
        raise InputError(f"{where}: field {name!r}: expected text, found half a surrogate pair")
    if not right or not (empty or (value.strip() if kind is str else value)):
        raise InputError(f"{where}: field {name!r}: expected {KINDS[kind]}, found {_short(value)}")
    return value


def _unicode(value) -> bool:
    try:
        "".join(value).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _short(value):
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"


def labelled(path: str) -> list[dict]:
    """The records of a jsonl file with the fields text and label."""
    return [
        {name: get(where, row, name, str).strip() for name in ("text", "label")}
        for where, row in jsonl(path)
    ]
