"""Rows of a run, and what they amount to: paired differences with intervals, tables, plots."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from kvjax.errors import InputError, unknown
from kvjax.eval import stats
from kvjax.eval.summary import (
    CALIBRATED,
    Summary,
    alike,
    average,
    key_loss,
    logprobs,
    over_items,
)
from kvjax.eval.timing import COMPILED_S


class Results:
    """What `kvjax.eval.run` gives; `Results.read` opens files of earlier runs."""

    def __init__(self, header: dict, lines: Iterable[dict], base: str = "exact"):
        self.header, self.lines, self.base = header, list(lines), base

    def against(self, recipe: str) -> "Results":
        """The same results with differences taken from `recipe` in place of the exact cache."""
        known = {key[2] for key in self._by}
        if recipe not in known:
            raise unknown("recipe in these results", recipe, known)
        return Results(self.header, self.lines, recipe)

    @classmethod
    def read(cls, *paths: Any) -> "Results":
        """The results of one or several files together."""
        from kvjax.eval import file

        if not paths:
            raise InputError("there is no file to read; give at least one")
        read = [file.parse(path) for path in paths]
        _match(paths, read)
        return cls(read[0][0], [line for _, lines, _ in read for line in lines])

    @property
    def rows(self) -> list[dict]:
        """One for each item and recipe."""
        return [line for line in self.lines if line["kind"] == "row"]

    @cached_property
    def _by(self) -> dict[tuple, dict[int, dict]]:
        """Rows by (model, task, recipe), then by item."""
        found = defaultdict(dict)
        for row in self.rows:
            found[row["model"], row["task"], row["recipe"]][row["item"]] = row
        return dict(found)

    def to_pandas(self):
        """A frame with a row for each ask."""
        import pandas

        out = []
        for (model, task, recipe), rows in self._by.items():
            right = dict(self._right(model, task, recipe))
            for item, row in rows.items():
                info = self._by[model, task, "exact"][item]["asks"]
                for i, ask in enumerate(row["asks"]):
                    line = {"model": model, "task": task, "recipe": recipe, "item": item, "ask": i}
                    line |= {k: ask.get(k) for k in ("lp", "n", "kl", "top1", "lp_key")}
                    line |= {"right": right.get((item, i)), "held": row["held"]}
                    line |= {"live": row["live"], "entries": row["entries"]}
                    out.append(line | info[i].get("info", {}))
        return pandas.DataFrame(out)

    def near_chance(self, model: str, task: str) -> bool:
        """Whether the exact cache cannot be told from guessing, or from the recent text alone."""
        rows = self._by[model, task, "exact"]
        asks = [(i, ask) for i, row in rows.items() for ask in row["asks"]]
        gains = [((i, 0), ask["lp"] - ask["lp_recent"]) for i, ask in asks if "lp_recent" in ask]
        if gains:  # all asks, also those that are not counted: to count them is to choose
            return stats.near_chance(over_items(gains), 0.0)
        if self._kind(model, task) == "loss":
            return False
        right = self._right(model, task, "exact")
        return not right or stats.near_chance(over_items(right), self._chance(model, task))

    def _kind(self, model, task) -> str:
        rows = self._by[model, task, "exact"].values()
        graded = any("right" in ask or "options" in ask for row in rows for ask in row["asks"])
        return "accuracy" if graded else "loss"

    def _chance(self, model, task) -> float:
        rows = self._by[model, task, "exact"]
        asks = [a for row in rows.values() for a in row["asks"]]
        if self._kind(model, task) == "loss":
            known = [a for a in asks if "lp_recent" in a]
            return -sum(a["lp_recent"] for a in known) / max(sum(a["n"] for a in known), 1)
        counted = [rows[i]["asks"][j] for (i, j), _ in self._right(model, task, "exact")]
        chances = [1 / len(a["options"]) if "options" in a else 0.0 for a in counted]
        return statistics.fmean(chances) if chances else 0.0

    def _right(self, model, task, recipe) -> list[tuple[tuple[int, int], float]]:
        """((item, ask), right or not) of the asks that count.

        Where an ask has `needs`, it counts if the exact cache needed the far prefix for it. Where
        all asks have the same options, these are calibrated: of each one's log-probability its mean
        over all asks of this recipe is taken (batch calibration, Zhou et al. 2024,
        arXiv:2309.17249), which uses no labels.
        """
        rows, exact = self._by[model, task, recipe], self._by[model, task, "exact"]
        heard = defaultdict(list)
        for row in rows.values():
            for ask in row["asks"]:
                for option, lp in ask.get("options", {}).items():
                    heard[option].append(lp)
        counts = {len(lps) for lps in heard.values()}
        same = len(counts) == 1 and min(counts) >= CALIBRATED and alike(rows)
        prior = {option: statistics.fmean(lps) if same else 0.0 for option, lps in heard.items()}
        out = []
        for item in sorted(rows.keys() & exact.keys()):
            for i, ask in enumerate(rows[item]["asks"]):
                if not exact[item]["asks"][i].get("needs", True):
                    continue
                if "options" in ask:
                    best = max(ask["options"], key=lambda o: ask["options"][o] - prior[o])
                    out.append(((item, i), float(best == ask["answer"])))
                elif "right" in ask:
                    out.append(((item, i), float(ask["right"])))
        return out

    @cached_property
    def summary(self) -> list[Summary]:
        """A summary for each model, task and recipe, in the order of the run."""
        both = ("exact", self.base)
        return [
            self._summary(*key) for key in self._by if all((*key[:2], r) in self._by for r in both)
        ]

    @cached_property
    def dropped(self) -> list[tuple[str, str]]:
        """(model, task) of the tasks on which even the exact cache is near chance."""
        pairs = {key[:2]: None for key in self._by if (*key[:2], "exact") in self._by}
        return [pair for pair in pairs if self.near_chance(*pair)]

    def _summary(self, model, task, recipe) -> Summary:
        rows, base, exact = (self._by[model, task, r] for r in (recipe, self.base, "exact"))
        kind, shared = self._kind(model, task), sorted(rows.keys() & base.keys() & exact.keys())
        if not shared:
            raise InputError(f"{recipe} and {self.base} have no item of {task} in common")
        lps, others, counts = logprobs(rows, base, exact, shared, kind)
        if kind == "accuracy":
            mine = dict(self._right(model, task, recipe))
            theirs = dict(self._right(model, task, self.base))
            value = over_items(mine.items())
            change = over_items((k, mine[k] - theirs[k]) for k in mine.keys() & theirs.keys())
        else:
            value = stats.mean([-x for x in lps], counts)
            change = stats.ratio([-x for x in lps], [-x for x in others])
        asks = [ask for item in shared for ask in rows[item]["asks"]]
        held = statistics.fmean(rows[i]["held"] for i in shared)
        number = value.asks if kind == "accuracy" else len(asks)  # a text is one, not its tokens
        return Summary(
            model, task, recipe, kind, len(shared), number,
            value, change, stats.mean(lps, counts),
            stats.mean([a - b for a, b in zip(lps, others, strict=True)], counts),
            key_loss(rows, exact, shared), average(asks, "kl"), average(asks, "top1"),
            held, statistics.fmean(rows[i]["live"] for i in shared),
            held / max(statistics.fmean(exact[i]["held"] for i in shared), 1),
            statistics.fmean(rows[i]["entries"] for i in shared), self._chance(model, task),
            "" if recipe == self.base else stats.claim(kind, change, number),
            self._time(model, task, recipe, "compress"), self._time(model, task, recipe, "decode"),
        )  # fmt: skip

    @cached_property
    def _times(self):
        found = defaultdict(list)
        for line in self.lines:
            if line["kind"] == "time":
                found[line["model"], line["task"], line["recipe"]].append(line)
        return found

    def _time(self, model, task, recipe, what):
        """Median and quartiles over items, of runs that compiled nothing."""
        spans = [line[what] for line in self._times[model, task, recipe] if what in line]
        warm = [
            x["ms"] if "ms" in x else x["s"] for x in spans if x.get("compile_s", 0.0) < COMPILED_S
        ]
        if not warm:
            return None
        low, middle, high = np.quantile(warm, (0.25, 0.5, 0.75))
        return float(middle), float(low), float(high)

    def table(self, what: str = "change"):
        """A rich table: what="change", "value", "logprob", or "details" with all intervals."""
        from kvjax.eval import tables

        return tables.table(self, what)

    def plot(self, path: Any = None, model: str | None = None):
        """A figure of quality against bytes, a panel for each task; written to `path` if given."""
        from kvjax.eval import plots

        return plots.plot(self, path, model)


def _match(paths, read) -> None:
    """Refuses files that cannot be shown together: of other items, or compressed otherwise."""
    queries = {header["config"]["query"] for header, _, _ in read}
    if len(queries) > 1:
        raise InputError("query-aware and query-agnostic results are not shown together")
    seen = {}
    for path, (_, lines, _) in zip(paths, read, strict=True):
        for line in lines:
            if line["kind"] != "row":
                continue
            at = line["model"], line["task"], line["item"]
            first = seen.setdefault(at, (line["hash"], path))
            if first[0] != line["hash"]:
                raise InputError(
                    f"{first[1]} and {path} have different items {line['item']} of {line['task']} "
                    "(another seed or text?): they are not shown together"
                )
