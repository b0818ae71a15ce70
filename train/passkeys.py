"""Texts with passkeys hidden in them, asked for at the end: what retrieval heads are needed for."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.errors import InputError

WORDS = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar "
    "papa quebec romeo sierra tango uniform victor whiskey xray yankee zulu"
).split()
ORDER = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
).split()


@dataclass(frozen=True)
class Passkeys:
    """Makes batches of `batch` texts of `shortest` to `length` tokens, each with `count` passkeys.

    A passkey is `words` words of the spelling alphabet. The passkeys lie in order at random depths
    from 5% to 95% of the text, and all are asked for, and answered, at its end. The depths and the
    task are the paper's; the words of the task, and that depths are drawn evenly, are our choice.
    Source: Xiao et al. 2024, arXiv:2410.10819 (DuoAttention), section 2.2.
    """

    tokenizer: Any  # with encode(text, add_bos=)
    text: str  # what the passkeys are hidden in
    length: int = 1024
    shortest: int | None = None  # default: all are of `length`
    count: int = 10
    words: int = 32
    batch: int = 1
    seed: int = 0

    def __post_init__(self):
        for name, least, most in (
            ("count", 1, len(ORDER)), ("words", 1, 10_000), ("batch", 1, 1 << 20),
            ("length", 1, 1 << 24),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise InputError(f"{name} is {value!r}; give a whole number, {least} to {most}")
        if self.shortest is not None and not 1 <= self.shortest <= self.length:
            raise InputError(f"shortest is {self.shortest}; give 1 to length, {self.length}")

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step: tokens [b t], right padded; count [b]; answer [b t], true at the
        tokens of the passkeys in the answers."""
        tokens = np.zeros((self.batch, self.length), np.int32)
        answer, count = np.zeros(tokens.shape, bool), np.zeros(self.batch, np.int32)
        for row in range(self.batch):
            rng = np.random.default_rng([self.seed, step, row])
            want = int(rng.integers(self.shortest or self.length, self.length + 1))
            ids, asked = self.sample(rng, want)
            count[row] = len(ids)
            tokens[row, : len(ids)], answer[row, : len(ids)] = ids, asked
        return {"tokens": tokens, "count": count, "answer": answer}

    def sample(self, rng: np.random.Generator, length: int) -> tuple[list[int], list[bool]]:
        """One text of `length` tokens, and which of them answer."""
        keys = [" ".join(rng.choice(WORDS, self.words)) for _ in range(self.count)]
        hidden = [
            self._ids(f"\nRemember: the {name} passkey is {key}.\n")
            for name, key in zip(ORDER, keys, strict=False)
        ]
        end, asked = [], []
        for name, key in zip(ORDER, keys, strict=False):
            ask, reply = self._ids(f"\nWhat is the {name} passkey? It is"), self._ids(f" {key}")
            end += [*ask, *reply]
            asked += [False] * len(ask) + [True] * len(reply)
        room = length - len(end) - sum(map(len, hidden))
        if room < 1:
            raise InputError(
                f"{self.count} passkeys of {self.words} words and their questions take "
                f"{length - room} tokens of {length}; make length larger, or count or words smaller"
            )
        story = self._story(rng, room)
        depth = np.sort(rng.uniform(0.05, 0.95, self.count))
        cuts = [0, *(int(d * room) for d in depth), room]
        ids = list(story[: cuts[1]])
        for key, start, stop in zip(hidden, cuts[1:-1], cuts[2:], strict=True):
            ids += [*key, *story[start:stop]]
        return ids + end, [False] * len(ids) + asked

    def _story(self, rng, room: int) -> list[int]:
        """`room` tokens of the text, from a random place."""
        size = 16 * room  # characters; a token may be longer in odd texts: then twice as many
        while True:
            start = int(rng.integers(max(len(self.text) - size, 0) + 1))
            ids = self._ids(self.text[start : start + size])
            if len(ids) >= room:
                return ids[:room]
            if size >= len(self.text):
                raise InputError(f"the text has {len(ids)} tokens and {room} are needed")
            size *= 2

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_bos=False)
