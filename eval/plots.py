"""Quality against bytes, as a figure."""

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.errors import InputError, unknown
from kvjax.eval.tables import named

if TYPE_CHECKING:
    from kvjax.eval.results import Results

WIDTH, HEIGHT, ACROSS = 3.4, 2.9, 4  # inches of a panel; panels in a row


def plot(results: "Results", path: Any = None, model: str | None = None):
    """Panels of paired change against held bytes, one for each task; the figure.

    Budgets of a method are joined by a line, methods of a peer are hollow and dashed, bars are 95%
    intervals, and the grey line is the exact cache.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("plots need matplotlib: pip install 'kvjax[eval]'") from None
    models = list(dict.fromkeys(s.model for s in results.summary))
    if not models:
        raise InputError("there are no rows to plot")
    model = models[0] if model is None else model
    if model not in models:
        raise unknown("model", str(model), models)
    dropped = set(results.dropped)
    every = [s for s in results.summary if s.model == model]
    mine = [s for s in every if (model, s.task) not in dropped]
    chance = "" if mine else "; the exact cache is near chance on every task"
    mine = mine or every
    tasks = list(dict.fromkeys(s.task for s in mine))
    columns = min(ACROSS, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * lines + 0.8), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    looks = _looks(mine)
    for axes, task in itertools.zip_longest(grid.flat, tasks):
        if task is None:
            axes.set_axis_off()
        else:
            _panel(axes, [s for s in mine if s.task == task], looks, results.base)
    handles = {h.get_label(): h for axes in grid.flat for h in axes.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center",
                  ncols=max(2, min(6, 2 * columns)), fontsize=8)  # fmt: skip
    query = results.header["config"]["query"]
    figure.suptitle(
        f"{model}: change against {named(results.base)} (query-{query}){chance}", fontsize=11
    )
    if path is not None:
        _write(figure, Path(path))
    return figure


def _method(recipe: str) -> str:
    """A recipe without its budget: "snapkv+int8@0.5,window=64" is "snapkv+int8,window=64"."""
    head, comma, rest = recipe.partition(",")
    return head.partition("@")[0] + comma + rest


def _looks(summaries) -> dict[str, dict]:
    """Colour, marker and line of each method; a peer's method has the colour of ours."""
    methods = list(dict.fromkeys(_method(s.recipe) for s in summaries if not _exact(s)))
    own = list(dict.fromkeys(_base(m) for m in methods))
    out = {}
    for method in methods:
        i, peer = own.index(_base(method)), ":" in method
        out[method] = {
            "color": f"C{i % 10}", "marker": "osD^vP*X<>"[i % 10], "markersize": 5,
            "linestyle": "--" if peer else "-", "linewidth": 1.1,
            "markerfacecolor": "white" if peer else None,
        }  # fmt: skip
    return out


def _base(method) -> str:
    return method.rpartition(":")[2].partition(",")[0]


def _exact(s) -> bool:
    return s.recipe.rpartition(":")[2] == "exact"


def _panel(axes, summaries, looks, base) -> None:
    kind = summaries[0].kind
    axes.axhline(0.0, color="0.7", linewidth=1)
    groups: dict[str, list] = {}
    for s in summaries:
        if not _exact(s) and s.recipe != base:
            groups.setdefault(_method(s.recipe), []).append(s)
    for method, points in groups.items():
        points.sort(key=lambda s: s.share)
        y = [100 * s.change.mean for s in points]
        bars = [
            [100 * (s.change.mean - s.change.low) for s in points],
            [100 * (s.change.high - s.change.mean) for s in points],
        ]
        axes.errorbar([s.share for s in points], y, yerr=bars, label=method, capsize=2,
                      elinewidth=0.7, **looks[method])  # fmt: skip
    axes.set_xscale("log")
    exact = next((s for s in summaries if s.recipe == "exact"), None)
    form = ".0%" if kind == "accuracy" else ".2f"
    at = "" if exact is None else f", exact {exact.value.mean:{form}}"
    axes.set_title(summaries[0].task.partition(",")[0] + at, fontsize=9)
    axes.set_xlabel("bytes held, of the exact cache", fontsize=8)
    axes.set_ylabel("points of accuracy" if kind == "accuracy" else "% of loss", fontsize=8)
    ticks = [t for t in (0.1, 0.2, 0.3, 0.5, 0.75, 1.0) if math.isfinite(t)]
    axes.set_xticks(ticks, [f"{t:.0%}" for t in ticks])
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    if kind == "loss":
        axes.invert_yaxis()  # up is better everywhere


def _write(figure, path: Path) -> None:
    kinds = figure.canvas.get_supported_filetypes()
    kind = path.suffix.lstrip(".").lower()
    if kind not in kinds:
        raise unknown("kind of picture", path.suffix or path.name, [f".{k}" for k in kinds])
    part = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(part, format=kind, dpi=150)
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
