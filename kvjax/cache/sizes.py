"""Sizes of a cache from its recipe: what is kept, and in how many pages."""

from dataclasses import dataclass

import numpy as np

from kvjax import budgets
from kvjax.cache import pool
from kvjax.config import CacheRecipe, ModelConfig


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def bucket(length: int) -> int:
    """The length rounded up to a sixteenth of its power of two: few shapes for many lengths."""
    return round_up(length, _step(length))


def _step(length: int) -> int:
    return 1 << max((length - 1).bit_length() - 4, 0)


def ask(recipe: CacheRecipe, length: int, config: ModelConfig | None = None) -> budgets.Ask:
    """What the recipe asks of a text of `length` tokens."""
    choice = recipe.choice
    return budgets.Ask(
        length,
        recipe.keep,
        None if choice is None else choice.slots,
        choice is not None and choice.count == "paper",
        recipe.window,
        1 if config is None else len(full_layers(config)),
        1 if config is None else config.kv_heads,
        0 if choice is None else choice.sinks,
    )


def kept(recipe: CacheRecipe, length: int) -> int:
    """Entries per kv head that the recipe keeps of `length` tokens, window included."""
    return ask(recipe, length).each


def counts(recipe: CacheRecipe, lengths) -> np.ndarray:
    """Entries per kv head of each row [b], window included, on average over heads and layers."""
    if recipe.choice is None:
        return np.asarray(lengths, np.int32)
    return np.array([kept(recipe, int(n)) for n in lengths], np.int32)


def wants(config: ModelConfig, recipe: CacheRecipe, lengths) -> np.ndarray:
    """What the budget wants beyond the window, [.. b]: the last argument of a budget."""
    assert recipe.choice is not None
    budget = budgets.build(recipe.choice.budget)
    return np.stack([budget.wants(ask(recipe, int(n), config)) for n in lengths], axis=-1)


@dataclass(frozen=True)
class Sizes:
    """What a condensed cache is built for."""

    later: int  # tokens that may follow
    pages: int = 0  # of a head, or of the whole pool
    most: int = 0  # pages that one layer of a pool can have


def sizes(config: ModelConfig, recipe: CacheRecipe, lengths, later: int) -> Sizes:
    """Static sizes for prompts of these lengths: buckets, so that many prompts share them."""
    shortest = int(min(lengths))  # as many may follow as after the least of its bucket
    later = bucket(max(later + shortest - (bucket(shortest) - _step(shortest) + 1), 1))
    if recipe.choice is None or not full_layers(config):
        return Sizes(later)
    assert recipe.store is not None
    budget, page = budgets.build(recipe.choice.budget), recipe.store.page
    longest = bucket(int(max(lengths)))
    layers, heads = len(full_layers(config)), config.kv_heads
    asked = np.moveaxis(wants(config, recipe, [*lengths, longest]), -1, 0)
    need = max(budget.entries(want, layers, heads) for want in asked)
    if not budget.pooled:
        return Sizes(later, -(-max(need, 1) // page))
    pages = pool.room(need, page, layers * heads)
    return Sizes(later, pages, min(pages, heads * -(-longest // page)))


def full_layers(config: ModelConfig) -> list[int]:
    """The layers that see everything."""
    return [i for i, kind in enumerate(config.pattern) if config.kinds[kind].window is None]
