"""Code: what comes next in a long source file."""

import re
from dataclasses import dataclass
from typing import Any

from kvjax.errors import InputError
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import sources, texts
from kvjax.eval.tasks.endings import check, cut, ending

TRIES = 200  # places of a file that are looked at before the next file is taken


@dataclass(frozen=True)
class Identifier:
    """Asks for the next identifier, which occurred before, but not in the last `recent` tokens.

    A name of six characters or more that is no keyword or builtin.
    Source: the interpreter's standard library; the items depend on the version of Python.
    """

    length: int = 1536  # tokens of the context
    recent: int = 256

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        return _items("identifier", self, sources.names, _is_far, tokenizer, count, seed)


@dataclass(frozen=True)
class NextLine:
    """Asks for the next line of code, exactly, without its indentation.

    A line of 10 to 60 characters without a comment, in no string.
    Source: the interpreter's standard library; the items depend on the version of Python.
    """

    length: int = 1536  # tokens of the context
    recent: int = 256  # last tokens of it that a reader without memory sees

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        return _items("next_line", self, sources.lines, _always, tokenizer, count, seed)


def _is_far(answer, far, near):
    word = re.compile(rf"\b{re.escape(answer)}\b")
    return bool(word.search(far)) and answer not in near


def _always(answer, far, near):
    return True


def _items(name, task, places, fits, tokenizer, count, seed):
    check(task.length, task.recent)
    files = sources.long_files(3 * task.length, seed)
    items = []
    for i in range(count):
        random_ = texts.rng(name, seed, i)
        order = [files[i % len(files)], *random_.sample(files, len(files))]
        for file in order:
            if found := _asked(task, places, fits, tokenizer, file, random_):
                context, ask = found
                items.append(Item(context, (ask,), task.recent, {"file": file.name}))
                break
        else:
            raise InputError(
                f"{name}: none of {len(files)} source files has a place to ask about with "
                f"length={task.length} and recent={task.recent}; lower them"
            )
    return items


def _asked(task, places, fits, tokenizer, file, random_):
    """A context in the file and what is asked about it, or None."""
    text = sources.read(file)
    found = places(text)
    for start, answer in random_.sample(found, min(TRIES, len(found))):
        low = text.rfind("\n", 0, max(0, start - 12 * task.length)) + 1  # enough for any code
        # Two characters are a short token: what fails here would fail below, where it costs more.
        middle = start - 2 * task.recent
        if start - low < 2 * task.length or not fits(answer, text[low:middle], text[middle:start]):
            continue
        split = ending(tokenizer, text[low : start + len(answer)], answer)
        parts = split and cut(tokenizer, split[0], task.length)
        if not parts:
            continue
        context, question = parts
        far, near = context[: -task.recent], context[-task.recent :] + question
        if fits(answer, tokenizer.decode(far), tokenizer.decode(near)):
            return context, Ask(question, split[1], info={"answer": answer})
    return None
