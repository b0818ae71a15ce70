"""What a run has already, from its own file and from earlier ones, and how far it is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvjax.errors import InputError
from kvjax.eval import file
from kvjax.eval.items import Item
from kvjax.eval.jobs import Job


def shelf(paths: Iterable, versions: dict) -> dict[tuple, dict]:
    """Rows of earlier files by what they are results of: task, item, recipe and code."""
    found = {}
    for path in paths:
        header, lines, _ = file.parse(path)
        if header["versions"] != versions:
            raise InputError(
                f"{path} was made with other versions ({header['versions']}, now {versions}); "
                "leave it out of --reuse"
            )
        for line in lines:
            if line["kind"] == "row":
                found[_what(line)] = line
    return found


def _what(row) -> tuple:
    return row["task"], row["hash"], row["recipe"], row["code"]


@dataclass
class Ledger:
    """The rows of a run."""

    log: file.Log
    shelf: dict[tuple, dict]
    total: float  # work of all rows, in tokens
    tick: Callable[[str, float, float], None]
    rows: dict[tuple, dict] = field(default_factory=dict)
    done: float = 0.0

    def __post_init__(self):
        self.rows = {file.at(line): line for line in self.log.lines if line["kind"] == "row"}

    def get(self, job: Job, task: str, i: int, recipe: str) -> dict | None:
        """The row of item i, from the shelf if need be."""
        at, item = (job.label, task, i, recipe), job.items[task][i]
        if at not in self.rows:
            old = self.shelf.get((task, item.hash, recipe, job.codes[recipe]))
            if old is not None:
                self.add(old | {"model": job.label, "item": i})
        return self.rows.get(at)

    def new(self, job: Job, task: str, i: int, recipe: str, row: dict, times: dict) -> None:
        """Appends a row and its times; both appear or neither."""
        at = {"model": job.label, "task": task, "item": i, "recipe": recipe}
        head = {"hash": job.items[task][i].hash, "code": job.codes[recipe]}
        self.add({"kind": "row"} | at | head | row, {"kind": "time"} | at | times)

    def add(self, *lines: dict) -> None:
        self.log.add(lines)
        self.rows |= {file.at(line): line for line in lines if line["kind"] == "row"}

    def advance(self, what: str, work: float = 0.0) -> None:
        """Says what is being done, and that so much work is done."""
        self.done += work
        self.tick(what, min(self.done, self.total), self.total)


def current(jobs: list[Job]) -> Callable[[dict], bool]:
    """Whether a row of a file still holds: its item and the code behind it are the same."""
    by = {job.label: job for job in jobs}

    def holds(line: dict) -> bool:
        job = by[line["model"]]
        made: list[Item] = job.items.get(line["task"], [])
        fits = line["item"] < len(made) and made[line["item"]].hash == line["hash"]
        return fits and job.codes.get(line["recipe"]) == line["code"]

    return holds
