"""Result files: JSON lines that grow a row at a time, whole rows only, resumed where they ended."""

import contextlib
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import InputError
from kvjax.lines import append

FORMAT = 1


def parse(path: str | os.PathLike[str]) -> tuple[dict, list[dict], int]:
    """(header, other lines, bytes up to the end of the last whole line) of a result file.

    A last line that was torn by a crash is left out; any other damage raises InputError.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        data = lzma.decompress(data) if path.suffix == ".xz" else data
    except (OSError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot read {path}: {reason}; give a file that kvjax eval wrote"
        ) from None
    whole = data.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        lines.append(_line(f"{path}, line {number}", line))
    if not lines or lines[0]["kind"] != "run" or lines[0].get("format") != FORMAT:
        found = f"format {lines[0].get('format')}" if lines else "an empty file"
        raise InputError(f"{path}: expected results of format {FORMAT}, got {found}; run eval anew")
    return lines[0], lines[1:], whole


FIELDS = {
    "run": ("config", "versions", "hardware"),
    "row": ("model", "task", "item", "recipe", "hash", "code", "asks", "held", "live", "entries"),
    "time": ("model", "task", "item", "recipe"),
    "peer": ("peer",),
}


def _line(where: str, text: bytes) -> dict:
    """A line, with the fields of its kind."""
    try:
        line = json.loads(text)
        kind = line["kind"]
        needed = FIELDS[kind]
    except (ValueError, TypeError, KeyError):
        raise InputError(
            f"{where}: expected a JSON object with a field 'kind', one of {', '.join(FIELDS)}, got "
            f"{text[:40].decode('utf-8', 'replace')!r}; it was not written by kvjax eval"
        ) from None
    if kind == "run" and line.get("format") != FORMAT:
        return line
    for name in needed:
        if name not in line:
            raise InputError(f"{where}: expected a field {name!r} in a line of kind {kind!r}")
    return line


class Log:
    """Lines in memory, and in a file if there is one; the file is the truth after a crash."""

    def __init__(self, header: dict, path: Path | None):
        self.header, self.path, self.lines = header, path, []
        self._stream: Any = None

    def add(self, lines: Iterable[dict]) -> None:
        """Appends lines, all or none: what a full disk cuts off is taken back."""
        lines = list(lines)
        try:
            data = "".join(map(dumps, lines)).encode()
        except ValueError as error:
            at = {k: lines[0].get(k) for k in ("model", "task", "item", "recipe")}
            raise InputError(
                f"a score of {at} is no number ({error}); nothing was written"
            ) from None
        if self._stream is not None:
            try:
                append(self._stream, data)
            except OSError as error:
                raise InputError(
                    f"cannot write {self.path}: {error.strerror}; its rows so far are whole: make "
                    "room and give the same command again to go on"
                ) from error
        self.lines += lines

    def close(self) -> None:
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None


def check(path: str | os.PathLike[str] | None, header: dict, force: bool) -> None:
    """Refuses, before anything runs, a file that cannot be written or holds another run."""
    if path is None:
        return
    path = Path(path)
    if path.name.endswith(".xz"):
        raise InputError(f"{path}: results are written as .jsonl; compress them afterwards")
    if not path.absolute().parent.is_dir():
        raise InputError(f"there is no folder {path.parent}; make it first")
    if os.path.lexists(path) and not force:
        _same(path, parse(path)[0], header)


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str] | None, header: dict, *, force: bool = False,
    current: Callable[[dict], bool] = lambda row: True,
) -> Iterator[Log]:  # fmt: skip
    """The results of a run, new or resumed.

    Rows of a file that is there already are kept where they are `current` (same items, same
    code). force begins anew.
    """
    made = Log(header, None if path is None else Path(path))
    if made.path is not None:
        lock = _locked(made.path) if os.path.lexists(made.path) else None
        if lock is not None and not force:
            old, lines, whole = parse(made.path)
            stale = {at(x) for x in lines if x["kind"] == "row" and not current(x)}
            made.header, made.lines = (
                old,
                [x for x in lines if "task" not in x or at(x) not in stale],
            )
            if len(made.lines) < len(lines):
                _rewrite(made.path, [old, *made.lines])
            elif whole < made.path.stat().st_size:
                os.truncate(made.path, whole)
        else:
            _rewrite(made.path, [header])
        made._stream = _locked(made.path) if lock is None else _again(made.path, lock)
    try:
        yield made
    finally:
        made.close()


def _locked(path: Path) -> int:
    """The file, open to append to and locked: two runs in one file would tear it."""
    import fcntl

    try:
        stream = os.open(path, os.O_WRONLY | os.O_APPEND)
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another run is writing {path}; wait for it or give another --out"
        ) from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; give another --out") from None
    return stream


def _again(path: Path, lock: int) -> int:
    """The locked file itself, or the one that has been written in its place."""
    if os.path.samestat(os.fstat(lock), os.stat(path)):
        return lock
    stream = _locked(path)
    os.close(lock)
    return stream


def at(line: dict) -> tuple:
    """Which item and recipe a row, or its times, is of."""
    return line["model"], line["task"], line["item"], line["recipe"]


def _same(path, old, new):
    """Refuses to mix two runs in one file."""
    for part in ("config", "versions"):
        for name in sorted({*old[part], *new[part]}):
            was, now = old[part].get(name), new[part].get(name)
            while isinstance(was, dict) and isinstance(now, dict) and was != now:
                key = next(k for k in (*now, *was) if was.get(k) != now.get(k))
                name, was, now = f"{name}, {key}", was.get(key), now.get(key)
            if was != now:
                raise InputError(
                    f"{path} was made with {name} = {_short(was)} and this run has {_short(now)}; "
                    "give another --out, or --force to write it anew"
                )


def _short(value) -> str:
    if value is None:
        return "(none)"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 100 else text[:97] + "..."


def dumps(line: dict) -> str:
    """A line of the file."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def _rewrite(path: Path, lines) -> None:
    write(path, "".join(map(dumps, lines)))


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, "utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
