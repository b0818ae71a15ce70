"""A model with its items and what results on them depend on, checked before anything runs."""

import json
from dataclasses import dataclass

import kvjax
from kvjax import scorers, tables
from kvjax.api import Model
from kvjax.cache import init, spelling
from kvjax.cache.recipes import resolve
from kvjax.checkpoint import identity
from kvjax.errors import InputError
from kvjax.eval import beside, items, keys, one
from kvjax.eval.plans import Plan
from kvjax.models import fetch

OVERHEAD = 200.0  # tokens of a context that cost as much as everything else of a row


@dataclass(frozen=True)
class Job:
    """What a plan asks of one model."""

    label: str
    model: Model
    path: str | None  # the file or folder of its weights, for peers
    items: dict[str, list[items.Item]]  # by task
    codes: dict[str, str]  # by recipe: hash of the weights and of the code behind its rows

    @property
    def longest(self) -> str:
        """The task with the longest context."""
        return max(self.items, key=lambda task: len(self.items[task][0].context))

    def work(self, todo: Plan) -> float:
        """The work of all rows, in tokens."""
        rows = len(todo.recipes) + sum(map(len, todo.peers.values()))
        return rows * sum(cost(item) for made in self.items.values() for item in made)


def cost(item: items.Item) -> float:
    """The work of a row, in tokens."""
    return OVERHEAD + len(item.context)


def job(todo: Plan, label: str, given, unofficial: bool) -> Job:
    """Loads a model and makes its items."""
    path = None
    if not isinstance(given, Model):
        path = str(fetch.find(given, unofficial=unofficial).absolute())
        given = kvjax.load(given, unofficial=unofficial)
    elif todo.peers:
        raise InputError("peers read weights from a file; give the model by its name or path")
    this = [json.dumps(identity(given), sort_keys=True), *(["aware"] if todo.query_aware else [])]
    for recipe in todo.recipes.values():
        asks = todo.query_aware and scorers.reads(recipe.choice) == "question"
        if said := None if asks else tables.missing(recipe, given.tables):
            raise InputError(said)
    codes = {name: keys.digest([*this, keys.code_of(r), keys.content(given.tables.get(r.name))])
             for name, r in todo.recipes.items()}  # fmt: skip
    codes["exact"] = keys.digest([this[0], keys.code_of(todo.recipes["exact"])])
    for peer, words in todo.peers.items():
        for word in words:
            codes[word] = keys.digest([this[0], beside.code(peer, word, todo.recipes)])
    made = {}
    for name, (task, count) in todo.tasks.items():
        made[name] = items.made(name, task, given.tokenizer, count, todo.seed)
        for i, item in enumerate(made[name]):
            _fits(given.config, label, f"task {name}, item {i}", item, todo.query_aware)
        for length, room in {(len(item.context), one.room(item)) for item in made[name]}:
            _works(given.config, todo.recipes, name, length, room)
    return Job(label, given, path, made, codes)


def _works(config, recipes, task, length, room) -> None:
    """Refuses a recipe that cannot take contexts of a length."""
    for label, recipe in recipes.items():
        try:
            made = resolve(spelling.budgeted(recipe, length), room)
            init.check(config, made, room)
        except InputError as error:
            said = f"{label} cannot take the {length} tokens of task {task}: {error}"
            raise InputError(said) from None


def _fits(config, label, where, item, query_aware) -> None:
    length = one.longest(item)
    if length > config.context:
        raise InputError(
            f"{where} takes {length} tokens and the context of {label} is {config.context}; "
            "lower the task's length"
        )
    asks = [i for a in item.asks for i in (*a.question, *a.answer, *a.before, *sum(a.options, ()))]
    for i in (*item.context, *asks):
        if not 0 <= i < config.vocab:
            raise InputError(
                f"{where} has the token id {i}; ids of {label} go to {config.vocab - 1}"
            )
    if query_aware and any(ask.before for ask in item.asks):
        raise InputError(
            f"{where} goes on after its questions: its cache cannot be compressed for one of them; "
            "leave the task out, or run query-agnostic"
        )
