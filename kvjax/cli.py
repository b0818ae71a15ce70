"""The `kvjax` command: its parser, and one sentence with exit code 2 for bad input."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

import kvjax
from kvjax.cache import spelling
from kvjax.errors import InputError, unknown

COMMANDS = {
    "demo": "read a long text with a small model and answer from its compressed caches",
    "ask": "answer a question about a text file",
    "compare": "compare recipes with the exact cache on a text file and a question",
    "eval": "measure recipes on tasks, paired with the exact cache and with peers",
    "recipes": "list the recipes: what is kept, when, and where the method comes from",
    "train": "make what a recipe needs for a model: labels, gates, features, a surrogate",
    "fetch": "download a model once, checked against its sha256",
    "bench": "measure speed",
}
RECIPE_HELP = "other options of the recipe are given the same way, for example --window 64 --bits 4"


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are InputErrors."""

    def error(self, message):
        raise InputError(f"{' '.join(message.split())}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and gives its exit code: 0, or 2 after one sentence on stderr."""
    try:
        args = _parse(list(sys.argv[1:] if argv is None else argv))
        return args.run(args) or 0
    except InputError as error:
        print(f"kvjax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvjax: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone, as in `kvjax recipes | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parse(argv):
    parser, commands = _parser()
    if not argv:
        return argparse.Namespace(run=lambda args: _usage(parser))
    if not argv[0].startswith("-") and argv[0] not in COMMANDS:
        raise unknown("command", argv[0], COMMANDS)
    args, rest = parser.parse_known_args(argv)
    if args.command == "bench":
        args.rest = rest
        return args
    actions = commands[args.command]._actions
    args.known = [o for a in actions if a.dest != "help" for o in a.option_strings]
    if not hasattr(args, "options"):
        for word in rest:
            raise (
                unknown(f"option of kvjax {args.command}", word, args.known)
                if word.startswith("-")
                else InputError(
                    f"{word!r} is one argument too many; see kvjax {args.command} --help"
                )
            )
        return args
    args.options = _options(rest, args.command)
    if args.command == "eval":
        args.run = lambda args: _eval_run(args, argv[1:])
    elif args.keep is not None:
        args.options["keep"] = args.keep
    return args


def _usage(parser):
    parser.print_help(sys.stderr)
    return 2


def _options(words, command):
    """Recipe options among the words the parser did not know, as {"bits": 4}."""
    options, words = {}, list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise InputError(f"{word!r} is one argument too many; see kvjax {command} --help")
        name, equals, value = word[2:].partition("=")
        if not equals:
            if not words:
                raise InputError(f"option {word!r} needs a value")
            value = words.pop(0)
        options[name.replace("-", "_")] = spelling.value(value)
    return options


def _parser():
    parser = Parser(
        prog="kvjax", description="Long contexts with compressed KV caches.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    sub = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    commands = {}
    for name, text in COMMANDS.items():
        commands[name] = sub.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        if name != "bench":
            commands[name].add_argument("--json", action="store_true", help="JSON for machines")
    _demo(commands["demo"])
    _ask(commands["ask"])
    _compare(commands["compare"])
    _eval(commands["eval"])
    commands["recipes"].set_defaults(run=_run("recipes"))
    _fetch(commands["fetch"])
    _bench(commands["bench"])
    _train(commands["train"])
    return parser, commands


def _demo(parser):
    _model(parser)
    _keep(parser)
    parser.add_argument("--all", action="store_true", help="every recipe that the model can use")
    parser.set_defaults(run=_run("demo"))


def _ask(parser):
    _file_and_question(parser)
    parser.add_argument("--recipe", default="snapkv", help="as kvzip+int8@0.5 (%(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=64, help="longest answer (%(default)s)"
    )
    parser.epilog = RECIPE_HELP
    parser.set_defaults(run=_run("ask"), options={})


def _compare(parser):
    _file_and_question(parser)
    parser.add_argument(
        "--recipe", action="append", help="as snapkv, kvzip+int8@0.5; may be given again (six)"
    )
    parser.add_argument("--all", action="store_true", help="every recipe that the model can use")
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=32, help="tokens compared (%(default)s)"
    )
    parser.epilog = RECIPE_HELP
    parser.set_defaults(run=_run("compare"), options={})


def _fetch(parser):
    parser.add_argument("name", help="the model, for example smollm2-135m")
    parser.add_argument("--force", action="store_true", help="download again")
    parser.add_argument(
        "--unofficial",
        action="store_true",
        help="allow packages that are re-uploads by somebody other than the publisher",
    )
    parser.set_defaults(run=_run("fetch"))


def _train(parser):
    from kvjax.cache.named import NAMED

    names = [name for name, entry in NAMED.items() if entry.needs and name != "finch"]
    parser.add_argument("recipe", choices=names, help="the recipe that needs it")
    _model(parser)
    parser.add_argument("--text", action="append", help="a text to train on; again (Moby Dick)")
    parser.add_argument("--length", type=_positive, help="tokens of a text (the recipe's own)")
    parser.add_argument("--steps", type=_positive, help="steps of training, or epochs, if any")
    parser.add_argument("--count", type=_positive, help="pieces of text that kvzap repeats (16)")
    parser.add_argument("--out", help="the file to write (where kvjax.load finds it)")
    parser.add_argument("--force", action="store_true", help="replace the file")

    def train(args):
        lacking = [n for n in ("optax", "orbax") if importlib.util.find_spec(n) is None]
        if lacking:
            raise InputError(f"training needs {lacking[0]}: pip install 'kvjax[train]'")
        from kvjax.train import command  # pyright: ignore[reportMissingImports]

        return command.main(args)

    parser.set_defaults(run=train)


def _eval(parser):
    add = parser.add_argument
    add("--model", action="append", help="name or path; may be given again (smollm2-135m)")
    add("--recipe", action="append", help="as snapkv@0.5, snapkv+int8, kvpress:kvzip@0.3 (six)")
    add("--keep", type=_fractions, default=(), help="budgets of recipes without one: 0.75,0.5,0.25")
    add("--task", action="append", help="as niah_single@1024,items=60, or FILE.py:FUNCTION (suite)")
    add("--suite", help="a list of tasks: smollm2, qwen, quick (what suits the model)")
    add("--items", type=_positive, help="items of every task (the suite's own numbers)")
    add("--seed", type=int, default=0, help="of the items (%(default)s)")
    add("--quick", action="store_true", help="few items of three short tasks: under two minutes")
    add("--query-aware", action="store_true", help="compress knowing the question")
    add("--peer", action="append", default=[], help="run it on the same items: kvpress, hf-quant")
    add("--peer-python", help="a Python that has the peers (made in the cache folder, gigabytes)")
    add("--unofficial", action="store_true", help="allow models that are unofficial re-uploads")
    add("--out", help="file of results; the same command goes on with it (kvjax-eval/...)")
    add("--force", action="store_true", help="begin that file anew")
    add("--reuse", action="append", default=[], help="take rows that are still valid from a file")
    add("--show", action="append", help="tables and plots of a file of results, nothing is run")
    add("--against", metavar="RECIPE", help="differences from this recipe (exact)")
    add("--check", metavar="FILE", help="run a file of results again and compare")
    add("--details", action="store_true", help="every figure with its interval")
    add("--markdown", action="store_true", help="tables in Markdown")
    add("--no-plot", dest="plot", action="store_false", help="write no picture")
    add("--list", action="store_true", help="list tasks and suites")
    parser.epilog = RECIPE_HELP
    parser.set_defaults(run=None, options={})


def _eval_run(args, argv):
    from kvjax.eval import command  # pyright: ignore[reportMissingImports]

    return command.run(args, argv)


def _bench(parser):
    sub = parser.add_subparsers(dest="what", required=True, parser_class=Parser)
    sub.add_parser("speed", help="decode and prefill speed, and memory", add_help=False)
    parser.set_defaults(run=_bench_speed)


def _bench_speed(args):
    from kvjax.eval import speed  # pyright: ignore[reportMissingImports]

    return speed.run(args.rest)


def _file_and_question(parser):
    parser.add_argument("file", help="a UTF-8 text file")
    parser.add_argument("question", help="what to ask about it")
    _model(parser)
    _keep(parser)


def _model(parser):
    parser.add_argument("--model", default="smollm2-135m", help="name or path (%(default)s)")


def _keep(parser):
    parser.add_argument(
        "--keep", type=_fraction, help="fraction of token entries kept (the recipe's own)"
    )


def _fraction(text):
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text!r}")
    return value


def _fractions(text):
    return tuple(_fraction(part) for part in text.split(","))


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _run(name):
    """The function of that name in kvjax.commands, imported when it is called."""

    def run(args):
        from kvjax import commands

        return getattr(commands, name)(args)

    return run


if __name__ == "__main__":
    sys.exit(main())
