"""Numbers hidden in a long text: one or many, asked one by one or together."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.errors import InputError
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import haystack, texts
from kvjax.eval.tasks.haystack import encode

FIRST = "amber brave calm dusty early frozen golden hidden iron jolly late narrow".split()
SECOND = "anchor basket castle dragon engine falcon garden island kettle lantern mirror".split()
SECOND += "needle orchard pepper quarry ribbon saddle tiger".split()
KEYS = [f"{first} {second}" for first in FIRST for second in SECOND]
DIGITS = 5


def sentence(key: str, value: str) -> str:
    """What is hidden."""
    return f" The secret number for the {key} is {value}."


def question(keys: Sequence[str], values: int = 1) -> str:
    """What is asked: a text that goes on with the values."""
    if len(keys) == 1 and values == 1:
        return f"\n\nThe secret number for the {keys[0]} is"
    names = " and ".join(f"the {key}" for key in keys)
    return f"\n\nThe secret numbers for {names} are"


def draw(random_: random.Random, keys: int, values: int = 1) -> dict[str, list[str]]:
    """Keys with their values; no two are alike."""
    names = random_.sample(KEYS, keys)
    low = 10 ** (DIGITS - 1)
    numbers = random_.sample(range(low, 10 * low), keys * values)
    return {
        name: [str(n) for n in numbers[i * values : (i + 1) * values]]
        for i, name in enumerate(names)
    }


@functools.lru_cache(maxsize=4)
def longest(tokenizer: Any) -> int:
    """The most tokens of a needle."""
    return max(len(encode(tokenizer, sentence(key, "8" * DIGITS))) for key in KEYS)


@dataclass(frozen=True)
class Needles:
    """Asks for numbers that sentences hidden in a long text give to names.

    keys are hidden, with `values` numbers each in a sentence of its own; `asks` times, `queries`
    of the keys are asked together. One number is matched as it is; of several, the share that is
    told counts. depth: 0 to 1, where the needles that are asked for lie; None spreads all needles
    over the text, and over the items.
    Source: the needle tasks of RULER, Hsieh et al. 2024 (arXiv:2404.06654), section 3.
    """

    length: int = 1024  # tokens of the context
    keys: int = 1
    values: int = 1
    queries: int = 1
    asks: int = 1
    depth: float | None = None
    haystack: str = "prose"

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        for name in ("keys", "values", "queries", "asks"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.asks * self.queries > self.keys:
            raise InputError(
                f"asks={self.asks} of queries={self.queries} keys need more than keys={self.keys}; "
                f"give keys={self.asks * self.queries}"
            )
        if self.keys > len(KEYS):
            raise InputError(f"keys={self.keys} are too many; give at most {len(KEYS)}")
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise InputError(f"depth={self.depth} must lie between 0 and 1, or be None")
        pieces = self.keys * self.values
        haystack.room(tokenizer, self.length, pieces, longest(tokenizer), "needles")
        return [self._item(tokenizer, seed, index) for index in range(count)]

    def _item(self, tokenizer, seed, index):
        random_ = texts.rng("needles", seed, index)
        planted = draw(random_, self.keys, self.values)
        asked = random_.sample(sorted(planted), self.asks * self.queries)
        order = [(key, value) for key, values in planted.items() for value in values]
        random_.shuffle(order)  # so that the values of a key are apart
        pieces = []
        for i, (key, value) in enumerate(order):
            depth = haystack.grid(index, i, len(order))
            if self.depth is not None and key in asked:
                depth = self.depth
            pieces.append((depth, encode(tokenizer, sentence(key, value))))
        first = texts.start(tokenizer)
        free = self.length - len(first) - sum(len(ids) for _, ids in pieces)
        hay = haystack.hay(tokenizer, self.haystack, random_, free)
        context, depths = haystack.plant(tokenizer, first, hay, pieces)
        told = sorted(zip(depths, order, strict=True))
        asks = [
            self._ask(tokenizer, [t for t in told if t[1][0] in asked[i : i + self.queries]])
            for i in range(0, len(asked), self.queries)
        ]
        return Item(context, tuple(asks))

    def _ask(self, tokenizer, told):
        """One ask about needles given as (depth, (key, value)), in the order of the text."""
        keys = list(dict.fromkeys(key for _, (key, _) in told))
        values = [value for key in keys for _, (k, value) in told if k == key]
        answer = encode(tokenizer, " " + ", ".join(values))
        several = len(values) > 1
        return Ask(
            question=encode(tokenizer, question(keys, self.values)),
            answer=answer,
            metric="recall" if several else "match",
            references=tuple(values) if several else (),
            max_new_tokens=2 * len(answer) if several else 0,
            info={
                "depth": round(told[0][0], 3),
                "key": ", ".join(keys),
                "value": ", ".join(values),
            },
        )
