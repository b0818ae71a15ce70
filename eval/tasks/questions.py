"""Questions from many subjects, each with the paragraph that explains it among others."""

import functools
from dataclasses import dataclass
from typing import Any

from kvjax.errors import InputError
from kvjax.eval import data
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import haystack, texts
from kvjax.eval.tasks.haystack import encode

LETTERS = "ABCD"


@functools.cache
def shots() -> list[dict]:
    """Questions as {"subject", "question", "choices", "answer", "text"}: no text names a letter.

    Source: the development questions of MMLU, Hendrycks et al. 2021 (arXiv:2009.03300), with the
    explanations in `lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json` of the PyPI package
    lm-eval 0.4.13 (MIT). The sentences that open the explanations and that name the answer are cut
    off. Left out are: explanations that still name a letter, questions of more than 1,200
    characters, damaged formulas, and one subject, human_sexuality.
    """
    return data.lines("mmlu_shots")


@dataclass(frozen=True)
class Questions:
    """Asks a question with four choices, whose explanation stands among those of other questions.

    The first paragraph is cut to make the length exact. Items take all questions in turn, in an
    order that the seed gives.
    Source: question answering with distractors of RULER, Hsieh et al. 2024 (arXiv:2404.06654),
    section 3, on explained questions of MMLU (see `shots`).
    """

    length: int = 1024  # tokens of the context

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        paragraphs = [encode(tokenizer, f"\n\n{shot['text']}") for shot in shots()]
        longest = max(len(p) for p in paragraphs)
        haystack.room(tokenizer, self.length, 1, longest, "paragraph")
        most = sum(len(p) for p in paragraphs)
        if self.length > most:
            raise InputError(
                f"length={self.length} is more than all paragraphs have; give at most {most}"
            )
        order = texts.rng("questions", seed, -1).sample(range(len(paragraphs)), len(paragraphs))
        return [
            self._item(tokenizer, paragraphs, order[index % len(order)], seed, index)
            for index in range(count)
        ]

    def _item(self, tokenizer, paragraphs, asked, seed, index):
        random_ = texts.rng("questions", seed, index)
        first, right = texts.start(tokenizer), paragraphs[asked]
        free = self.length - len(first) - len(right)
        after = round(free * (1 - haystack.grid(index, 0, 1)))  # tokens behind the right paragraph
        others = [p for i, p in enumerate(paragraphs) if i != asked]
        parts, read = [], 0  # from the end of the context to its start
        for paragraph in random_.sample(others, len(others)):
            if right and read + len(paragraph) / 2 > after:
                parts, right = [*parts, right], ()
            parts.append(paragraph[-(free - read) :])
            read += len(parts[-1])
            if read == free:
                break
        ids = first + tuple(i for part in reversed(parts) for i in part)
        depth = _where(ids, paragraphs[asked])
        return Item(ids, (_ask(tokenizer, shots()[asked], depth / len(ids)),))


def _where(ids, part):
    return next(i for i in range(len(ids)) if ids[i : i + len(part)] == part)


def _ask(tokenizer, shot, depth):
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, shot["choices"], strict=True)]
    question = "\n".join([f"\n\nQuestion: {shot['question']}", *lines, "Answer:"])
    options = {letter: encode(tokenizer, f" {letter}") for letter in LETTERS}
    return Ask(
        question=encode(tokenizer, question),
        answer=options[shot["answer"]],
        metric="option",
        options=tuple(options.values()),
        info={"depth": round(depth, 3), "subject": shot["subject"]},
    )
