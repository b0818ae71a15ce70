"""The last word of a sentence that stands far above it."""

import re
from dataclasses import dataclass
from typing import Any

from kvjax import data
from kvjax.errors import InputError
from kvjax.eval.data import lines
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import texts
from kvjax.eval.tasks.endings import check, cut, ending


@dataclass(frozen=True)
class Cloze:
    """Asks for the last word of a sentence, which occurs in the context, but not recently.

    Whether the context helps with a word is not known beforehand: compare the log-probability
    with that after the last `recent` tokens alone, and keep the items that gain. There are 400
    places; a run has as many items as remain at this length.
    Source: Moby Dick; words of five letters or more that occur one to four times in the 8000
    characters before and not in the last 600. The form is that of LAMBADA, Paperno et al. 2016.
    """

    length: int = 1536  # tokens of the context
    recent: int = 150

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        check(self.length, self.recent)
        text, rows = data.moby_dick(), lines("moby_cloze")
        texts.rng("cloze", seed, -1).shuffle(rows)
        items = []
        for row in rows:
            if len(items) == count:
                break
            if item := self._item(tokenizer, text, row):
                items.append(item)
        if not items:
            raise InputError(
                f"length={self.length} and recent={self.recent} leave none of {len(rows)} places: "
                "the words occur about 600 to 8000 characters before; change them"
            )
        return items

    def _item(self, tokenizer, text, row):
        """The item of one place, or None if its context does not hold the word."""
        low = min(row["start"], max(0, row["end"] - 8 * self.length))  # enough for any prose
        split = ending(tokenizer, text[low : row["end"]] + row["target"], row["target"])
        parts = split and cut(tokenizer, split[0], self.length)
        if not parts:
            return None
        context, question = parts
        far, near = context[: -self.recent], context[-self.recent :] + question
        word = re.compile(rf"\b{re.escape(row['target'])}\b")
        if not word.search(tokenizer.decode(far)) or row["target"] in tokenizer.decode(near):
            return None
        ask = Ask(question, split[1], info={"word": row["target"], "place": row["end"]})
        return Item(context, (ask,), self.recent)
