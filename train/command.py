"""kvjax train: makes what a recipe needs for a model, and puts it where `load` finds it."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console

import kvjax
from kvjax import calibrate, tables
from kvjax.commands import loaded, progress, read_text, say
from kvjax.data import moby_dick
from kvjax.errors import InputError

EPOCHS = 4  # of less, unless told: the paper's 40 take hours on a CPU


def main(args) -> None:
    """Runs the command; its options are in kvjax/cli.py."""
    texts = None if args.text is None else [read_text(name) for name in args.text]
    if args.count is not None and args.recipe != "kvzap":
        raise InputError(f"--count is of kvzap, how many pieces it repeats; {args.recipe} has none")
    path = target(args.recipe, args.model, args.out, args.force)
    model, _ = loaded(args.model)
    more = {} if args.count is None else {"count": args.count}
    say(args, run(args.recipe, model, path, texts, args.length, args.steps, **more), show)


def target(recipe: str, model: str, out: str | None, force: bool) -> Path:
    """Where the tables go; InputError if something is there, before any work is done."""
    path = Path(out) if out else tables.folder(model) / f"{recipe}{tables.END}"
    if path.exists() and not force:
        raise InputError(f"{path} is there already; use --force to replace it, or --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def run(recipe: str, model, path: Path, texts, length, steps, **more) -> dict[str, Any]:
    """Makes the tables of a recipe and writes them; more: options that it alone has."""
    started = time.perf_counter()
    made = MAKERS[recipe](model, texts, length, steps, **more)
    tables.save_tables(path, made, model, overwrite=True)
    return {"recipe": recipe, "file": str(path), "bytes": kvjax.nbytes(made),
            "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


def show(report: dict, console: Console) -> None:
    """What was made, and what to do with it."""
    console.print(
        f"{report['recipe']}: {report['bytes']:,} bytes in {report['seconds']} s, in "
        f"{report['file']}\nkvjax.load finds them; next: kvjax compare FILE QUESTION --recipe "
        f"{report['recipe']}", highlight=False, soft_wrap=True,
    )  # fmt: skip


def _razor(model, texts, length, steps):
    _only(razor=(texts, steps))
    with progress() as bar:
        task = bar.add_task("probing heads", total=None)
        tick = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        return {"scorer": {"label": calibrate.razor(model, block=length, progress=tick).label}}


def _kvzip_heads(model, texts, length, steps):
    _only(kvzip_heads=(steps,))
    with progress() as bar:
        task = bar.add_task("repeating", total=None)
        tick = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        found = calibrate.kvzip_heads(model, texts, length=length, progress=tick)
    return {"scorer": {"label": found.label}}


def _kvzap(model, texts, length, steps, **options):
    from kvjax.train import kvzap

    options |= {} if length is None else {"length": (length, length)}
    options |= {} if steps is None else {"epochs": steps}
    return kvzap.surrogate(model, texts, **options)


def _duo(model, texts, length, steps):
    from kvjax.train import TrainConfig, duo
    from kvjax.train.passkeys import Passkeys

    length = length or 512
    batches = Passkeys(model.tokenizer, "\n".join(texts or [moby_dick()]), length=length, words=4)
    config = TrainConfig(steps or 100, learning_rate=0.02)
    return duo.labels(duo.gates(model, batches, sink=16, recent=64, config=config))


def _less(model, texts, length, steps):
    from kvjax.train import less

    return less.features(
        model, kvjax.recipe("less"), texts, length=length or 512, epochs=steps or EPOCHS
    )


def _dms(model, texts, length, steps):
    from kvjax.train import dms

    return dms.tables(dms.gates(model, texts, length=length or 512, steps=steps or 100))


def _metasoft(model, texts, length, steps):
    from kvjax.train import TrainConfig, probes

    config = TrainConfig(steps or 200)
    return probes.tables(probes.fit(model, texts, length=length or 512, config=config))


def _only(**given):
    """Refuses options that a recipe has no use for."""
    for name, values in given.items():
        if any(value is not None for value in values):
            raise InputError(f"{name} takes --length only: it is not trained on texts in steps")


MAKERS = {
    "razor": _razor,
    "kvzip_heads": _kvzip_heads,
    "kvzap": _kvzap,
    "duo": _duo,
    "less": _less,
    "metasoft": _metasoft,
    "dms": _dms,
}
