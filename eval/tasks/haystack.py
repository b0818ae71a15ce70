"""Short texts put between the sentences of a long one, to an exact number of tokens."""

import random
from collections.abc import Sequence
from typing import Any

from kvjax.errors import InputError, unknown
from kvjax.eval.tasks import texts

HAYSTACKS = {"prose": texts.prose}
ROOM = 32  # the fewest tokens of haystack that a context is made with
REACH = 400  # tokens that are searched for a sentence to begin with
STEPS = 10  # depths of a grid
ENDS = (".", "!", "?", ".”", "!”", "?”")


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a piece of text: nothing is put in front."""
    return tuple(tokenizer.encode(text, add_bos=False))


def room(
    tokenizer: Any, length: int, pieces: int, longest: int, what: str, *, name: str = "length"
) -> None:
    """Raises where `length` tokens cannot hold `pieces` of at most `longest` tokens and prose."""
    least = len(texts.start(tokenizer)) + pieces * longest + ROOM
    if length < least:
        raise InputError(
            f"{name}={length} is too small for {pieces} {what}; give at least {name}={least}"
        )


def grid(index: int, piece: int, pieces: int) -> float:
    """The depth of one of `pieces` in item `index`: every piece has its own stretch of the text.

    Within it, ten items in a row take ten depths.
    """
    return (piece + (7 * index % STEPS + 0.5) / STEPS) / pieces


def ends(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Where a sentence ends in `ids`: the indices of the tokens after it."""
    words = {i: tokenizer.decode([i]) for i in set(ids)}
    closing = {i for i, word in words.items() if word.rstrip().endswith(ENDS)}
    titles = {"Mr", "Mrs", "Dr", "St", "No"}
    return [
        at + 1
        for at, i in enumerate(ids)
        if i in closing and words[ids[max(at - 1, 0)]].strip() not in titles
    ]


def hay(tokenizer: Any, name: str, random_: random.Random, count: int) -> tuple[int, ...]:
    """`count` tokens of the haystack called `name`, which begin with a sentence where they can."""
    if name not in HAYSTACKS:
        raise unknown("haystack", name, HAYSTACKS)
    ids = HAYSTACKS[name](tokenizer)
    found = texts.window(ids, random_, min(count + REACH, max(len(ids), count)))
    first = next(iter(ends(tokenizer, found[:REACH])), 0)
    first = min(first, len(found) - count)
    return found[first : first + count]


def plant(
    tokenizer: Any,
    start: Sequence[int],
    hay_: Sequence[int],
    pieces: Sequence[tuple[float, Sequence[int]]],
) -> tuple[tuple[int, ...], list[float]]:
    """`start`, then the haystack with `pieces` in it; and the share of all tokens before each.

    A piece is (depth, ids). It goes to the end of the sentence nearest to its depth; pieces of one
    place follow each other by depth.
    """
    places = [0, *ends(tokenizer, hay_)]
    wanted = [min(places, key=lambda p: abs(p - depth * len(hay_))) for depth, _ in pieces]
    out, at, before = list(start), 0, [0] * len(pieces)
    for i in sorted(range(len(pieces)), key=lambda i: (wanted[i], pieces[i][0])):
        out += hay_[at : wanted[i]]
        at, before[i] = wanted[i], len(out)
        out += pieces[i][1]
    out += hay_[at:]
    return tuple(out), [place / len(out) for place in before]
