"""What a run will do, resolved and checked before any work: models, recipes, tasks, counts."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kvjax import compare
from kvjax.api import Model
from kvjax.cache import spelling
from kvjax.cache.recipes import valid
from kvjax.config import CacheRecipe
from kvjax.errors import InputError, unknown
from kvjax.eval import suites
from kvjax.eval.peers import PEERS
from kvjax.eval.tasks import TASKS

KNOWN = [name for name, peer in PEERS.items() if peer.recipes]  # those that answer questions
ITEMS = 40  # of a task that is not part of a suite


@dataclass(frozen=True)
class Plan:
    """A run, resolved."""

    models: dict[str, Any]  # label: a Model, or the name or path to load
    recipes: dict[str, CacheRecipe]  # label: recipe, the exact cache first
    tasks: dict[str, tuple[Callable, int]]  # label: (task, number of items)
    seed: int
    query_aware: bool
    peers: dict[str, list[str]]  # peer: labels of what it runs

    def config(self) -> dict:
        """The configuration as JSON: what two runs must share to be one."""
        return {
            "models": list(self.models),
            "recipes": {label: asdict(recipe) for label, recipe in self.recipes.items()},
            "tasks": {k: described(task) | {"items": n} for k, (task, n) in self.tasks.items()},
            "seed": self.seed,
            "query": "aware" if self.query_aware else "agnostic",
            "peers": self.peers,
        }


def plan(
    models: Any, recipes: Any, tasks: Any, *, keep: Sequence[float] = (), items: int | None = None,
    seed: int = 0, query_aware: bool = False, peers: Sequence[str] = (), suite: str | None = None,
) -> Plan:  # fmt: skip
    """The plan that the arguments of `kvjax.eval.run` describe; InputError for what cannot be."""
    models = _models(models)
    if items is not None and (not isinstance(items, int) or items < 1):
        raise InputError(f"items must be a whole number above 0, got {items!r}")
    if not isinstance(seed, int):
        raise InputError(f"seed must be a whole number, got {seed!r}")
    if tasks is None:
        tasks = suites.of(suite, models)
    elif suite is not None:
        raise InputError("tasks and a suite were given; a suite is a list of tasks: leave out one")
    if query_aware and peers:
        raise InputError(
            f"{peers[0]} compresses without the question here, and query_aware was asked for; "
            "leave out one of them"
        )
    chosen, own = _recipes(recipes, keep)
    resolved = {}
    for label, task, count in _tasks(tasks):
        if label in resolved:
            raise InputError(f"two tasks are called {label!r}; give them as {{name: task}}")
        resolved[label] = (task, items or count or ITEMS)
    if not resolved:
        raise InputError("there is no task to run; give at least one")
    return Plan(models, chosen, resolved, seed, query_aware, _peers(peers, chosen, own))


def _models(models) -> dict[str, Any]:
    if isinstance(models, Mapping):
        made = dict(models)
    else:
        given = [models] if isinstance(models, (str, Path, Model)) else list(models)
        made = {("model" if isinstance(m, Model) else str(m)): m for m in given}
        if len(made) < len(given):
            raise InputError("two models have one name; give them as {name: model}")
    if not made:
        raise InputError("there is no model to run; give at least one")
    return made


def _recipes(recipes, keep) -> tuple[dict[str, CacheRecipe], list[str]]:
    """(recipes by label, the exact one first; words that belong to a peer, as "kvpress:kvzip")."""
    made, own = {"exact": spelling.parse("exact")}, []
    given = default_recipes() if recipes is None else recipes
    given = [given] if isinstance(given, (str, CacheRecipe)) else given
    pairs = given.items() if isinstance(given, Mapping) else ((None, entry) for entry in given)
    for label, entry in pairs:
        if label == "exact":
            raise InputError("the exact cache is always there: give your recipe another name")
        if isinstance(entry, str) and ":" in entry:
            own += [entry] if "@" in entry or not keep else [f"{entry}@{k!r}" for k in keep]
            continue
        if not isinstance(entry, (str, CacheRecipe)):
            raise InputError(f"a recipe is a word or kvjax.recipe(...), got {entry!r:.60}")
        one = spelling.parse(entry) if isinstance(entry, str) else valid(entry)
        budgets = keep if label is None and one.choice is not None and not _has_keep(entry) else ()
        for version in [valid(replace(one, keep=k)) for k in budgets] or [one]:
            word = spelling.spelled(version)
            made[label or word] = spelling.parse(word)  # options at their defaults are left out
    return made, own


def _has_keep(entry) -> bool:
    return not isinstance(entry, str) or "@" in entry or "keep=" in entry or "slots=" in entry


def default_recipes() -> list[str]:
    """The six recipes of `kvjax compare`."""
    return [
        name + "".join(f"+{codec}" for codec in options.values()) for name, options in compare.SIX
    ]


def _tasks(tasks):
    """(label, task, items or None) of words, callables, pairs with a count, or a mapping."""
    given = [tasks] if isinstance(tasks, str) or callable(tasks) else tasks
    if isinstance(given, Mapping):
        given = [(v, None, k) for k, v in given.items()]
    for entry in given:
        entry, count, label = (
            (*entry, None)[:3] if isinstance(entry, tuple) else (entry, None, None)
        )
        if isinstance(entry, str):
            name, task, own = task_of(entry)
            count = count or own
        elif callable(entry):
            name = getattr(entry, "__name__", None) or type(entry).__name__
            task = entry
        else:
            raise InputError(f"a task is a name or a function, got {type(entry).__name__}")
        yield label or name, task, count


def task_of(word: str) -> tuple[str, Callable, int | None]:
    """(label, task, items) of "niah_single@1024,depth=0.5,items=60", or of "my_tasks.py:name"."""
    head, comma, count = word.strip().rpartition(",items=")
    if comma and count.isdecimal() and int(count):  # how many is no part of what is asked
        return *task_of(head)[:2], int(count)
    if ".py:" in word:
        return word, _function(word), None
    name, options = spelling.split(word, "length")
    if name not in TASKS:
        raise unknown("task", name, [*TASKS, "FILE.py:FUNCTION"])
    task = TASKS[name]
    known = list(vars(task))
    for option in options:
        if option not in known:
            raise unknown(f"option of {name}", option, known)
    hints = get_type_hints(type(task))
    options = {k: _typed(f"{name}: {k}", v, hints[k]) for k, v in options.items()}
    return word.strip(), type(task)(**(vars(task) | options)), None


def _typed(what: str, value: Any, hint: Any) -> Any:
    """An option of the type that the task's field has; a path may look like a number."""
    kinds = get_args(hint) or (hint,)
    if type(value) in kinds or (value is None and type(None) in kinds):
        return value
    if float in kinds and type(value) is int:
        return float(value)
    if str in kinds and not isinstance(value, tuple):
        return str(value)
    names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
    raise InputError(f"{what} must be of type {names}, got {value!r}")


def _function(word: str) -> Callable:
    path, _, name = word.rpartition(":")
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}; a task of your own is FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"kvjax_task_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look for it there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} does not run: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        raise unknown(
            f"function in {path}", name, [n for n, v in vars(module).items() if callable(v)]
        )
    return getattr(module, name)


def described(task) -> dict:
    """A task's kind and options, as JSON."""
    if is_dataclass(task) and not isinstance(task, type):
        return {"kind": type(task).__name__} | asdict(task)
    try:
        source = Path(inspect.getsourcefile(task) or "").name
    except TypeError:  # a callable object
        source = ""
    name = getattr(task, "__name__", type(task).__name__)
    return {"kind": "function", "name": name, "file": source}


def _peers(peers, recipes, own) -> dict[str, list[str]]:
    """What each peer runs: the recipes that it has a method for, and those written for it."""
    made = {}
    for word in own:
        peer = word.partition(":")[0]
        if peer not in KNOWN:
            raise unknown("peer", peer, KNOWN)
        if peer not in peers:
            raise InputError(f"{word} runs in {peer}; give --peer {peer} too")
    for peer in peers:
        if peer not in KNOWN:
            raise unknown("peer", peer, KNOWN)
        made[peer] = [f"{peer}:exact"]
        made[peer] += [f"{peer}:{label}" for label, r in recipes.items() if _runs(peer, r)]
        made[peer] += [word for word in own if word.startswith(f"{peer}:")]
    return made


def _runs(peer, recipe) -> bool:
    """Whether a peer has the method of a recipe, with no codec on top of it."""
    codecs = [(store.k.name, store.v.name) for store in
              (recipe.store, spelling.parse(recipe.name).store) if store]  # fmt: skip
    return recipe.name in PEERS[peer].recipes and len(set(codecs)) == 1
