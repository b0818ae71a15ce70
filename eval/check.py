"""Runs a result file again and compares the scores, ask by ask."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console

from kvjax.errors import InputError
from kvjax.eval import file, plans, progress
from kvjax.eval.run import execute

TOLERANCE = 1e-3  # nats an answer token: other machines sum in another order
SIZES = ("held", "live", "entries")


@dataclass(frozen=True)
class Found:
    """How a second run differs."""

    path: str
    rows: int  # compared
    same: int  # equal to the last digit
    worst: float  # largest difference of a score, in nats a token
    different: list[str]  # rows that differ by more than TOLERANCE, or have other items
    changed: list[str]  # versions and hardware that are not what they were


def check(
    path: str | os.PathLike[str], *, items: int | None = None, peer_python: str | None = None,
    unofficial: bool = False, tick: Callable[[str, float, float], None] = progress.silent,
) -> Found:  # fmt: skip
    """Reruns the configuration of a result file, or the first `items` items of its tasks."""
    header, lines, _ = file.parse(path)
    config = header["config"]
    tasks = [(word, min(options["items"], items or options["items"]))
             for word, options in config["tasks"].items()]  # fmt: skip
    for word, options in config["tasks"].items():
        if options["kind"] == "function" and ".py:" not in word:
            raise InputError(
                f"task {word} of {path} is a function of a program: run the program again and "
                "compare with kvjax.eval.check.compare"
            )
    own = [w for words in config["peers"].values() for w in words]
    recipes = [r for r in config["recipes"] if r != "exact"]
    recipes += [w for w in own if w.partition(":")[2] not in config["recipes"]]
    todo = plans.plan(
        config["models"], recipes, tasks, seed=config["seed"],
        query_aware=config["query"] == "aware", peers=list(config["peers"]),
    )  # fmt: skip
    new = execute(todo, peer_python=peer_python, unofficial=unofficial, tick=tick)
    return compare(str(path), header, lines, new)


def compare(path: str, header: dict, lines: list[dict], new) -> Found:
    """The rows of `new` beside those of a file that was read."""
    old = {file.at(line): line for line in lines if line["kind"] == "row"}
    worst, same, different = 0.0, 0, []
    compared = [(old[file.at(row)], row) for row in new.rows if file.at(row) in old]
    if not compared:
        raise InputError(f"{path} holds no row that the new run has; is the file empty?")
    for was, now in compared:
        where = f"{now['task']} item {now['item']}, {now['recipe']}"
        if was["hash"] != now["hash"]:
            different.append(f"{where}: another item")
            continue
        if any(was[k] != now[k] for k in SIZES) or len(was["asks"]) != len(now["asks"]):
            different.append(f"{where}: other bytes")
            continue
        gaps = [_gap(a, b) for a, b in zip(was["asks"], now["asks"], strict=True)]
        worst = max(worst, *gaps)
        same += was["asks"] == now["asks"]
        if max(gaps) > TOLERANCE:
            different.append(f"{where}: {max(gaps):.2g} nats a token")
    changed = [
        f"{name}: {header[part].get(name)} then, {value} now"
        for part in ("versions", "hardware")
        for name, value in new.header[part].items()
        if header[part].get(name) != value
    ]
    return Found(path, len(compared), same, worst, different, changed)


def _gap(was, now) -> float:
    """The largest difference of two asks: of log-probabilities in nats a token; 1 for a grade."""
    if was.keys() != now.keys():
        return float("inf")
    gaps = [abs(was[k] - now[k]) / now["n"] for k in ("lp", "lp_key", "lp_recent") if k in now]
    gaps += [abs(was[k] - now[k]) for k in ("right", "kl") if k in now]
    options = now.get("options", {})
    if was.get("options", {}).keys() != options.keys():
        return float("inf")
    return max(*gaps, *(abs(was["options"][k] - options[k]) for k in options), 0.0)


def say(found: Found, as_json: bool) -> int:
    """Prints the comparison; exit code 1 if something differs."""
    if as_json:
        print(json.dumps(vars(found)))
    else:
        console = Console()
        console.print(
            f"{found.rows} rows of {found.path} again: {found.same} equal to the last digit, "
            f"largest difference {found.worst:.2g} nats a token (tolerance {TOLERANCE:g}).",
            highlight=False,
        )
        for line in [*found.different[:10], *found.changed]:
            console.print(line, highlight=False)
        if len(found.different) > 10:
            console.print(f"and {len(found.different) - 10} more")
    return 1 if found.different else 0
