"""Recipes as one word, for command lines, labels and keys: name+codec@keep,option=value."""

import ast
import dataclasses
from typing import Any

from kvjax.cache.recipes import options_of, recipe
from kvjax.config import CacheRecipe
from kvjax.errors import InputError


def value(text: str) -> Any:
    """A number or a truth value if the text reads as one; names with commas are a tuple."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        named = {"true": True, "false": False, "none": None}
        parts = tuple(text.split(","))
        return parts if len(parts) > 1 else named.get(text.lower(), text)


def split(word: str, main: str) -> tuple[str, dict[str, Any]]:
    """(name, options) of "name@value,option=value"; the value after @ is the option `main`."""
    head, *rest = word.strip().split(",")
    name, at, given = head.partition("@")
    options = {main: value(given)} if at else {}
    for part in rest:
        option, equals, given = part.partition("=")
        if not equals or not option.strip():
            raise InputError(
                f"{word!r}: expected name@{main},option=value,... and found {part!r} after a comma"
            )
        _put(options, option.strip().replace("-", "_"), value(given.strip()), word)
    return name.strip(), options


def _put(options, option, given, word) -> None:
    """An option more, which may be said once."""
    if option in options:
        raise InputError(f"{word!r}: {option} is {options[option]!r} and {given!r}; give it once")
    options[option] = given


def parse(word: str, **more: Any) -> CacheRecipe:
    """The recipe that a word names: "snapkv", "snapkv+int8@0.5", "ada_snapkv@0.25,window=64".

    After + stands its codec, or two as in +int8/raw for keys and values; after @ what it keeps.
    Options of the codec may be two in the same way: "kivi,bits=4/2". more: options beside it.
    """
    name, options = split(word, "keep")
    for option, given in options.items():
        if isinstance(given, str) and "/" in given:
            options[option] = tuple(map(value, given.split("/")))
    name, plus, codec = name.partition("+")
    if plus:
        sides = tuple(codec.split("/"))
        _put(options, "codec", sides if len(sides) == 2 else codec, word)
    for option, given in more.items():
        _put(options, option, given, word)
    return recipe(name, **options)


def spelled(made: CacheRecipe) -> str:
    """The shortest word that `parse` reads as this recipe, its codec and budget shown."""
    plain = recipe(made.name)
    word = made.name
    given, names = dict(options_of(made)), {}
    if made.store is not None and (plain.store is None or _codecs(made) != _codecs(plain)):
        k, v = names["codec"] = _codecs(made)
        word += f"+{k}" if k == v else f"+{k}/{v}"
    for part in ("scorer", "budget"):
        if given.get(part) != options_of(plain).get(part):
            names[part] = given[part]
    # options that another codec, scorer or budget has are its own unless said; its name is said
    usual = dict(options_of(recipe(made.name, **names)))
    usual |= {part: options_of(plain).get(part) for part in ("scorer", "budget")}
    keep = given.pop("keep", None)
    if keep is not None and not (made.choice is not None and made.choice.slots):
        word += f"@{keep!r}"
    for option, mine in given.items():
        if mine != usual.get(option):
            sides = mine if isinstance(mine, tuple) else (mine,)
            word += f",{option}={'/'.join(map(str, sides))}"
    return word


def _codecs(made: CacheRecipe) -> tuple[str, str]:
    if made.store is None:
        return ("raw", "raw")
    return made.store.k.name, made.store.v.name


def budgeted(made: CacheRecipe, length: int) -> CacheRecipe:
    """The recipe with its budget as a number of entries, for a context of `length` tokens.

    Recipes that compress while they read would otherwise take `keep` of all the room there is.
    Numbers above 512 are cut to sixteens, so that contexts of many lengths share compilations.
    """
    choice = made.choice
    if choice is None or made.when != "during" or choice.slots is not None:
        return made
    entries = round(made.keep * length)
    if entries > 512:
        entries -= entries % 16
    return dataclasses.replace(made, choice=dataclasses.replace(choice, slots=max(entries, 1)))
