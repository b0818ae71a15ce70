"""Gathering what a scorer asks for: reading the prompt again with an observer looking along.

What is read is the scorer's `reads`: the newest tokens (or the question), the whole prompt in
order, a request to repeat the context, chunk by chunk, or soft tokens made for the prompt. The
cache is never changed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import scorers, struct
from kvjax.cache.sizes import bucket
from kvjax.config import CacheRecipe, Spec
from kvjax.errors import InputError
from kvjax.inputs import rows
from kvjax.model import observe
from kvjax.repeating import repeat
from kvjax.scorers import probe_attention


@struct.dataclass
class Evidence:
    """What a scorer has seen in an exact cache: of each group, with leaves [l b ...]."""

    groups: tuple[Any, ...]
    scorer: Spec | None = struct.static(None)


def suits(evidence, cache, recipe) -> Evidence:
    """The evidence, if it is of this cache and of the recipe's scorer."""
    if not isinstance(evidence, Evidence):
        raise InputError(f"evidence is what evidence_of gives, got {type(evidence).__name__}")
    scorer = None if recipe.choice is None else recipe.choice.scorer
    if evidence.scorer != scorer:
        raise InputError(
            f"this evidence is of scorer {str(evidence.scorer)!r} and {recipe.name} has "
            f"{str(scorer)!r}; use evidence_of with this recipe"
        )
    groups = evidence.groups or ((),) * len(cache.groups)
    for group, seen in zip(cache.groups, groups, strict=True):
        for leaf in jax.tree.leaves(seen):
            if leaf.shape[:2] != (group.stop - group.start, cache.batch):
                raise InputError(
                    f"this evidence is of {leaf.shape[1]} rows and the cache has {cache.batch}; "
                    "use evidence_of with this cache"
                )
    return evidence


def watcher(recipe: CacheRecipe) -> Any:
    """The observer that the recipe's scorer wants along, or None."""
    if recipe.choice is None or scorers.reads(recipe.choice) is None:
        return None
    return scorers.build(recipe.choice.scorer).watch()


def asks(recipe: CacheRecipe, question) -> None:
    """Refuses a question that nobody looks from, and a scorer that would look from nothing."""
    reads = scorers.reads(recipe.choice) if recipe.when == "after" else None
    if question is not None and reads not in ("window", "question"):
        raise InputError(
            f"{recipe.name} does not look from a question: leave question= out, or use a recipe "
            "that does (snapkv, tova, finch)"
        )
    if question is None and reads == "window" and not recipe.window:
        raise InputError(
            f"{recipe.name} looks from its window, which is 0: make it at least 1, or give "
            "question="
        )
    if question is None and reads == "question" and not recipe.window:
        raise InputError(f"{recipe.name} looks from the question: pass question=, ids [b, q]")


def gather(model, cache, recipe: CacheRecipe, counts, tokens, question, tables=None) -> Any:
    """The evidence for each group of the cache (leaves [l b ...]); () if the scorer asks for none.

    counts [b]: entries that are kept. tokens [b t]: the ids of the cache; question [b q]: what is
    looked from instead of the newest tokens, for scorers that look from there.
    """
    watch = watcher(recipe)
    asks(recipe, question)
    if watch is None:
        return ()
    reads = scorers.reads(recipe.choice)
    if reads in ("window", "question") and question is not None:
        asked, count = rows(model.config, question)
        if len(asked) != cache.batch:
            raise InputError(
                f"the cache holds {cache.batch} rows and the question has {len(asked)}"
            )
        return _look(model, cache, asked, count, watch, tables)
    if tokens is None:
        raise InputError(
            f"{recipe.name} looks at the prompt again: pass tokens=, the ids of the cache"
        )
    tokens, _ = rows(model.config, tokens, np.asarray(cache.seen))
    if reads in ("window", "question"):
        return _newest(model, cache, recipe, counts, tokens, watch, tables)
    if reads == "prompt":
        return _again(model, cache, recipe, tokens, watch, tables)
    if reads == "probes":
        return _probed(model, cache, recipe, tokens, watch, tables)
    return repeat(_look, model, cache, recipe, tokens, watch, tables)


def _newest(model, cache, recipe, counts, tokens, watch, tables):
    lengths = np.asarray(cache.seen)
    count = np.minimum(recipe.window, counts)
    width = max(int(recipe.window), 1)
    at = np.clip((lengths - count)[:, None] + np.arange(width), 0, tokens.shape[1] - 1)
    asked = np.take_along_axis(tokens, at, axis=1)
    _reaches_back(cache, count)
    return _look(model, _before(cache, lengths - count), asked, count, watch, tables)


def _again(model, cache, recipe, tokens, watch, tables):
    """The whole prompt in chunks, each seeing what came before it."""
    lengths, total = np.asarray(cache.seen), None
    _reaches_back(cache, lengths)
    for first in range(0, tokens.shape[1], recipe.chunk):
        piece = tokens[:, first : first + recipe.chunk]
        piece = np.pad(piece, ((0, 0), (0, recipe.chunk - piece.shape[1])))
        count = np.clip(lengths - first, 0, recipe.chunk).astype(np.int32)
        view = _before(cache, np.minimum(first, lengths))
        seen = _look(model, view, piece, count, watch, tables)
        total = seen if total is None else merged(watch, total, seen)
    return total


def _probed(model, cache, recipe, tokens, watch, tables):
    """What soft tokens see that stand after the prompt for this look alone: a mean over them."""
    table = probe_attention.checked(model.tables.get(recipe.name), recipe.name, model.config.width)
    # few sizes, so that many prompts share a compilation
    ids = np.pad(tokens, ((0, 0), (0, bucket(tokens.shape[1]) - tokens.shape[1])))
    made = _soft(model.params.embed, jnp.asarray(ids), cache.seen, table)
    count = np.full(len(tokens), made.shape[1], np.int32)
    seen = _look(model, cache, made, count, watch, tables)
    return jax.tree.map(lambda x: x / made.shape[1], seen)


@jax.jit
def _soft(embed, tokens, count, table):
    x = jnp.take(embed, tokens, axis=0, mode="clip")
    return probe_attention.probes(table, x, count)


def merged(watch, one, two):
    """What an observer has seen in two looks, for each group."""
    return tuple(watch.merge(a, b) for a, b in zip(one, two, strict=True))


def _before(cache, length):
    """The exact cache as it was at `length` [b] tokens."""
    length = jnp.asarray(length, jnp.int32)
    return cache.replace(seen=length, clock=cache.clock - (cache.seen - length))


def _look(model, cache, tokens, count, watch, tables):
    return _observe(
        model.params, model.config, cache, jnp.asarray(tokens), jnp.asarray(count), watch, tables
    )


@functools.partial(jax.jit, static_argnames="config")
def _observe(params, config, cache, tokens, count, watch, tables):
    _, new = observe(
        params, config, cache, tokens, watch, count=count, tables=tables, logits="none"
    )
    return new.evidence


def _reaches_back(cache, count):
    """Refuses to read the last tokens again where a sliding window has lost what they saw."""
    for group in cache.groups:
        if group.window is not None:
            lost = np.maximum(np.asarray(cache.high) - group.tail.capacity, 0)
            first = np.asarray(cache.seen) - count - (group.window - 1)
            if ((lost > 0) & (first < lost)).any():
                raise InputError(
                    f"the sliding windows of this cache do not reach {int(count.max())} tokens "
                    "back; prefill with the recipe, or with kvjax.recipe('exact', "
                    f"window={int(count.max())})"
                )
