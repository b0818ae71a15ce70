"""A table of numbers, in pairs, and some of them asked for."""

from dataclasses import dataclass
from typing import Any

from kvjax.errors import InputError
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import haystack, texts
from kvjax.eval.tasks.haystack import encode

LOW, HIGH = 1000, 10_000  # all keys and values have four digits


@dataclass(frozen=True)
class KeyValues:
    """Asks for the number that stands beside another one, in pairs between sentences of prose.

    All keys and values of an item differ; the pairs are spread evenly over the text.
    Source: key-value retrieval of Liu et al. 2023, "Lost in the Middle" (arXiv:2307.03172),
    section 3, with short numbers, and needles that are all of one kind as in RULER
    (arXiv:2404.06654).
    """

    length: int = 512  # tokens of the context
    pairs: int = 10
    asks: int = 5

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        if self.asks < 1 or self.asks > self.pairs:
            raise InputError(f"asks={self.asks} must lie between 1 and pairs={self.pairs}")
        if 2 * self.pairs > HIGH - LOW:
            raise InputError(f"pairs={self.pairs} is more than there are; give at most 4500")
        most = len(encode(tokenizer, pair("8888", "8888")))
        haystack.room(tokenizer, self.length, self.pairs, most, "pairs")
        return [self._item(tokenizer, seed, index) for index in range(count)]

    def _item(self, tokenizer, seed, index):
        random_ = texts.rng("key_values", seed, index)
        numbers = [str(n) for n in random_.sample(range(LOW, HIGH), 2 * self.pairs)]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        pieces = [
            (haystack.grid(index, i, self.pairs), encode(tokenizer, pair(*both)))
            for i, both in enumerate(pairs)
        ]
        first = texts.start(tokenizer)
        free = self.length - len(first) - sum(len(ids) for _, ids in pieces)
        hay = haystack.hay(tokenizer, "prose", random_, free)
        context, depths = haystack.plant(tokenizer, first, hay, pieces)
        asks = []
        for i in random_.sample(range(self.pairs), self.asks):
            key, value = pairs[i]
            info = {"depth": round(depths[i], 3), "key": key, "value": value}
            question = f"\n\nKey {key}:"
            asks.append(Ask(encode(tokenizer, question), encode(tokenizer, f" {value}"), info=info))
        return Item(context, tuple(asks))


def pair(key: str, value: str) -> str:
    """One pair as it stands in the text."""
    return f" Key {key}: {value}."
