"""Texts to be classified after many examples, given in the context."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from kvjax.errors import InputError, unknown
from kvjax.eval.data import lines
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import records, texts
from kvjax.eval.tasks.endings import ending

COLOURS = "Red Blue Green Yellow Black White Brown Pink Orange Purple Gold Silver".split()
LABELS = ("real", "renamed")


@dataclass(frozen=True)
class ManyShot:
    """Asks for the class of a text, after examples of each class.

    Up to `shots` examples of each class, in turn; the last ones that fit, the foremost cut at its
    beginning. Too few for the length are led by prose. Asked are texts that are no examples,
    classes in turn. labels: "real", or "renamed" to colours, drawn anew for each item, so that
    only the examples tell them. path: a jsonl file with the fields text and label.
    Source: sentences of ten translations of The Debian Administrator's Handbook.
    """

    path: str | None = None
    labels: str = "real"
    classes: int = 6  # the first ones by name
    shots: int = 4
    asks: int = 5
    length: int = 1024  # tokens of the context

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        if self.labels not in LABELS:
            raise unknown("labels", self.labels, LABELS)
        if self.classes < 2 or min(self.shots, self.asks) < 1:
            raise InputError(
                f"classes={self.classes}, shots={self.shots} and asks={self.asks} must be at "
                "least 2, 1 and 1"
            )
        pools = self._pools()
        return [self._item(tokenizer, pools, seed, index) for index in range(count)]

    def _pools(self) -> dict[str, list[str]]:
        """The shorter half of the texts of each class, or as many as an item may need."""
        rows = lines("icl_langid") if self.path is None else records.labelled(self.path)
        found = defaultdict(dict)  # the keys of each are its texts, once each
        for row in rows:
            found[row["label"]][" ".join(row["text"].split())] = None
        names = sorted(found)[: self.classes]
        most = len(COLOURS) if self.labels == "renamed" else self.classes
        if len(names) < self.classes or most < self.classes:
            raise InputError(
                f"classes={self.classes}, and there are {len(found)} classes and names for {most}; "
                "lower classes"
            )
        need = self.shots + -(-self.asks // self.classes)
        for name in names:
            if len(found[name]) < need:
                raise InputError(
                    f"class {name!r} has {len(found[name])} texts, and {self.shots} shots and "
                    f"{self.asks} asks need {need}; lower shots or asks"
                )
        return {n: sorted(found[n], key=len)[: max(need, len(found[n]) // 2)] for n in names}

    def _item(self, tokenizer, pools, seed, index):
        random_ = texts.rng("many_shot", seed, index)
        shown = list(pools)
        if self.labels == "renamed":
            shown = random_.sample(COLOURS, len(pools))
        shown = dict(zip(pools, shown, strict=True))
        drawn = {name: random_.sample(pool, len(pool)) for name, pool in pools.items()}
        rounds = [
            [(name, drawn[name].pop()) for name in random_.sample(list(pools), len(pools))]
            for _ in range(self.shots)
        ]
        turns = random_.sample(list(pools), len(pools))
        names = [turns[i % len(turns)] for i in range(self.asks)]
        asked = [(name, drawn[name].pop()) for name in names]
        context, examples = self._context(tokenizer, rounds, shown, random_)
        asks = tuple(self._ask(tokenizer, text, name, shown) for name, text in asked)
        return Item(context, asks, info={"examples": examples})

    def _form(self, text, label):
        return f"Text: {text}\n{'Language' if self.path is None else 'Label'}: {label}"

    def _context(self, tokenizer, rounds, shown, random_) -> tuple[tuple[int, ...], int]:
        """Examples to the exact length, and how many of them are whole."""
        first = texts.start(tokenizer)
        room = self.length - len(first)
        examples = [
            tuple(tokenizer.encode(self._form(text, shown[name]) + "\n\n", add_bos=False))
            for round_ in rounds
            for name, text in round_
        ]
        least = len(first) + sum(map(len, examples[: len(shown)]))
        if self.length < least:
            raise InputError(
                f"length={self.length} does not hold an example of each of {len(shown)} classes; "
                f"give at least length={least}"
            )
        ids, whole = (), 0
        for example in examples:
            if len(ids) >= room:
                break
            ids = example + ids
            whole += len(ids) <= room
        if len(ids) < room:
            between = tuple(tokenizer.encode("\n\n", add_bos=False))[: room - len(ids)]
            lead = room - len(ids) - len(between)
            ids = texts.window(texts.prose(tokenizer), random_, lead) + between + ids
        return first + ids[len(ids) - room :], whole

    def _ask(self, tokenizer, text, name, shown):
        found, questions = {}, set()
        for label in shown.values():
            split = ending(tokenizer, self._form(text, label), label)
            if split is None:
                raise InputError(f"no token begins with the label {label!r}; name it otherwise")
            questions.add(split[0])
            found[label] = split[1]
        options = tuple(found.values())
        if len({option[0] for option in options}) < len(options) or len(questions) > 1:
            raise InputError(
                f"labels {list(found)} must follow the same tokens and begin with different ones; "
                "name them otherwise"
            )
        (question,) = questions
        return Ask(question, found[shown[name]], "option", options, info={"class": name})
