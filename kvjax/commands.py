"""What the commands do; kvjax.cli parses their arguments."""

import contextlib
import json
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvjax
from kvjax import compare as comparing
from kvjax import models, scorers, tables
from kvjax.cache.spelling import budgeted, parse
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


@contextlib.contextmanager
def steps(args, total: int):
    """A function that names the step that begins: a bar on a terminal, else a line on stderr.

    With --json a stderr that is no terminal stays empty.
    """
    begun = []
    with progress() as bar:
        task = bar.add_task("", total=total)

        def tick(what):
            bar.update(task, description=what, completed=len(begun))
            begun.append(what)
            if bar.disable and not args.json:
                line = f"{what} ({len(begun)} of {total})" if total > 1 else what
                print(f"kvjax: {line}", file=sys.stderr, flush=True)

        yield tick


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
        most = -1

        def advance(done, total):
            nonlocal most
            if bar.disable and most < 0:
                print(f"kvjax: fetching {name}", file=sys.stderr, flush=True)
            most = max(most, done)  # files that pip moves are gone for a moment
            bar.update(task, completed=most, total=total)

        path = fetch_file(
            name,
            force=force,
            unofficial=unofficial,
            progress=advance,
        )
    return str(path), time.perf_counter() - started


def loaded(name):
    """(model, seconds of fetching)."""
    named = name in models.MODELS
    fetch_s = download(name)[1] if named else 0.0
    return kvjax.load(name), fetch_s


def usable(model, chosen, named=None):
    """The recipes of (title, recipe) that can be used; says on stderr what others need.

    One that was named raises.
    """
    out = []
    for title, recipe in chosen:
        said = tables.missing(recipe, model.tables)
        if said and named:
            raise InputError(said)
        if said:
            print(f"kvjax: left out: {said}", file=sys.stderr, flush=True)
        else:
            out.append((title, recipe))
    return out


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

    keep = {} if args.keep is None else {"keep": args.keep}
    chosen = comparing.contenders(None, keep, args.all)
    started = time.perf_counter()
    model, fetch_s = loaded(args.model)
    load_s = time.perf_counter() - started - fetch_s
    if not args.json:
        Console().print(showing.opening(model, args.model, chosen) + "\n", highlight=False)
        sys.stdout.flush()
    chosen = usable(model, chosen)
    with steps(args, len(chosen) + 1) as tick:
        report = showing.run(model, chosen, tick)
    report |= {"model": args.model, "fetch_s": fetch_s, "load_s": load_s}
    report["total_s"] = time.perf_counter() - started - fetch_s
    say(args, report, showing.show)
    if not args.json:
        Console().print(
            f"Download {fetch_s:.1f} s, everything else "
            f"{report['total_s']:.1f} s "
            f"(loading {load_s:.1f}, reading {report['prefill_s']:.1f}).",
            highlight=False,
        )


def ask(args) -> None:
    """kvjax ask."""
    comparing.check_options(args.options, args.known)
    text, question = file_and_question(args)
    recipe = parse(args.recipe, **args.options)
    model, _ = loaded(args.model)
    guided = scorers.reads(recipe.choice) == "question"  # reads the question with the text
    if not guided:
        usable(model, [(args.recipe, recipe)], args.recipe)
    tokens, asked = comparing.split(model.tokenizer, text, question)
    recipe = budgeted(recipe, len(tokens))
    max_length = comparing.room(len(tokens) + len(asked) + args.max_new_tokens)
    started = time.perf_counter()
    with steps(args, 1) as tick:
        tick(f"reading {len(tokens):,} tokens")
        _, cache = kvjax.prefill(
            model, np.asarray([tokens], np.int32), recipe, max_length=max_length, logits="none",
            question=np.asarray([asked], np.int32) if guided else None,
        )  # fmt: skip
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
    report |= {"prompt_tokens": len(tokens) + len(asked), "tokens_read": len(tokens)}
    report |= {"tokens_kept": size.tokens, "bytes": size.bytes, "dtype": model.config.dtype}
    report |= {"share_of_exact_bf16": size.share_of_exact_bf16, "read_s": read_s}
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
        f"\n[dim]{report['recipe']}: {report['tokens_kept']:,.0f} of {report['tokens_read']:,} "
        f"tokens kept, {report['bytes'] / 1e6:,.1f} MB ({report['share_of_exact_bf16']:.0%} of the "
        f"exact bf16 cache); read in {report['read_s']:.1f} s, answered in "
        f"{report['answer_s']:.1f} s. {comparing.legend(report['dtype'])}[/]",
        highlight=False,
    )


def compare(args) -> None:
    """kvjax compare."""
    comparing.check_options(args.options, args.known)
    text, question = file_and_question(args)
    chosen = comparing.contenders(args.recipe, args.options, args.all)
    model, _ = loaded(args.model)
    chosen = usable(model, chosen, args.recipe)
    tokens, asked = comparing.split(model.tokenizer, text, question)
    with steps(args, len(chosen) + 1) as tick:
        report = comparing.run(model, tokens, asked, chosen, args.max_new_tokens, tick)
    say(args, report, comparing.show)


def recipes(args) -> None:
    """kvjax recipes."""
    report = {"recipes": [comparing.describe(name) for name in kvjax.recipes()]}

    say(args, report, _show_recipes)


def _show_recipes(report, console):
    rows = report["recipes"]
    common = set.intersection(*(set(row["options"]) for row in rows if row["when"]))
    hidden = common | {"slots", "count", "fold"}  # the same everywhere; said below
    table = Table(title="kvjax.recipe(name, **options)", title_justify="left")
    for name in ("recipe", "what is kept, and the source", "when", "own options"):
        table.add_column(name, no_wrap=name in ("recipe", "when"))
    for row in rows:
        own = ", ".join(f"{k}={v}" for k, v in row["options"].items() if k not in hidden)
        source = f"[dim]{escape(row['source'])}[/]"
        table.add_row(row["name"], f"{escape(row['kept'])}\n{source}", row["when"], own)
    console.print(table)
    console.print(
        f"All that compress take {', '.join(sorted(common))} and codec. window: recent tokens that "
        "are always kept as they are. codec: how the rest is stored, as int8. Recipes that drop "
        "tokens also take keep: the fraction kept; slots: a number of tokens instead; sinks: "
        "first tokens always kept; count: how many entries keep means, exact or in the paper's "
        "arithmetic; fold: what happens to dropped tokens, None or random_features (when=during).",
        highlight=False,
    )


def fetch(args) -> None:
    """kvjax fetch."""
    path, seconds = download(args.name, force=args.force, unofficial=args.unofficial)
    report = {"name": args.name, "path": path, "seconds": seconds}
    say(args, report, lambda r, c: c.print(r["path"], soft_wrap=True, highlight=False))
