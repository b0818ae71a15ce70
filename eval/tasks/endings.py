"""Texts cut between two tokens: in front of their last words, or to a length."""

from collections.abc import Sequence
from typing import Any

from kvjax.errors import InputError
from kvjax.eval.tasks import texts

QUESTION = 8  # last ids in front of an answer: they are read after the cache is compressed


def ending(tokenizer: Any, text: str, answer: str) -> tuple[tuple, tuple] | None:
    """Ids of `text`, cut where `answer`, its end, begins; None if no token begins there.

    White space in front of the answer is on the side of the cut where the tokenizer joins it.
    """
    ids = tuple(tokenizer.encode(text, add_bos=False))
    for count in range(1, len(ids) + 1):
        tail = tokenizer.decode(ids[-count:], skip_special=False)
        if tail.strip() == answer:
            return ids[:-count], ids[-count:]
        if len(tail.strip()) > len(answer) + 3:  # as many signs stand for a part of a character
            break
    return None


def cut(tokenizer: Any, before: Sequence[int], length: int) -> tuple[tuple, tuple] | None:
    """A context of exactly `length` ids and the question after it; None if there are too few."""
    first = texts.start(tokenizer)
    rest = length - len(first)
    if len(before) < rest + QUESTION:
        return None
    return first + tuple(before[-rest - QUESTION : -QUESTION]), tuple(before[-QUESTION:])


def middle_cut(tokenizer: Any, text: str, length: int | None) -> tuple[int, ...]:
    """Ids of a text; without those in the middle where they are more than `length`."""
    ids = (*texts.start(tokenizer), *tokenizer.encode(text, add_bos=False))
    if length is None or len(ids) <= length:
        return ids
    return ids[: length // 2] + ids[length // 2 - length :]


def check(length: int, recent: int):
    """Raises where the recent tokens are not a part of the context."""
    if not 0 < recent < length:
        raise InputError(
            f"length={length} and recent={recent}: recent must be at least 1 and below length"
        )
