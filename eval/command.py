"""`kvjax eval`: runs, shows, and checks results."""

import json
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement

from kvjax import commands, compare
from kvjax.errors import InputError, unknown
from kvjax.eval import check, file, keys, peers, plans, progress, suites, tables
from kvjax.eval.results import Results
from kvjax.eval.run import execute
from kvjax.eval.tasks import TASKS, sentence
from kvjax.models import MODELS

QUICK = ("streaming_llm", "snapkv", "int8")


def run(args, argv: list[str]) -> int:
    """What the arguments ask for; the exit code: 1 where a check found another result."""
    if args.list:
        return _list(args)
    if args.show:
        return _report(args, Results.read(*args.show), Path(args.show[0]))
    if args.check:
        with progress.shown() as tick:
            found = check.check(
                args.check, items=args.items, peer_python=args.peer_python,
                unofficial=args.unofficial, tick=tick,
            )  # fmt: skip
        return check.say(found, args.json)
    models = args.model or ["smollm2-135m"]
    if args.quick and args.suite:
        raise InputError("--quick is a suite of its own; leave out --quick or --suite")
    todo = plans.plan(
        models, _recipes(args), args.task or None, keep=args.keep, items=args.items,
        seed=args.seed, query_aware=args.query_aware, peers=args.peer,
        suite="quick" if args.quick and not args.task else args.suite,
    )  # fmt: skip
    labels = [*todo.recipes, *(word for words in todo.peers.values() for word in words)]
    if args.against and args.against not in labels:
        raise unknown("recipe of this run", args.against, labels)
    out = Path(args.out or _default(args, todo, models[0]))
    for name in models:
        if name in MODELS:
            commands.download(name, unofficial=args.unofficial)
    if args.peer and args.peer_python is None:
        for peer in args.peer:
            peers.python(peer)  # made now: it says what it does
    if not args.out:
        out.parent.mkdir(exist_ok=True)
    try:
        with progress.shown() as tick:
            found = execute(
                todo, peer_python=args.peer_python, out=out, reuse=args.reuse, force=args.force,
                command=shlex.join(["kvjax", "eval", *argv]), unofficial=args.unofficial, tick=tick,
            )  # fmt: skip
    except KeyboardInterrupt:
        print(f"kvjax: rows so far are in {out}; the same command goes on", file=sys.stderr)
        raise
    return _report(args, found, out)


def short(model: str) -> str:
    """A model's name for files: of a path its last part."""
    return Path(model).name.removesuffix(".gguf")


def _default(args, todo, model: str) -> str:
    """Where results go: a name that says what was run, the same for the same configuration."""
    what = "quick" if args.quick else args.suite or ("tasks" if args.task else "suite")
    config = keys.digest([json.dumps(todo.config(), sort_keys=True)])[:6]
    return f"kvjax-eval/{short(model)}-{what}-{config}.jsonl"


def _recipes(args):
    """The recipes with the options that belong to all of them."""
    words = args.recipe or (list(QUICK) if args.quick else None)
    if not args.options:
        return words
    compare.check_options(args.options, args.known)
    if not args.recipe:
        option = next(iter(args.options)).replace("_", "-")
        raise InputError(f"option --{option} belongs to one recipe; name it with --recipe")
    more = "".join(f",{name}={value}" for name, value in args.options.items())
    return [word if ":" in word else word + more for word in args.recipe]


def _list(args) -> int:
    names = {name: sentence(task) for name, task in TASKS.items()}
    if args.json:
        print(json.dumps({"tasks": names, "suites": suites.SUITES}, indent=2))
        return 0
    console = Console()
    for name, text in names.items():
        console.print(f"[bold]{name}[/]  {text}", highlight=False)
    for name, tasks in suites.SUITES.items():
        words = ", ".join(f"{word} ({count} items)" for word, count in tasks)
        console.print(f"\nsuite [bold]{name}[/]: {words}", highlight=False)
    return 0


def _report(args, found: Results, out: Path) -> int:
    """Tables on the terminal and a picture beside the results."""
    found = found.against(args.against) if args.against else found
    if args.json:
        for line in summaries(found):
            print(file.dumps(_plain(line)), end="")
        return 0
    if args.markdown:
        for made in _tables(found):
            print(tables.markdown(*made))
        print("\n".join(tables.notes(found)))
        return 0
    console = Console()
    for what in tables.WHAT if args.details is False else ("details",):
        drawn = found.table(what)
        # cut off or folded, figures are worth nothing: let the terminal wrap what is too wide
        wide = Measurement.get(console, console.options.update(width=1000), drawn).maximum
        console.width = max(console.width, wide)
        console.print(drawn)
        console.print()
    for note in tables.notes(found):
        console.print(escape(note), highlight=False)
    if args.plot:
        try:
            for path in plot_all(found, out):
                console.print(f"plot: {escape(str(path))}", highlight=False, soft_wrap=True)
        except InputError as error:  # the tables stand, and the rows are written
            print(f"kvjax: no plot: {error}", file=sys.stderr)
    if not args.show:
        again = escape(shlex.join(["kvjax", "eval", "--show", str(out)]))
        console.print(f"rows: {again} (--details, --markdown)", highlight=False, soft_wrap=True)
    return 0


def _tables(found):
    return [tables.matrix(found, what) for what in tables.WHAT] + [tables.details(found)]


def plot_all(found: Results, out: Path) -> list[Path]:
    """A picture for each model, beside the results."""
    models = list(dict.fromkeys(s.model for s in found.summary))
    stem = out.name.partition(".jsonl")[0]
    paths, names = [], [short(model) for model in models]
    for i, model in enumerate(models):
        if all((model, s.task) in set(found.dropped) for s in found.summary if s.model == model):
            continue
        own = names[i] if names.count(names[i]) == 1 else f"{names[i]}-{i + 1}"
        name = stem if len(models) == 1 else f"{stem}-{own}"
        paths.append(out.with_name(f"{name}.png"))
        found.plot(paths[-1], model)
    return paths


def _plain(value):
    """The same with null for what is no number, as JSON has it."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def summaries(found: Results) -> list[dict]:
    """The header, then a line for each model, task and recipe."""
    lines = [asdict(s) for s in found.summary]
    named = [{"kind": "summary", "measure": line.pop("kind")} | line for line in lines]
    return [found.header, *named]
