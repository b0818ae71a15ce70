"""Runs recipes on items, item by item: one exact reading of a context serves them all."""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.cache import spelling
from kvjax.eval import beside, file, ledger, one, programs, progress, rows, score, where
from kvjax.eval.jobs import Job, cost, job
from kvjax.eval.ledger import Ledger
from kvjax.eval.plans import Plan, plan
from kvjax.eval.results import Results
from kvjax.eval.timing import timed

PROBE = 20  # items after which a task that is near chance stops
TIMED = 3  # items of the longest task on which decoding is timed


def run(
    models: Any = "smollm2-135m", recipes: Any = None, tasks: Any = None, *,
    keep: Sequence[float] = (), items: int | None = None, seed: int = 0, suite: str | None = None,
    query_aware: bool = False, peers: Sequence[str] = (), peer_python: str | None = None,
    out: str | os.PathLike[str] | None = None, reuse: Sequence[str | os.PathLike[str]] = (),
    force: bool = False, command: str = "kvjax.eval.run", unofficial: bool = False,
    tick: Callable[[str, float, float], None] = progress.silent,
) -> Results:  # fmt: skip
    """Recipes on tasks, paired with the exact cache on the same items.

    models: a Model, a name or path, several, or {label: either}. recipes: words ("snapkv@0.5",
    "snapkv+int8", "kvpress:kvzip@0.5") or recipes; default the six of `kvjax compare`. keep:
    budgets for the recipes given without one. tasks: names ("niah_single@1024"), functions
    (tokenizer, count, seed) -> items, or {name: function}; default a suite. out: a file of JSON
    lines, which a run that was stopped goes on with. reuse: earlier files whose rows count where
    item, recipe and code are the same. tick(what, done, total) is called as it goes on.
    """
    todo = plan(models, recipes, tasks, keep=keep, items=items, seed=seed,
                query_aware=query_aware, peers=peers, suite=suite)  # fmt: skip
    return execute(todo, peer_python=peer_python, out=out, reuse=reuse, force=force,
                   command=command, unofficial=unofficial, tick=tick)  # fmt: skip


def execute(
    todo: Plan, *, peer_python: str | None = None, out: str | os.PathLike[str] | None = None,
    reuse: Sequence[str | os.PathLike[str]] = (), force: bool = False, command: str = "",
    unofficial: bool = False, tick: Callable[[str, float, float], None] = progress.silent,
) -> Results:  # fmt: skip
    """Runs a plan; the arguments are those of `run`."""
    header = {"kind": "run", "format": file.FORMAT} | where.head(command, todo.config())
    header = json.loads(json.dumps(header))  # as it will be read again
    shelf = ledger.shelf(reuse, header["versions"])
    jobs = [job(todo, label, given, unofficial) for label, given in todo.models.items()]
    file.check(out, header, force)
    with file.opened(out, header, force=force, current=ledger.current(jobs)) as log:
        work = sum(job_.work(todo) for job_ in jobs)
        book = Ledger(log, shelf, work, tick)
        for job_ in jobs:
            for name in job_.items:
                _task(todo, job_, name, book)
            for peer, labels in todo.peers.items():
                beside.run(peer, labels, peer_python, job_, todo, book, cost)
    return Results(log.header, log.lines)


def _task(todo: Plan, job: Job, name: str, book: Ledger) -> None:
    """All recipes on one task; a task that is near chance stops after PROBE items."""
    made = job.items[name]
    for i, item in enumerate(made):
        if i == PROBE and len(made) > PROBE and _dropped(job, name, book):
            book.advance(name, sum(map(cost, made[i:])) * len(todo.recipes))
            return
        what = f"{job.label}, {name} {i + 1} of {len(made)}"
        book.advance(what)
        missing = [r for r in todo.recipes if book.get(job, name, i, r) is None]
        book.advance(what, cost(item) * (len(todo.recipes) - len(missing)))
        if missing:
            _item(todo, job, name, i, missing, book, what)


def _dropped(job, name, book) -> bool:
    exact = [book.rows[job.label, name, i, "exact"] for i in range(PROBE)]
    return Results(book.log.header, exact).near_chance(job.label, name)


def _item(todo: Plan, job: Job, name: str, i: int, missing: list[str], book: Ledger, what) -> None:
    """The rows that an item lacks. The exact cache is read in any case: they all start from it."""
    model, item = job.model, job.items[name][i]
    ids, room = np.asarray([item.context], np.int32), one.room(item)
    timing = i < TIMED and name == job.longest
    with timed() as read:
        _, exact = kvjax.prefill(model, ids, max_length=room, logits="none")
        jax.block_until_ready(exact)
    with timed() as scored:
        heard, truths = score.listen(model, exact, item)
    seen = one.Seen()
    for label in missing:
        if label == "exact":
            recent = one.recent(model, item, room) if item.recent else None
            row = rows.exact(item, heard, model.tokenizer, recent)
            cache, spans = exact, {"read": read, "score": scored}
        else:
            masks = rows.masks(book.rows[job.label, name, i, "exact"])
            recipe = spelling.budgeted(todo.recipes[label], len(item.context))
            if todo.query_aware:
                got, cache, spans = one.aware(model, exact, ids, recipe, room, item, truths)
            else:
                got, cache, spans = one.agnostic(
                    model, exact, ids, recipe, room, item, truths, seen
                )
            row = rows.row(item, got, model.tokenizer, masks)
        times = {k: vars(v) for k, v in spans.items()}
        times |= {"decode": one.decode(model, cache, item)} if timing else {}
        book.new(job, name, i, label, one.sizes(cache) | row, times)
        programs.forget()
        book.advance(what, cost(item))
