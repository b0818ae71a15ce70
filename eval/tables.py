"""Results as tables: for a terminal, or in Markdown."""

import math
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from kvjax.errors import unknown

if TYPE_CHECKING:
    from kvjax.eval.results import Results, Summary

WHAT = {
    "change": "against {}: points of accuracy, % of loss",
    "value": "accuracy, or loss in nats a token",
    "logprob": "log-probability of the right answer, less that of {}, in nats",
}
CLAIMS = {"equal": "=", "worse": "<", "open": "?", "few": "", "": ""}


def table(results: "Results", what: str) -> Table:
    """One row for each recipe, one column for each task; or "details"."""
    return _drawn(*(details(results) if what == "details" else matrix(results, what)))


def matrix(results: "Results", what: str) -> tuple[str, list[str], list[list[str]]]:
    """(title, head, rows) of recipes x tasks."""
    if what not in WHAT:
        raise unknown("table", what, [*WHAT, "details"])
    cells = {(s.model, s.recipe, s.task): s for s in results.summary}
    models = list(dict.fromkeys(s.model for s in results.summary))
    dropped = set(results.dropped)
    tasks = [t for t in dict.fromkeys(s.task for s in results.summary)
             if any((m, t) not in dropped for m in models)]  # fmt: skip
    out = []
    for model, recipe in dict.fromkeys((s.model, s.recipe) for s in results.summary):
        mine = [cells.get((model, recipe, task)) for task in tasks]
        shares = [s.share for s in mine if s is not None]
        name = recipe if len(models) == 1 else f"{model}: {recipe}"
        held = f"{sum(shares) / len(shares):.0%}" if shares else ""
        out.append([name, held, *(_cell(s, what, dropped, results.base) for s in mine)])
    query = results.header["config"]["query"]
    title = f"{WHAT[what].format(named(results.base))} (query-{query})"
    return title, ["recipe", "bytes", *_heads(tasks)], out


def named(base: str) -> str:
    """What differences are taken from, in words."""
    return "the exact cache" if base == "exact" else base


def _heads(tasks) -> list[str]:
    """Names of tasks, without their options where that is clear."""
    short = [t if ".py:" in t else t.partition("@")[0].partition(",")[0] for t in tasks]
    return [s if short.count(s) == 1 else task for s, task in zip(short, tasks, strict=True)]


def _cell(s: "Summary | None", what, dropped, base) -> str:
    if s is None or (s.model, s.task) in dropped:
        return ""
    if what == "value" or s.recipe == base:
        return f"{s.value.mean:.1%}" if s.kind == "accuracy" else f"{s.value.mean:.3f}"
    if what == "logprob":
        return f"{s.logprob_change.mean:+.2f}"
    points = f"{100 * s.change.mean:+.1f}"
    return (points + ("%" if s.kind == "loss" else "")) + CLAIMS[s.claim]


def details(results: "Results") -> tuple[str, list[str], list[list[str]]]:
    """(title, head, rows) with every figure and its interval."""
    head = ["task", "recipe", "n", "value", "chance", "change [95%]", "claim", "lp change [95%]",
            "key loss", "KL", "top-1", "held MB", "live MB", "entries", "compress s",
            "ms/tok"]  # fmt: skip
    models = len({s.model for s in results.summary}) > 1
    out = []
    for s in results.summary:
        unit, base = "%" if s.kind == "loss" else "", s.recipe == results.base
        out.append([
            f"{s.model}: {s.task}" if models else s.task, s.recipe, f"{s.asks} in {s.items}",
            f"{s.value.mean:.3f}" if s.kind == "loss" else f"{s.value.mean:.1%}",
            f"{s.chance:.3f}" if s.kind == "loss" else f"{s.chance:.1%}",
            "" if base else _interval(s.change, 100, "+.1f", unit), s.claim,
            "" if base else _interval(s.logprob_change, 1, "+.3f"),
            "" if s.key_loss is None else f"{s.key_loss.mean:.3f}",
            _number(s.kl, ".4f"), _number(s.top1, ".1%"), f"{s.held / 1e6:.1f}",
            f"{s.live / 1e6:.1f}", f"{s.entries:.0f}",
            _spread(s.compress_s, ".3f"), _spread(s.decode_ms, ".1f"),
        ])  # fmt: skip
    return "every figure, intervals over items", head, out


def _interval(m, scale, form, unit="") -> str:
    if math.isnan(m.mean):
        return ""
    low, high = format(scale * m.low, form), format(scale * m.high, form)
    return f"{scale * m.mean:{form}}{unit} [{low}, {high}]"


def _number(x, form) -> str:
    return "" if math.isnan(x) else format(x, form)


def _spread(x, form) -> str:
    return "" if x is None else f"{x[0]:{form}} ({x[1]:{form}}-{x[2]:{form}})"


def _drawn(title, head, rows) -> Table:
    made = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for name in head:
        made.add_column(
            escape(name), justify="left" if name in ("task", "recipe") else "right", no_wrap=True
        )
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def markdown(title, head, rows) -> str:
    """The same as a Markdown table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    body = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
    )
    return f"**{title}**\n\n{body}\n"


def notes(results: "Results") -> list[str]:
    """Sentences that belong under the tables."""
    out = [
        f"{task} is left out for {model}: the exact cache is near chance there, so that nothing "
        "can be said about a compressed one; give it more items or another length."
        for model, task in results.dropped
    ]
    noted = {line["note"]: None for line in results.lines if "note" in line}
    out += [f"{note}." for note in noted]
    margin = "= not worse by 3 points (1% of loss) with 95% confidence, < worse by more, ? open; "
    out.append(margin + "no sign: fewer than 150 paired asks. Intervals resample items.")
    return out
