"""What the commands do; kvjax.cli parses their arguments."""

import contextlib
import json
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvjax
from kvjax import compare as comparing
from kvjax import models
from kvjax.errors import InputError
from kvjax.models.fetch import fetch as fetch_file


@contextlib.contextmanager
def progress(*columns):
    """A progress bar on stderr; nothing at all where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *columns, TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        yield bar


def say(args, report: dict, show) -> None:
    """Prints the report: JSON where asked, otherwise what `show(report, console)` draws."""
    if args.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        show(report, Console())


def download(name, force=False, unofficial=False) -> tuple[str, float]:
    """Fetches a named model with a progress bar; (its path, seconds). Paths are left alone."""
    if name not in models.MODELS and not force and Path(name).exists():
        return name, 0.0
    started = time.perf_counter()
    with progress(DownloadColumn()) as bar:
        task = bar.add_task(f"fetching {name}", total=None)
        path = fetch_file(
            name,
            force=force,
            unofficial=unofficial,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    return str(path), time.perf_counter() - started


def loaded(name):
    """(model, seconds of fetching)."""
    named = name in models.MODELS
    fetch_s = download(name)[1] if named else 0.0
    return kvjax.load(name), fetch_s


def read_text(name: str) -> str:
    """The text of a UTF-8 file."""
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot read {name}: {error.strerror}; give the path of a text file"
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        start = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        raise InputError(
            f"{name} is not UTF-8 text: byte {start} is 0x{data[start]:02x}; convert it to UTF-8"
        ) from None
    if not text.strip():
        raise InputError(f"{name} is empty; give a file with text")
    return text


def file_and_question(args) -> tuple[str, str]:
    if not args.question.strip():
        raise InputError("the question is empty; ask something about the file")
    return read_text(args.file), args.question


def demo(args) -> None:
    """kvjax demo."""
    from kvjax import demo as showing

    chosen = showing.recipes(args.all, args.keep)
    started = time.perf_counter()
    model, fetch_s = loaded(args.model)
    load_s = time.perf_counter() - started - fetch_s
    with progress() as bar:
        task = bar.add_task("", total=len(chosen) + 1)
        begun = []

        def tick(what):
            bar.update(task, description=what, completed=len(begun))
            begun.append(what)

        report = showing.run(model, chosen, tick)
    report |= {"model": args.model, "fetch_s": fetch_s, "load_s": load_s}
    report["total_s"] = time.perf_counter() - started - fetch_s
    say(args, report, showing.show)
    if not args.json:
        Console().print(
            "tokens: per layer and kv head. of exact: of the exact cache here "
            f"({model.config.dtype}). of bf16: of an exact bfloat16 cache. log p: of the right "
            f"answer. ms/token: median, compiled.\nDownload {fetch_s:.1f} s, everything else "
            f"{report['total_s']:.1f} s "
            f"(loading {load_s:.1f}, reading {report['prefill_s']:.1f}).",
            highlight=False,
        )


def ask(args) -> None:
    """kvjax ask."""
    text, question = file_and_question(args)
    recipe = kvjax.recipe(args.recipe, **args.options)
    model, _ = loaded(args.model)
    tokens, asked = comparing.split(model.tokenizer, text, question)
    max_length = comparing.room(len(tokens) + len(asked) + args.max_new_tokens)
    started = time.perf_counter()
    with progress() as bar:
        bar.add_task(f"reading {len(tokens):,} tokens", total=None)
        _, cache = kvjax.prefill(
            model, np.asarray([tokens], np.int32), recipe, max_length=max_length, logits="none"
        )
        size = comparing.held(model.config, cache, max_length)  # waits for the cache
    read_s = time.perf_counter() - started
    made = kvjax.generate(
        model,
        asked,
        cache=cache,
        max_new_tokens=args.max_new_tokens,
        on_token=None if args.json else _printer(model.tokenizer),
    )
    report = {"answer": made.text, "recipe": args.recipe, "options": args.options}
    report |= {"prompt_tokens": len(tokens) + len(asked), "tokens_kept": size.tokens}
    report |= {"bytes": size.bytes, "share": size.share, "read_s": read_s}
    report["answer_s"] = time.perf_counter() - started - read_s
    say(args, report, _show_ask)


def _printer(tokenizer):
    stream = tokenizer.stream()

    def on_token(row, token):
        sys.stdout.write(stream.push(token))
        sys.stdout.flush()

    return on_token


def _show_ask(report, console):
    console.print(
        f"\n[dim]{report['recipe']}: {report['tokens_kept']:,.0f} of {report['prompt_tokens']:,} "
        f"tokens kept, {report['bytes']:,} bytes ({report['share']:.0%} of the exact bf16 cache); "
        f"read in {report['read_s']:.1f} s, answered in {report['answer_s']:.1f} s[/]"
    )


def compare(args) -> None:
    """kvjax compare."""
    text, question = file_and_question(args)
    chosen = comparing.contenders(args.recipe, args.options)
    model, _ = loaded(args.model)
    tokens, asked = comparing.split(model.tokenizer, text, question)
    with progress() as bar:
        task = bar.add_task("reading", total=len(chosen) + 1)

        def tick(what):
            bar.update(task, description=what, advance=1)

        report = comparing.run(model, tokens, asked, chosen, args.max_new_tokens, tick)
    say(args, report, comparing.show)


def recipes(args) -> None:
    """kvjax recipes."""
    report = {"recipes": [comparing.describe(name) for name in kvjax.recipes()]}

    say(args, report, _show_recipes)


def _show_recipes(report, console):
    rows = report["recipes"]
    common = set.intersection(*(set(row["options"]) for row in rows if row["when"]))
    table = Table(title="kvjax.recipe(name, **options)", title_justify="left")
    for name in ("recipe", "what is kept", "when", "own options", "source"):
        table.add_column(name, no_wrap=name in ("recipe", "when"), overflow="fold")
    for row in rows:
        own = ", ".join(f"{k}={v}" for k, v in row["options"].items() if k not in common)
        table.add_row(row["name"], row["kept"], row["when"], own, row["source"])
    console.print(table)
    console.print(f"All that compress take {', '.join(sorted(common))} and codec.")


def fetch(args) -> None:
    """kvjax fetch."""
    path, seconds = download(args.name, force=args.force, unofficial=args.unofficial)
    report = {"name": args.name, "path": path, "seconds": seconds}
    say(args, report, lambda r, c: c.print(r["path"], soft_wrap=True, highlight=False))
