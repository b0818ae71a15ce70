"""Other libraries, in Pythons of their own; a child process says what it finds in lines of JSON.

A child is a script of this folder, `python SCRIPT job.json`. It says {"doing": ...} as it goes on,
what it finds, and {"result": ...} or {"error": ...} at last. Whatever else is printed is skipped.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvjax.errors import InputError
from kvjax.models import fetch

_SPEED = ("torch==2.13.0", "transformers==5.2.0", "gguf", "accelerate")
_QUALITY = ("kvpress==0.5.5", *_SPEED, "optimum-quanto", "hqq")


@dataclass(frozen=True)
class Peer:
    """A library to compare with."""

    script: str  # what its child runs, in this folder
    packages: tuple[str, ...]
    folder: str  # of its environment, in the cache folder; peers with the same packages share one
    recipes: tuple[str, ...] = ()  # recipes of kvjax that it has a method for


PEERS = {
    "transformers": Peer("turn.py", _SPEED, "peer-transformers"),
    "kvpress": Peer(
        "kvpress_quality.py", _QUALITY, "peer-quality",
        ("streaming_llm", "key_norm", "snapkv", "ada_snapkv", "pyramidkv", "tova", "keydiff",
         "expected_attention", "ada_expected", "chunkkv", "kvzip"),
    ),
    "hf-quant": Peer("hf_quality.py", _QUALITY, "peer-quality", ("int8",)),
}  # fmt: skip


def script(peer: str) -> Path:
    """The file that the peer's child runs."""
    return Path(__file__).parent / PEERS[peer].script


def python(peer: str) -> str:
    """The Python of the peer's environment in the cache folder, made on first use."""
    packages = PEERS[peer].packages
    folder = fetch.cache_folder() / PEERS[peer].folder
    found, ready = folder / "bin" / "python", folder / "ready"
    if ready.exists() and ready.read_text("utf-8") == "\n".join(packages):
        return str(found)
    console = Console(stderr=True)
    console.print(f"making {folder} with {', '.join(packages)}; once, some minutes")
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(found), "-m", "pip", "install", "-q", "--no-input", *packages],
    )
    for command in steps:
        with console.status(command[2]):
            made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            said = (made.stderr or made.stdout).strip().splitlines()
            raise InputError(
                f"could not make {folder} ({said[-1][:200] if said else made.returncode}); "
                f"give --peer-python, a Python with {', '.join(packages)}"
            )
    ready.write_text("\n".join(packages), "utf-8")
    return str(found)


def rows(
    peer: str, python: str, job: dict, items: Iterable[dict], tick: Callable[[str], None]
) -> Iterator[dict]:
    """What the peer finds for `items`, as it finds it; InputError if it does not come to its end.

    job: {"model": file, "cores": [...], "recipes": [...]}; job and items as peers/quality.py reads
    them. First comes {"versions": {...}}, then a {"note": ...} for each thing that a recipe asks
    for and the peer cannot do, then the rows. Closing the iterator ends the child.
    """
    count = 0
    with contextlib.closing(lines(peer, python, script(peer), job, tick, items)) as said:
        for line in said:
            if "result" not in line:
                count += "id" in line
                yield line
            elif line["result"]["rows"] != count:
                found = line["result"]["rows"]
                raise InputError(f"{peer} in {python} made {found} rows and {count} could be read")


def lines(
    name: str, python: str, script: Path, job: dict, tick: Callable[[str], None],
    items: Iterable[dict] | None = None,
) -> Generator[dict, None, None]:  # fmt: skip
    """The lines of a child, {"result": ...} last; what it is doing goes to `tick`.

    A child that ends without a result is an InputError with what it said last. Items reach the
    child as the lines of the file job["items"].
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvjax-peer-")))
        log = stack.enter_context(open(folder / "log", "w+", encoding="utf-8"))
        if items is not None:
            job = job | {"items": str(folder / "items.jsonl")}
            text = "".join(json.dumps(item) + "\n" for item in items)
            Path(job["items"]).write_text(text, "utf-8")
        file = folder / "job.json"
        file.write_text(json.dumps(job), "utf-8")
        try:
            process = subprocess.Popen(
                [python, str(script), str(file)], env=os.environ | {"JAX_PLATFORMS": "cpu"},
                text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        except OSError as error:
            raise InputError(f"cannot run {python}: {error.strerror}") from None
        stack.enter_context(process)
        stack.callback(process.kill)  # before `process` is waited for
        last = {}
        for last in _follow(process.stdout, lambda what: tick(f"{name}: {what}")):
            if "error" not in last:
                yield last
        process.wait()
        if "result" not in last:
            log.seek(0)
            said = log.read().strip().splitlines()
            reason = last.get("error") or (said[-1] if said else f"exit code {process.returncode}")
            raise InputError(f"{name} in {python} gave no result: {reason[:300]}")


def _follow(stream, tick) -> Iterator[dict]:
    """The objects in a stream of lines, without what goes to `tick`.

    A line that is cut short is skipped: the child died, or a library wrote in its midst, and then
    a row is missing.
    """
    for line in stream:
        if not line.startswith("{"):  # a library has something to say
            continue
        try:
            said = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "doing" in said:
            tick(said["doing"])
        else:
            yield said
