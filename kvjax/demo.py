"""The demo: one long text, one exact cache, six compressed ones, the same questions to each."""

import dataclasses
import time
from dataclasses import dataclass

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvjax
from kvjax import compare
from kvjax.data import moby_dick

ANSWER_TOKENS = 8  # enough for the longest answer; a power of two, which `generate` runs whole


@dataclass(frozen=True)
class Question:
    """The beginning of a sentence, and the words that rightly continue it."""

    text: str
    answer: str
    planted: bool


# Facts that no model can know, put before these paragraphs of the chapter.
PLANTED = {
    2: "The secret number for the city of Lisbon is 48213.",
    5: "The keeper of the old lighthouse was called Ambrose Tull.",
    12: "The key of the chapel was hidden in the green teapot.",
}
QUESTIONS = (
    Question("The secret number for the city of Lisbon is", " 48213", True),
    Question("The keeper of the old lighthouse was called", " Ambrose Tull", True),
    Question("The key of the chapel was hidden in the", " green teapot", True),
    Question("The landlord of the Spouter-Inn was called Peter", " Coffin", False),
    Question("The inn kept by Hosea Hussey was called the", " Try Pots", False),
    Question("Hosea Hussey had his account books bound in superior old", " shark-skin", False),
)


def passage() -> str:
    """Chapter 15 of Moby Dick, a paragraph a line, with the planted facts: about 1,700 tokens."""
    book = moby_dick()
    chapter = book[book.index("CHAPTER 15. Chowder.") : book.index("CHAPTER 16. The Ship.")]
    paragraphs = [" ".join(part.split()) for part in chapter.strip().split("\n\n")]
    for place in sorted(PLANTED, reverse=True):
        paragraphs.insert(place, PLANTED[place])
    return "\n\n".join(paragraphs)


def opening(model, name: str, chosen) -> str:
    """What the demo is about to do."""
    count = len(model.tokenizer.encode(passage()))
    keeps = sorted({recipe.keep for _, recipe in chosen if recipe.choice is not None})
    return (
        f"{name} reads chapter 15 of Moby Dick with {len(PLANTED)} planted facts "
        f"({count:,} tokens) once exactly, then through {len(chosen) - 1} compressed caches. From "
        f"each it continues {len(QUESTIONS)} sentences. Recipes that drop tokens keep "
        f"{' or '.join(f'{keep:.0%}' for keep in keeps)} of them."
    )


def ask(model, cache, question: Question) -> dict:
    """One question to one cache, as a row of the report."""
    encode = model.tokenizer.encode
    prompt = encode("\n\n" + question.text, add_bos=False)
    right = encode(question.answer, add_bos=False)
    text = compare.answer(model, cache, prompt, ANSWER_TOKENS, stop=()).text
    assert isinstance(text, str)
    said = text.strip().split("\n")[0]
    return {
        "question": question.text,
        "planted": question.planted,
        "expected": question.answer.strip(),
        "answer": said,
        "right": question.answer.strip() in said,
        "logprob": compare.answer_logprob(model, cache, prompt, right),
    }


def run(model, chosen, tick, questions=QUESTIONS) -> dict:
    """The whole demo as a dict, with a row for each recipe; `tick(what)` advances."""
    tokens = np.asarray([model.tokenizer.encode(passage())], np.int32)
    max_length = compare.room(tokens.shape[1])
    tick("reading the text")
    started = time.perf_counter()
    _, exact = kvjax.prefill(model, tokens, max_length=max_length, logits="none")
    jax.block_until_ready(exact)
    report = {"tokens": tokens.shape[1], "prefill_s": time.perf_counter() - started}
    report |= {"dtype": model.config.dtype, "rows": []}
    for name, recipe in chosen:
        tick(name)
        started = time.perf_counter()
        cache = jax.block_until_ready(compare.build(model, exact, tokens, recipe, max_length))
        row = {"recipe": name, "when": compare.when(recipe), "keep": recipe.keep}
        row |= {"build_s": time.perf_counter() - started}
        row |= dataclasses.asdict(compare.held(model.config, cache, max_length))
        row["answers"] = [ask(model, cache, question) for question in questions]
        last = model.tokenizer.encode("\n\n" + questions[-1].text, add_bos=False)
        row["ms_per_token"] = compare.ms_per_token(model, cache, last, ANSWER_TOKENS)
        report["rows"].append(row)
    return report


def show(report: dict, console: Console) -> None:
    """What each cache holds and costs, then what it answers, a table for each question."""
    rows = report["rows"]
    exact = rows[0]["bytes"]
    cost = compare.table(f"The caches of {report['tokens']:,} tokens", ("right",))
    for row in rows:
        right = sum(a["right"] for a in row["answers"])
        compare.add_row(cost, row, exact, (f"{right}/{len(row['answers'])}",))
    console.print(cost)
    during = ", ".join(row["recipe"] for row in rows if row["when"] == "during")
    console.print(
        "\ntokens: kept, per layer and kv head. of exact: of the exact cache here. of bf16: of an "
        "exact bfloat16 cache. right: answers. ms/tok: median, compiled. "
        f"{compare.legend(report['dtype'])} These compress while reading, the others "
        f"afterwards: {during or 'none'}.\n\n"
        "Below, (planted) is a made-up fact that we put into the text and no model can know; "
        "(found) is a fact of the chapter itself. log p: log-probability of the right answer.\n",
        highlight=False,
    )
    for i, asked in enumerate(rows[0]["answers"]):
        kind = "planted" if asked["planted"] else "found"
        title = f"{i + 1}. {asked['question']} ... [bold]{asked['expected']}[/] ({kind})"
        table = Table(title=title, title_justify="left", title_style="")
        table.add_column("recipe", min_width=max(len(row["recipe"]) for row in rows))
        table.add_column("answer", no_wrap=True, width=36, overflow="ellipsis")
        table.add_column("right?", min_width=6)
        table.add_column("log p", justify="right", min_width=6)
        for row in rows:
            answer = row["answers"][i]
            mark = "[green]right[/]" if answer["right"] else "[red]wrong[/]"
            table.add_row(row["recipe"], escape(answer["answer"]), mark, f"{answer['logprob']:.2f}")
        console.print(table)
    console.print(
        "Recipes that evict choose what to keep without seeing the question, so a fact that is "
        "asked about later may be gone; codecs keep every token. "
        'Next, on a text of yours: kvjax compare your.txt "question"',
        highlight=False,
    )
