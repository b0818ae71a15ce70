"""Result files: JSON lines that grow a row at a time, whole rows only, resumed where they ended."""

import contextlib
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from kvjax.errors import InputError

FORMAT = 1
ENDS = (".jsonl", ".jsonl.xz")


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
        try:
            lines.append(json.loads(line))
            lines[-1]["kind"]
        except (ValueError, TypeError, KeyError):
            raise InputError(
                f"{path}, line {number}: expected a JSON object with a field 'kind', got "
                f"{line[:40].decode('utf-8', 'replace')!r}; it was not written by kvjax eval"
            ) from None
    if not lines or lines[0]["kind"] != "run" or lines[0].get("format") != FORMAT:
        found = f"format {lines[0].get('format')}" if lines else "an empty file"
        raise InputError(f"{path}: expected results of format {FORMAT}, got {found}; run eval anew")
    return lines[0], lines[1:], whole


class Log:
    """Lines in memory, and in a file if there is one; the file is the truth after a crash."""

    def __init__(self, header: dict, path: Path | None):
        self.header, self.path, self.lines = header, path, []
        self._stream: Any = None

    def add(self, lines: Iterable[dict]) -> None:
        """Appends lines, all or none: what a full disk cuts off is taken back."""
        lines = list(lines)
        if self._stream is not None:
            data = "".join(map(dumps, lines)).encode()
            before = os.fstat(self._stream).st_size
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._stream, data[written:])
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._stream, before)
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
        if os.path.lexists(made.path) and not force:
            old, lines, whole = parse(made.path)
            made.header = old
            made.lines = [line for line in lines if current(line)]
            if len(made.lines) < len(lines):
                _rewrite(made.path, [old, *made.lines])
            elif whole < made.path.stat().st_size:
                os.truncate(made.path, whole)
        else:
            _rewrite(made.path, [header])
        made._stream = os.open(made.path, os.O_WRONLY | os.O_APPEND)
    try:
        yield made
    finally:
        made.close()


def _same(path, old, new):
    """Refuses to mix two runs in one file."""
    for part in ("config", "versions"):
        for name in sorted({*old[part], *new[part]}):
            was, now = old[part].get(name), new[part].get(name)
            if was != now:
                raise InputError(
                    f"{path} was made with {name} = {_short(was)} and this run has {_short(now)}; "
                    "give another --out, or --force to write it anew"
                )


def _short(value) -> str:
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
