"""How right an answer is: one number from 0 to 1 for each ask."""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from kvjax.errors import InputError, unknown
from kvjax.eval import sandbox

CJK = re.compile(r"([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff])")  # written without spaces


def words(text: str) -> list[str]:
    """Words without case, punctuation and English articles, as SQuAD compares them.

    Chinese and Japanese characters are words of their own.
    """
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return [w for w in CJK.sub(r" \1 ", text).split() if w not in ("a", "an", "the")]


def _harmonic(common, found, wanted):
    return 2 * common / (found + wanted) if common else 0.0


def recall(text: str, references: Sequence[str]) -> float:
    """The share of the references that the text contains."""
    return sum(r.lower() in text.lower() for r in references) / len(references)


def any_(text: str, references: Sequence[str]) -> float:
    """Whether the text contains any of the references."""
    return float(any(r.lower() in text.lower() for r in references))


def f1(text: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words; the best reference counts.

    Source: Rajpurkar et al. 2016, SQuAD (arXiv:1606.05250), section 6.1.
    """
    found = Counter(words(text))
    wanted = [Counter(words(r)) for r in references]
    return max(_harmonic((found & w).total(), found.total(), w.total()) for w in wanted)


def rouge_l(text: str, references: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of words.

    Over the whole text, not sentence by sentence; the best reference counts.
    Source: Lin 2004, ROUGE, section 3.1, with beta = 1.
    """
    found = words(text)
    wanted = [words(r) for r in references]
    return max(_harmonic(_common(found, w), len(found), len(w)) for w in wanted)


def _common(a, b):
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0  # the cell up and to the left
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def code_similarity(text: str, references: Sequence[str]) -> float:
    """How alike the first line that is no comment and a reference are, by common blocks.

    Source: LongBench (arXiv:2308.14508), edit similarity of its code tasks.
    """
    rows = text.lstrip("\n").split("\n")
    row = next((r for r in rows if not any(c in r for c in ("`", "#", "//"))), "")
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(row)  # the one whose statistics are kept
    ratios = []
    for reference in references:
        matcher.set_seq1(reference)
        ratios.append(matcher.ratio())
    return max(ratios)


def classification(text: str, references: Sequence[str]) -> float:
    """Whether the first line names the right class, divided by the number of classes it names.

    The first reference is the right class, the others are all the classes. A class that is a part
    of the right one's name does not count. Source: LongBench (arXiv:2308.14508).
    """
    right, *classes = references
    line = first_line(text)
    named = {c for c in {right, *classes} if c in line and (c == right or c not in right)}
    return 1 / len(named) if right in named else 0.0


def retrieval(text: str, references: Sequence[str]) -> float:
    """The share of the numbers in the text that is the number in the reference ("Paragraph 3").

    Source: LongBench (arXiv:2308.14508).
    """
    numbers = re.findall(r"\d+", text)
    return max(_share(numbers, re.findall(r"\d+", r)[:1]) for r in references)


def count(text: str, references: Sequence[str]) -> float:
    """The share of the numbers in the text that is the reference. Source: as `retrieval`."""
    numbers = re.findall(r"\d+", text)
    return max(_share(numbers, [r.strip()]) for r in references)


def _share(numbers, right):
    return sum(n in right for n in numbers) / len(numbers) if numbers else 0.0


def tests(text: str, references: Sequence[str]) -> float:
    """Whether a program runs to its end: the first reference, the text, the second reference.

    The text goes on with a function; it is cut at the first line that leaves it.
    """
    before, after = references
    return float(sandbox.passes(f"{before}{body(text)}\n{after}\n"))


def body(text: str) -> str:
    """The lines of a text that belong to the function that it begins in."""
    first, *rows = text.split("\n")
    inside = (i for i, row in enumerate(rows) if row and not row[0].isspace())
    return "\n".join([first, *rows[: next(inside, len(rows))]])


def first_line(text: str) -> str:
    """The first line that is not empty: where a model without an end of turn goes on asking."""
    return text.lstrip("\n").split("\n")[0]


def f1_line(text: str, references: Sequence[str]) -> float:
    """`f1` of the first line."""
    return f1(first_line(text), references)


def rouge_l_line(text: str, references: Sequence[str]) -> float:
    """`rouge_l` of the first line."""
    return rouge_l(first_line(text), references)


METRICS: dict[str, Callable[[str, Sequence[str]], float] | None] = {
    "match": None,  # whether the most likely tokens are the answer
    "option": None,  # whether the likeliest option is the answer
    "loss": None,  # of the answer's tokens
    "recall": recall,
    "any": any_,
    "f1": f1,
    "f1_line": f1_line,
    "rouge_l": rouge_l,
    "rouge_l_line": rouge_l_line,
    "code_similarity": code_similarity,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "tests": tests,  # runs code: only a task that was told to may ask for it
}


def grade(metric: str, text: str, references: Sequence[str]) -> float | None:
    """How right a generated text is, 0 to 1; None for metrics that no text is generated for."""
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    function = METRICS[metric]
    if function is None:
        return None
    if not references:
        raise InputError(f"metric {metric} got no references; give at least one")
    return function(text, references)
