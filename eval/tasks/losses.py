"""Loss on real text."""

import functools
import pathlib
from dataclasses import dataclass
from typing import Any

from kvjax import commands
from kvjax.errors import InputError
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import sources, texts


@dataclass(frozen=True)
class Loss:
    """Asks for the next tokens of a long text: their loss.

    text: "prose" (Moby Dick), "code" (the interpreter's standard library, one file for each item
    while there are any; the items depend on the version of Python), or the path of a UTF-8 file.
    Source: fixed-length segments of held-out text, as in Rae et al. 2020 (arXiv:1911.05507).
    """

    text: str = "prose"
    length: int = 1536  # tokens of the context
    scored: int = 256  # tokens after the one that follows the context
    recent: int = 128  # last tokens of the context that a reader without memory sees

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        if min(self.length - self.recent, self.recent, self.scored) < 1:
            raise InputError(
                f"length={self.length}, recent={self.recent} and scored={self.scored}: "
                "each must be at least 1, and recent below length"
            )
        return [self._item(tokenizer, seed, index) for index in range(count)]

    def _item(self, tokenizer, seed, index):
        first = texts.start(tokenizer)
        rest = self.length - len(first)
        # One token more than is scored: the first that is scored is predicted from it.
        ids, info = self._window(tokenizer, seed, index, rest + 1 + self.scored)
        ask = Ask(ids[rest : rest + 1], ids[rest + 1 :], "loss")
        return Item(first + ids[:rest], (ask,), self.recent, info)

    def _window(self, tokenizer, seed, index, count):
        random_ = texts.rng("loss", seed, index)
        if self.text == "code":
            return _code(tokenizer, seed, index, count, random_)
        ids = texts.prose(tokenizer) if self.text == "prose" else _own(tokenizer, self.text)
        if len(ids) < count:
            raise InputError(
                f"{self.text} has {len(ids)} tokens and {count} are needed; "
                "lower length or scored, or give a longer text"
            )
        return texts.window(ids, random_, count), {}


def _code(tokenizer, seed, index, count, random_):
    files = sources.long_files(count, seed)
    for n in range(len(files)):
        file = files[(index + n) % len(files)]
        ids = _encoded(tokenizer, file)
        if len(ids) >= count:
            return texts.window(ids, random_, count), {"file": file.name}
    raise InputError(
        f"none of {len(files)} source files has {count} tokens; lower length or scored"
    )


@functools.lru_cache(maxsize=256)
def _encoded(tokenizer, file):
    return tuple(tokenizer.encode(sources.read(file), add_bos=False))


def _own(tokenizer, path):
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"there is no text {path!r}; give prose, code, or the path of a file")
    return _encoded_own(tokenizer, file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _encoded_own(tokenizer, file, _changed):
    return tuple(tokenizer.encode(commands.read_text(str(file)), add_bos=False))
