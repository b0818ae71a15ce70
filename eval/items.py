"""What is asked of a model: items of token ids, the same for every recipe and every peer."""

import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from kvjax.errors import InputError, unknown
from kvjax.eval.grades import METRICS


@dataclass(frozen=True)
class Ask:
    """One question about a context, with its right answer. Ids may be of any integer type."""

    question: tuple[int, ...]  # follows the context (and `before`); at least one token
    answer: tuple[int, ...]  # scored token by token as it is, whatever the metric
    metric: str = "match"  # a name of kvjax.eval.grades.METRICS
    options: tuple[tuple[int, ...], ...] = ()  # metric="option": `answer` is one; first ids differ
    references: tuple[str, ...] = ()  # metrics of text: what the generated text is held against
    max_new_tokens: int = 0  # tokens generated for a metric of text
    before: tuple[int, ...] = ()  # new text, read into the cache first; it stays for later asks
    info: dict[str, Any] = field(default_factory=dict)  # depth and the like: copied to the results

    def __post_init__(self):
        for part in ("question", "answer", "before"):
            object.__setattr__(self, part, _ids(part, getattr(self, part)))
        options = tuple(_ids("option", option) for option in self.options)
        object.__setattr__(self, "options", options)


@dataclass(frozen=True)
class Item:
    """A context, which is compressed once, and what is asked of it.

    Every ask sees the compressed context, the `before` of itself and of the asks in front of it,
    and not their questions. The asks of an item are not independent: intervals resample items.
    """

    context: tuple[int, ...]
    asks: tuple[Ask, ...]
    recent: int = 0  # last tokens of the context that a reader without memory sees; 0: not measured
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "context", _ids("context", self.context))

    @property
    def room(self) -> int:
        """The most tokens that any ask adds to the cache."""
        read, most = 0, 0
        for ask in self.asks:
            read += len(ask.before)
            most = max(most, read + len(ask.question) + max(len(ask.answer), ask.max_new_tokens))
        return most

    @property
    def hash(self) -> str:
        """Twelve hex digits that stand for everything in the item."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _ids(part: str, ids: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(i) for i in ids)
    except TypeError:
        raise InputError(f"the {part} must be token ids, got {str(ids)[:40]!r}") from None


class Task(Protocol):
    """Makes items: the same ones for the same tokenizer, count and seed.

    Item i does not depend on `count`, so that a longer run holds the shorter one.
    """

    def __call__(self, tokenizer: Any, count: int, seed: int) -> Sequence[Item]: ...


def made(name: str, task: Callable, tokenizer: Any, count: int, seed: int) -> list[Item]:
    """The items of a task, checked: InputError names what a task got wrong."""
    try:
        items = list(task(tokenizer, count, seed))
    except InputError:
        raise
    except Exception as error:  # of a user's own function: it becomes part of our sentence
        said = f"{type(error).__name__}: {error}"
        raise InputError(f"task {name} made no items: {said[:200]}") from error
    for i, item in enumerate(items):
        where = f"task {name}, item {i}"
        if not isinstance(item, Item):
            raise InputError(f"{where}: expected kvjax.eval.Item, got {type(item).__name__}")
        if not item.context or not item.asks:
            raise InputError(f"{where}: it needs a context and at least one ask")
        for j, ask in enumerate(item.asks):
            _check(f"{where}, ask {j}", ask)
            if ask.max_new_tokens and tokenizer is None:
                raise InputError(f"{where}, ask {j}: text needs a tokenizer; this model has none")
    if not items:
        raise InputError(f"task {name} made no items; lower its length or give it more text")
    return items[:count]


def _check(where, ask):
    for part in ("question", "answer"):
        if not getattr(ask, part):
            raise InputError(f"{where}: the {part} has no tokens; give at least one")
    if ask.metric not in METRICS:
        raise unknown(f"metric of {where}", ask.metric, METRICS)
    if ask.metric == "option":
        first = [option[0] for option in ask.options if option]
        if len(first) < 2 or len(set(first)) < len(ask.options):
            raise InputError(f"{where}: options need different first tokens, got {first}")
        if ask.answer not in ask.options:
            raise InputError(f"{where}: the answer is none of the options")
    if METRICS[ask.metric] is not None and not (ask.references and ask.max_new_tokens > 0):
        raise InputError(
            f"{where}: {ask.metric} grades generated text: give references and max_new_tokens "
            f"above 0, got {len(ask.references)} and {ask.max_new_tokens}"
        )
    try:
        json.dumps(ask.info, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: info must be plain JSON: {error}") from None
