"""`kvjax bench speed`: kvjax and a peer in processes of their own, in turns, on the same cores."""

import json
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn

from kvjax import cli, commands, data
from kvjax.cache import spelling
from kvjax.errors import InputError, unknown
from kvjax.eval import beside, file, peers, speed_report, where
from kvjax.models import fetch, gguf_header, tokenizer

ENGINES = {
    "kvjax": "kvjax_speed", "transformers": "transformers_speed", "kvpress": "kvpress_speed",
}  # fmt: skip
PEERS = tuple(name for name in ENGINES if name in peers.PEERS)
TASKS = ("memory", "speed")  # of every turn, each a process
PREFILL = 2048  # tokens, or the longest context if that is shorter
SKIP = 30_000  # characters at the start of the text that are left out: contents and front matter


def run(argv: list[str]) -> int:
    """Measures what the arguments say and prints or writes the report."""
    args = parse(argv)
    if args.out and os.path.lexists(args.out) and not args.force:
        raise InputError(f"{args.out} exists already; give --force to write it anew")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise InputError(f"there is no folder {Path(args.out).parent}; make it first")
    pythons = {"kvjax": sys.executable}
    if args.peer:
        pythons[args.peer] = args.peer_python or peers.python(args.peer)
    job, head = job_of(args), head_of(args, argv)
    turns, head["machine"], lines = measure(job, pythons, args.repeats)
    rows = speed_report.rows(turns, head["machine"])
    head["versions"] = {name: t[0]["versions"] for name, t in turns.items()}
    report = [{"kind": "run"} | head, *lines, *({"kind": "row"} | row for row in rows)]
    text = "".join(json.dumps(line) + "\n" for line in report)
    if args.out:
        file.write(Path(args.out), text)
    if args.json:
        sys.stdout.write(text)
    else:
        speed_report.show(head, rows, Console())
    return 0


def parse(argv):
    """The arguments, checked; `recipes` are as written, the exact one first."""
    parser = cli.Parser(
        prog="kvjax bench speed", allow_abbrev=False,
        description="Decode and prefill speed and memory on the CPU, float32, batch 1.",
    )  # fmt: skip
    parser.add_argument("--model", default="smollm2-135m", help="name or path (%(default)s)")
    parser.add_argument(
        "--contexts", default="512,2048,4096", help="tokens before decoding (%(default)s)"
    )
    parser.add_argument(
        "--recipes", default="exact,snapkv@0.25",
        help="recipes, with what they keep, against the exact cache at the longest context "
        "(%(default)s)",
    )  # fmt: skip
    parser.add_argument("--peer", help=f"compare with a library: {', '.join(PEERS)}")
    parser.add_argument(
        "--peer-python", help="a Python that has it (made in the cache folder, some gigabytes)"
    )
    parser.add_argument("--repeats", default="3", help="pairs of turns (%(default)s)")
    parser.add_argument("--json", action="store_true", help="JSON lines for machines")
    parser.add_argument("--out", help="write the JSON lines to this file")
    parser.add_argument("--force", action="store_true", help="write over that file")
    args, rest = parser.parse_known_args(argv)
    for word in rest:
        raise unknown("option", word, [o for a in parser._actions for o in a.option_strings])
    args.contexts = sorted({whole(word, "--contexts") for word in args.contexts.split(",")})
    args.repeats = whole(args.repeats, "--repeats")
    words = [word.strip() for word in args.recipes.split(",")]
    for word in words:
        spelling.parse(word)  # refuses what does not exist
    args.recipes = list(dict.fromkeys(["exact", *words]))
    if args.peer is not None and args.peer not in PEERS:
        raise unknown("peer", args.peer, PEERS)
    if args.peer_python and not args.peer:
        raise InputError("--peer-python needs --peer; name the library to compare with")
    return args


def whole(text, option) -> int:
    """A whole number above 0."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise InputError(f"{option} takes whole numbers above 0, got {text!r}")
    return int(text)


def job_of(args) -> dict:
    """What every turn is told: the model's file, token ids of a real text, and the cores."""
    path = Path(commands.download(args.model)[0])
    path = fetch.find(path)
    if path.is_dir():
        tok = tokenizer.Tokenizer.from_folder(path)
    else:
        tok = tokenizer.Tokenizer.from_gguf(gguf_header.read_header(path)[0])
    longest = args.contexts[-1]
    ids = tok.encode(data.moby_dick()[SKIP : SKIP + 8 * longest + 4096])
    if len(ids) < longest:
        raise InputError(f"the text has {len(ids)} tokens and --contexts asks for {longest}")
    return {
        "model": str(path.absolute()), "ids": list(ids[:longest]), "contexts": args.contexts,
        "prefill": min(PREFILL, longest), "recipes": args.recipes,
        "cores": where.cores(),
    }  # fmt: skip


def head_of(args, argv) -> dict:
    """The resolved configuration and where it ran: the first line of a report."""
    config = {k: v for k, v in vars(args).items() if k not in ("out", "json", "force")}
    head = where.head(shlex.join(["kvjax", "bench", "speed", *argv]), config)
    head["hardware"]["load"] = os.getloadavg()
    return head


def measure(job, pythons, repeats):
    """All turns: ({engine: [speed with maxrss_bytes, ...]}, machine, lines for the report)."""
    order = [(i, task, name) for i in range(repeats) for task in TASKS for name in pythons]
    turns = {name: [{} for _ in range(repeats)] for name in pythons}
    lines = []
    with commands.progress(MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=len(order) + 1)

        def tick(what):
            bar.update(task, description=what)

        machine = turn("kvjax", pythons["kvjax"], job | {"task": "machine"}, tick)
        for pair, what, name in order:
            bar.advance(task)
            own = {"task": what} | ({} if name == "kvjax" else asked(name, job))
            made = turn(name, pythons[name], job | own, tick)
            turns[name][pair] |= made
            lines.append({"kind": "turn", "engine": name, "pair": pair, "task": what} | made)
    return turns, machine, lines


def asked(peer, job) -> dict:
    """The recipes that a peer has, and how it is told them."""
    known = {word: spelling.parse(word) for word in job["recipes"]}
    has = [w for w, recipe in known.items() if recipe.name in peers.PEERS[peer].recipes]
    told = []
    for word in has:
        name, length = f"{peer}:{word}", job["prefill"]
        kept = beside.kept(name, known, length)
        told.append(beside.told(name, known) | {"label": word, "kept": kept})
    return {"recipes": ["exact", *has], "told": told}


def turn(name, python, job, tick) -> dict:
    """Runs one job in a process of its own and gives its result."""
    own = job | {"engine": ENGINES[name]}
    *_, last = peers.lines(name, python, peers.script("transformers"), own, tick)
    return last["result"]
