"""Two rounds of questions on one text, with new text between them."""

from dataclasses import dataclass
from typing import Any

from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import haystack, needles, texts
from kvjax.eval.tasks.haystack import encode

OLD, NEW = 5, 2  # needles in the first and in the new text


@dataclass(frozen=True)
class Turns:
    """Asks three numbers of a long text, then reads more of it, and asks one new, old, new.

    All six asks are about different needles, and the depth of each is within its own text. The
    same compressed cache serves them all: what the first questions need must not cost the others.
    Source: the needle task of RULER, Hsieh et al. 2024 (arXiv:2404.06654), section 3, in the turns
    of SCBench, Li et al. 2024 (arXiv:2412.10319), section 3.
    """

    length: int = 1024  # tokens of the context
    more: int = 256  # tokens of the new text

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        longest = needles.longest(tokenizer)
        haystack.room(tokenizer, self.length, OLD, longest, "needles")
        haystack.room(tokenizer, self.more, NEW, longest, "needles", name="more")
        return [self._item(tokenizer, seed, index) for index in range(count)]

    def _item(self, tokenizer, seed, index):
        random_ = texts.rng("turns", seed, index)
        facts = [(key, values[0]) for key, values in needles.draw(random_, OLD + NEW).items()]
        pieces = [encode(tokenizer, needles.sentence(*fact)) for fact in facts]
        context, depths = _text(tokenizer, random_, index, self.length, pieces[:OLD])
        new, more = _text(tokenizer, random_, index, self.more, pieces[OLD:], "\n\n")
        one, two, three, later, _ = random_.sample(range(OLD), OLD)
        asks = []
        for i in (one, two, three, OLD, later, OLD + 1):
            key, value = facts[i]
            info = {"depth": round((depths + more)[i], 3), "key": key, "value": value}
            info |= {"turn": 2 if len(asks) > 2 else 1, "text": "first" if i < OLD else "new"}
            asks.append(
                Ask(
                    question=encode(tokenizer, needles.question([key])),
                    answer=encode(tokenizer, f" {value}"),
                    before=new if len(asks) == 3 else (),
                    info=info,
                )
            )
        return Item(context, tuple(asks))


def _text(tokenizer, random_, index, length, pieces, start=None):
    """Exactly `length` tokens with needles in them, and the depth of each."""
    first = texts.start(tokenizer) if start is None else encode(tokenizer, start)
    free = length - len(first) - sum(len(ids) for ids in pieces)
    hay = haystack.hay(tokenizer, "prose", random_, free)
    placed = [(haystack.grid(index, i, len(pieces)), ids) for i, ids in enumerate(pieces)]
    return haystack.plant(tokenizer, first, hay, placed)
