"""Lists of words, of which the most frequent are asked for."""

import collections
import functools
import math
import re
import string
from dataclasses import dataclass
from typing import Any

from kvjax import data
from kvjax.errors import InputError
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import texts
from kvjax.eval.tasks.haystack import encode, hay

TITLE = "\n\nThe list of words:"
SEEN = 6  # a word of Moby Dick stands in lists if the book has it as often
CODE = 6  # letters of a coded word
ASKED = 3  # coded words that are asked for
LEAST = 32  # of as many coded words the third stands twice and the fourth once


@functools.cache
def words() -> list[str]:
    """Words of Moby Dick, none of which is a part of another one."""
    found = collections.Counter(re.findall(r"\b[a-z]{4,8}\b", data.moby_dick()))
    known = sorted(word for word, times in found.items() if times >= SEEN)
    text = " ".join(known)
    return [word for word in known if text.count(word) == 1]


@dataclass(frozen=True)
class CommonWords:
    """Asks for the most common words of a numbered list, shuffled.

    `top` words stand `common_times` in it and all others `few_times`, but for one that may stand
    less often where the list is full. A few tokens of prose in front make the length exact.
    Source: common words extraction of RULER, Hsieh et al. 2024 (arXiv:2404.06654), section 3.
    """

    length: int = 1024  # tokens of the context
    top: int = 5
    common_times: int = 12
    few_times: int = 2

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        if self.top < 1 or not 1 <= self.few_times < self.common_times:
            raise InputError(
                f"top={self.top} and few_times={self.few_times} must be at least 1, and "
                f"common_times={self.common_times} more than few_times"
            )
        sizes = _sizes(tokenizer)
        entries = self.top * (self.common_times + self.few_times)
        most = max(sizes.values()) + len(encode(tokenizer, f" {entries}."))
        least = self.length - _free(tokenizer, self.length) + entries * most
        if self.top > len(sizes) // 4 or self.length < least:
            raise InputError(
                f"length={self.length} is too small for top={self.top} words, "
                f"common_times={self.common_times}; give at least length={least} or a smaller top"
            )
        return [self._item(tokenizer, sizes, seed, index) for index in range(count)]

    def _item(self, tokenizer, sizes, seed, index):
        random_ = texts.rng("common_words", seed, index)
        drawn = random_.sample(words(), len(sizes))
        repeated = [w for w in drawn[: self.top] for _ in range(self.common_times)]
        repeated += [w for w in drawn[self.top :] for _ in range(self.few_times)]
        free, fit = _free(tokenizer, self.length), 0
        for word in repeated:
            cost = sizes[word] + len(encode(tokenizer, f" {fit + 1}."))
            if cost > free:
                break
            free, fit = free - cost, fit + 1
        else:
            raise InputError(f"length={self.length} takes more words than there are; lower it")
        listed = random_.sample(repeated[:fit], fit)
        common = sorted(drawn[: self.top], key=listed.index)
        pieces = [text for i, word in enumerate(listed, 1) for text in (f" {i}.", f" {word}")]
        return _item(tokenizer, hay(tokenizer, "prose", random_, free), pieces, common)


@dataclass(frozen=True)
class FrequentWords:
    """Asks for the three most frequent words of a coded text.

    Word k of it, a string of random letters, makes up a share 1 / (k ** 2 zeta(2)), rounded down;
    other words stand once. A few tokens of prose in front make the length exact.
    Source: frequent words extraction of RULER, Hsieh et al. 2024 (arXiv:2404.06654), section 3,
    with its alpha of 2.0 and without the word that means nothing.
    """

    length: int = 1024  # tokens of the context

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        least = self.length - _free(tokenizer, self.length) + LEAST * (CODE + 1)
        if self.length < least:
            raise InputError(
                f"length={self.length} is too small to tell frequent words apart; "
                f"give at least length={least}"
            )
        return [self._item(tokenizer, seed, index) for index in range(count)]

    def _item(self, tokenizer, seed, index):
        random_ = texts.rng("frequent_words", seed, index)
        free = _free(tokenizer, self.length)
        sizes, total, left = {}, free // 2, -1
        while len(sizes) < 3 * math.isqrt(total) + 8:  # more than the frequencies of `total`
            word = "".join(random_.choices(string.ascii_lowercase, k=CODE))
            sizes[word] = len(encode(tokenizer, f" {word}"))
        codes, times = list(sizes), []
        while left < 0:
            times = frequencies(total)
            left = free - sum(n * sizes[w] for n, w in zip(times, codes, strict=False))
            total -= max(1, -left // max(sizes.values()))
        listed = [w for n, w in zip(times, codes, strict=False) for _ in range(n)]
        pieces = [f" {word}" for word in random_.sample(listed, len(listed))]
        return _item(tokenizer, hay(tokenizer, "prose", random_, left), pieces, codes[:ASKED])


def frequencies(total: int) -> list[int]:
    """How often each word stands in a coded text of `total` words; they fall to 1."""
    shares = [int(total * 6 / (math.pi * k) ** 2) for k in range(1, math.isqrt(total) + 2)]
    times = [n for n in shares if n]
    return times + [1] * (total - sum(times))


@functools.lru_cache(maxsize=4)
def _sizes(tokenizer):
    return {word: len(encode(tokenizer, f" {word}")) for word in words()}


def _free(tokenizer, length):
    return length - len(texts.start(tokenizer)) - len(encode(tokenizer, TITLE))


def _item(tokenizer, prose, pieces, found):
    question = f"\n\nThe {len(found)} words that the list repeats most often are"
    answer = encode(tokenizer, " " + ", ".join(found))
    ask = Ask(
        question=encode(tokenizer, question),
        answer=answer,
        metric="recall",
        references=tuple(found),
        max_new_tokens=len(answer) + 8 * len(found),
    )
    ids = [*texts.start(tokenizer), *prose, *encode(tokenizer, TITLE)]
    return Item((*ids, *(i for text in pieces for i in encode(tokenizer, text))), (ask,))
