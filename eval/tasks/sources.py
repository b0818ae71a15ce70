"""Source files of the interpreter's own standard library, and the places in them to ask about."""

import builtins
import functools
import io
import keyword
import pathlib
import sysconfig
import tokenize

from kvjax.errors import InputError
from kvjax.eval.tasks import texts

KNOWN = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins)}
NO_CODE = {  # folders whose files are tables or tests, or not the interpreter's
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3"),
    *("encodings", "pydoc_data", "__pycache__"),
}
BUILT = ("config-", "_sysconfigdata")  # written when Python is built: they differ by machine


@functools.lru_cache(maxsize=1)
def files() -> tuple[pathlib.Path, ...]:
    """All source files, sorted: the same ones for one version of Python."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    found = [(file.relative_to(root).parts, file) for file in root.rglob("*.py")]
    return tuple(
        file
        for parts, file in sorted(found)
        if not NO_CODE & set(parts) and not any(part.startswith(BUILT) for part in parts)
    )


def long_files(size: int, seed: int) -> list[pathlib.Path]:
    """Source files of at least `size` bytes in an order that depends on the seed."""
    found = [file for file in files() if file.stat().st_size >= size]
    if not found:
        raise InputError(
            f"of the {len(files())} source files of the standard library none has {size} bytes; "
            "lower length, or use a Python that is installed with its sources"
        )
    texts.rng("sources", seed, -1).shuffle(found)
    return found


@functools.lru_cache(maxsize=64)
def read(file: pathlib.Path) -> str:
    """The text of a source file."""
    with tokenize.open(file) as stream:  # knows the encoding that the file declares
        return stream.read()


def _tokens(text):
    """Tokens of a source, each after the offset of its first character."""
    first = [0]
    for line in text.split("\n"):
        first.append(first[-1] + len(line) + 1)
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):  # a file that is meant to be wrong
        return []
    return [(first[t.start[0] - 1] + t.start[1], t) for t in tokens if t.string.strip()]


@functools.lru_cache(maxsize=64)
def names(text: str) -> tuple[tuple[int, str], ...]:
    """Long names that occur earlier in the source: (offset, name), without keywords, builtins."""
    found, seen = [], set()
    for start, token in _tokens(text):
        name = token.string
        if token.type == tokenize.NAME and len(name) >= 6 and name not in KNOWN:
            if name in seen:
                found.append((start, name))
            seen.add(name)
    return tuple(found)


@functools.lru_cache(maxsize=64)
def lines(text: str) -> tuple[tuple[int, str], ...]:
    """Lines of code of 10 to 60 characters: (offset after the indentation, the rest)."""
    found, end = [], 0  # end: the last row that the tokens so far reach
    for start, token in _tokens(text):
        if token.start[0] > end and token.type in (tokenize.NAME, tokenize.OP):
            line = token.line.split("\n")[0][token.start[1] :].rstrip()
            if 10 <= len(line) <= 60 and "#" not in line:  # a comment cannot be guessed
                found.append((start, line))
        end = max(end, token.end[0])
    return tuple(found)
