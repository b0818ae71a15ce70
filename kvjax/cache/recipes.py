"""Recipes: named caches with options. A scorer or codec in its table is a recipe of its name."""

import dataclasses
import inspect
from dataclasses import replace
from typing import Any

import numpy as np

from kvjax import budgets, codecs, reducers, scorers
from kvjax.cache import state
from kvjax.cache.named import NAMED, REST, Entry
from kvjax.cache.positions import POLICIES
from kvjax.config import CacheRecipe, Choice, Spec, Store
from kvjax.errors import InputError, unknown


def _entry(recipe: CacheRecipe, method) -> Entry:
    """A recipe described by the docstring of its method: first sentence, and the line "Source:"."""
    doc = inspect.getdoc(method) or ""
    source = doc.partition("Source: ")[2].partition("\n")[0].rstrip(".")
    return Entry(recipe, doc.partition("\n")[0].rstrip("."), source)


def _coded(name: str) -> Entry:
    """The recipe of a codec: every token, coded as it leaves a recent window."""
    codec = Spec(name)
    return _entry(CacheRecipe(name, window=32, store=Store(codec, codec)), codecs.CODECS[name])


def _scored(name: str) -> Entry:
    """The recipe of a scorer: half of the tokens, chosen once, and a recent window."""
    recipe = CacheRecipe(name, "after", 0.5, 32, store=Store(), choice=Choice(Spec(name)))
    return _entry(recipe, scorers.SCORERS[name])


USED = {entry.recipe.choice.scorer.name for entry in NAMED.values() if entry.recipe.choice}

RECIPES = (
    NAMED
    | {name: _scored(name) for name in scorers.SCORERS if name not in USED}
    | {name: _coded(name) for name in codecs.CODECS if name != "raw" and name not in NAMED}
)
"""Every recipe by name: those above, and one for each scorer and codec that they do not use."""


def recipes() -> list[str]:
    """Names of all recipes."""
    return list(RECIPES)


def recipe(name: str, /, **options: Any) -> CacheRecipe:
    """The recipe `name` with options, frozen and hashable.

    keep (fraction of token entries kept) or slots (their number), window, sinks, when, stride,
    lookahead, chunk, page, positions, count; codec ("int8", or a pair for keys and values), scorer
    and budget by their names in their tables (any combine); and the options of these three, those
    of a codec for both sides or as a pair (bits=4, bits=(4, 2)); fold
    ("random_features", "less": what eviction drops goes into a state, when="during"); reducer
    ("mean": one entry of each head stands for what condense drops there; "flow": its values go
    into those of what is kept). An unknown name or option raises InputError and offers the
    nearest.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise unknown("recipe", str(name), RECIPES)
    made = RECIPES[name].recipe
    options = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
    if "codec" in options:
        made = _with_codec(made, options.pop("codec"))
    for part, build in (("scorer", scorers.build), ("budget", budgets.build)):
        if part in options and made.choice is not None:  # before the options that belong to it
            made = _with_method(made, part, build, options.pop(part))
    for option, value in options.items():
        made = _with(made, option, value)
    return valid(made)


def a_recipe(value: Any) -> CacheRecipe:
    """value if it is a recipe; None is the exact cache."""
    if value is None:
        return CacheRecipe()
    if not isinstance(value, CacheRecipe):
        raise InputError(f"give a recipe as kvjax.recipe({value!r}), not {value!r}")
    return value


def options_of(made: CacheRecipe) -> dict[str, object]:
    """Every option that a recipe takes, with its present value."""
    out = {k: getattr(made, k) for k in ("window", "stride", "lookahead", "chunk")}
    if made.store is not None:
        out |= {"when": made.when, "page": made.store.page, "positions": made.store.positions}
        out |= _of_codecs(made.store)
    if made.choice is not None:
        out |= {"keep": made.keep, "fold": None if made.fold is None else str(made.fold)}
        out |= {"reducer": None if made.reducer is None else str(made.reducer)}
        out |= {k: getattr(made.choice, k) for k in ("slots", "sinks", "count")}
        out |= {k: getattr(made.choice, k).name for k in ("scorer", "budget")}
        for build, spec in (
            (scorers.build, made.choice.scorer),
            (budgets.build, made.choice.budget),
        ):
            out |= _defaults(build(spec)) | dict(spec.options)
    return out


def resolve(made: CacheRecipe, max_length: int) -> CacheRecipe:
    """The recipe with a window of REST made a number, for texts of up to max_length tokens."""
    if made.window != REST or made.choice is None:
        return made
    entries = min(made.choice.slots or round(made.keep * max_length), max_length)
    window = entries - made.choice.sinks
    if window < 1:
        raise InputError(
            f"{made.name}: keep leaves {entries} of {max_length} entries and "
            f"{made.choice.sinks} are sinks; raise keep"
        )
    return replace(made, window=window, choice=replace(made.choice, slots=entries))


def _defaults(method) -> dict[str, object]:
    fixed = ("side", "group", "rope")
    return {
        f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name not in fixed
    }


def _of_codecs(store) -> dict[str, object]:
    """The options of both codecs: one value, or a pair for keys and values where they differ."""
    k, v = (_defaults(codecs.build(x, side)) for x, side in ((store.k, "k"), (store.v, "v")))
    both = {name: (k.get(name, x), v.get(name, x)) for name, x in (v | k).items()}
    return {name: x[0] if x[0] == x[1] else x for name, x in both.items()}


def _with_codec(made, codec):
    sides = (codec, codec) if isinstance(codec, (str, Spec)) else codec
    named = isinstance(sides, (tuple, list)) and all(isinstance(x, (str, Spec)) for x in sides)
    if not named or len(sides) != 2:
        raise InputError(f"codec must be a name, or one for keys and one for values, got {codec!r}")
    k, v = (Spec(x) if isinstance(x, str) else x for x in sides)
    codecs.build(k, "k")
    codecs.build(v, "v")
    return replace(made, store=replace(made.store or Store(), k=k, v=v))


def _with(made, option, value):
    known = options_of(made)
    if option not in known:
        if option == "keep" and made.choice is None:
            raise InputError(f"{made.name} keeps every token: it has no option 'keep'")
        raise unknown(f"option of {made.name}", option, known)
    if option == "reducer":
        if not isinstance(value, (str, Spec, type(None))):
            raise InputError(f"reducer must be the name of one, got {value!r}")
        spec = Spec(value) if isinstance(value, str) else value
        _ = spec and reducers.build(spec)
        return replace(made, reducer=spec)
    if option == "fold":
        if not isinstance(value, (str, Spec, type(None))):
            raise InputError(f"fold must be the name of features, got {value!r}")
        spec = Spec(value) if isinstance(value, str) else value
        _ = spec and state.build(spec)
        return replace(made, fold=spec)
    if option in ("keep", "when", "window", "stride", "lookahead", "chunk"):
        return replace(made, **{option: value})
    if option in ("page", "positions"):
        return replace(made, store=replace(made.store, **{option: value}))
    choice = made.choice
    if choice is not None and option in ("slots", "sinks", "count"):
        return replace(made, choice=replace(choice, **{option: value}))
    if choice is not None:
        for name, build in (("scorer", scorers.build), ("budget", budgets.build)):
            spec = getattr(choice, name)
            usual = _defaults(build(Spec(spec.name)))
            if option in usual:
                spec = _spec_with(spec, option, value, usual[option])
                return replace(made, choice=replace(choice, **{name: spec}))
    return replace(made, store=_coded_with(made.store, option, value))


def _coded_with(store, option, value) -> Store:
    """The store with an option of the codecs that have it: of both sides, or a pair."""
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise InputError(f"{option} must be one value, or one for keys and one for values: {value}")
    sides = {}
    for side, mine in zip("kv", pair, strict=True):
        spec = getattr(store, side)
        usual = _defaults(codecs.build(Spec(spec.name), side))
        has = option in usual
        sides[side] = _spec_with(spec, option, mine, usual[option]) if has else spec
    return replace(store, **sides)


def _with_method(made, part, build, value):
    """The recipe with another scorer or budget."""
    if not isinstance(value, (str, Spec)):
        raise InputError(f"{part} must be a name, got {value!r}")
    spec = Spec(value) if isinstance(value, str) else value
    build(spec)
    if getattr(made.choice, part).name == spec.name and isinstance(value, str):
        return made  # the recipe's own, with its options
    return replace(made, choice=replace(made.choice, **{part: spec}))


def _spec_with(spec, option, value, usual) -> Spec:
    """The spec with one option more, which must be of a plain type; defaults are not written."""
    if not isinstance(value, (str, bool, int, float, type(None))):
        raise InputError(f"{spec.name}: {option} must be a number or a name, got {value!r}")
    options = dict(spec.options) | {option: value}
    if value == usual and type(value) is type(usual):
        del options[option]
    return Spec(spec.name, tuple(sorted(options.items())))


def _check(method) -> None:
    """Options of a method must be of the type of their defaults, and pass its own `check`."""
    for f in dataclasses.fields(method):
        value, kind = getattr(method, f.name), type(f.default)
        fits = (int, float) if kind is float else (kind,)
        if f.default is not None and f.default is not dataclasses.MISSING:
            if type(value) not in fits:
                raise InputError(
                    f"{f.name} must be {' or '.join(t.__name__ for t in fits)}, got {value!r}"
                )
    if hasattr(method, "check"):
        method.check()


def valid(made: CacheRecipe) -> CacheRecipe:
    """Checks the ranges of numbers and the names of switches."""

    def whole(name, value, least):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(
                f"{made.name}: {name} must be a whole number from {least}, got {value!r}"
            )

    if type(made.keep) not in (int, float) or not 0 < made.keep <= 1:
        raise InputError(
            f"{made.name}: keep is a fraction above 0 and at most 1, got {made.keep!r}"
        )
    if made.when not in ("after", "during"):
        raise unknown("value of when", made.when, ("after", "during"))
    usual = RECIPES.get(made.name)
    rest = made.choice is not None and usual is not None and usual.recipe.window == REST
    whole("window", made.window, REST if rest else 0)
    for name, least in (("stride", 1), ("lookahead", 0), ("chunk", 1)):
        whole(name, getattr(made, name), least)
    if made.store is not None:
        whole("page", made.store.page, 1)
        if made.store.positions not in POLICIES[:3]:
            raise unknown("value of positions", made.store.positions, POLICIES[:3])
        for spec, side in ((made.store.k, "k"), (made.store.v, "v")):
            _check(codecs.build(spec, side))
    if made.reducer is not None:
        _check(reducers.build(made.reducer))
    if made.choice is not None:
        _check(scorers.build(made.choice.scorer))
        _check(budgets.build(made.choice.budget))
        whole("sinks", made.choice.sinks, 0)
        if made.choice.slots is not None:
            whole("slots", made.choice.slots, 1)
        if made.choice.count not in ("exact", "paper"):
            raise unknown("value of count", made.choice.count, ("exact", "paper"))
    return made
