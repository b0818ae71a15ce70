"""Variables that take their value from each other, scattered over a long text."""

import string
from dataclasses import dataclass
from typing import Any

from kvjax.errors import InputError
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import haystack, texts
from kvjax.eval.tasks.haystack import encode

LETTERS = 4  # of a name: long enough that no ordinary word in capitals is one
LOW, HIGH = 10_000, 100_000
MOST = 1000  # assignments in a text


@dataclass(frozen=True)
class Variables:
    """Asks which variables hold a value: one is given it, and each next one is given the last one.

    A chain has hops + 1 variables, assigned in order; the assignments of all chains stand between
    sentences of prose, spread evenly, and one chain is asked for. The share of its names that is
    told counts.
    Source: variable tracking of RULER, Hsieh et al. 2024 (arXiv:2404.06654), section 3.
    """

    length: int = 1024  # tokens of the context
    chains: int = 1
    hops: int = 2

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        for name in ("chains", "hops"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        pieces = self.chains * (self.hops + 1)
        if pieces > MOST:
            raise InputError(
                f"chains={self.chains} of hops={self.hops} are {pieces} assignments, and at most "
                f"{MOST} are made; lower one of them"
            )
        most = 2 * LETTERS + len(encode(tokenizer, assignment("", ""))) + LETTERS
        haystack.room(tokenizer, self.length, pieces, most, "assignments")
        return [self._item(tokenizer, seed, index) for index in range(count)]

    def _item(self, tokenizer, seed, index):
        random_ = texts.rng("variables", seed, index)
        names = _names(random_, self.chains * (self.hops + 1))
        values = [str(n) for n in random_.sample(range(LOW, HIGH), self.chains)]
        chains = [names[i :: self.chains] for i in range(self.chains)]
        lines = [
            [assignment(a, b) for a, b in zip(chain, [value, *chain], strict=False)]
            for chain, value in zip(chains, values, strict=True)
        ]
        turns = [i for i in range(self.chains) for _ in range(self.hops + 1)]
        random_.shuffle(turns)  # chains interleave; each one keeps its order
        left = [iter(chain) for chain in lines]
        pieces = [
            (haystack.grid(index, at, len(turns)), encode(tokenizer, next(left[i])))
            for at, i in enumerate(turns)
        ]
        first = texts.start(tokenizer)
        free = self.length - len(first) - sum(len(ids) for _, ids in pieces)
        hay = haystack.hay(tokenizer, "prose", random_, free)
        context, depths = haystack.plant(tokenizer, first, hay, pieces)
        asked = random_.randrange(self.chains)
        ask = _ask(tokenizer, values[asked], chains[asked], depths[turns.index(asked)])
        return Item(context, (ask,))


def assignment(name: str, value: str) -> str:
    """One assignment as it stands in the text; the value is a number or another name."""
    return f" VAR {name} = {value if value.isdigit() else f'VAR {value}'}."


def _names(random_, count):
    """Names that differ, without vowels: they spell no words."""
    letters = [x for x in string.ascii_uppercase if x not in "AEIOUY"]
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(random_.choices(letters, k=LETTERS))] = None
    return list(names)


def _ask(tokenizer, value, names, depth):
    answer = encode(tokenizer, " " + ", ".join(f"VAR {name}" for name in names))
    return Ask(
        question=encode(tokenizer, f"\n\nThe variables that hold the value {value} are"),
        answer=answer,
        metric="recall",
        references=tuple(names),
        max_new_tokens=3 * len(answer),
        info={"depth": round(depth, 3), "value": value, "variables": len(names)},
    )
