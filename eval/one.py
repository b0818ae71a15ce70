"""One item with one recipe: its cache, what is heard from it, and how long that takes."""

import dataclasses

import jax
import numpy as np

import kvjax
from kvjax import compare, scorers
from kvjax.api import evidence_of
from kvjax.cache.sizes import kept
from kvjax.eval import score
from kvjax.eval.timing import COMPILED_S, Span, timed

STEPS = 16  # tokens of a timed decoding
STEP = 128  # room in a cache is a multiple, so that few shapes compile


def longest(item) -> int:
    """Tokens that a cache may come to hold, with those of a timed decoding."""
    return len(item.context) + max(item.room, len(item.asks[0].question) + STEPS)


def room(item) -> int:
    """max_length for an item, with room for a timed decoding."""
    return len(item.context) + -(-(item.room + STEPS) // STEP) * STEP


def sizes(cache) -> dict:
    live, entries = compare.live_bytes(cache)
    return {"held": kvjax.nbytes(cache), "live": live, "entries": round(entries, 2)}


class Seen:
    """What scorers have seen of an item, so that several budgets of one method share it."""

    def __init__(self):
        self.by_method = {}

    def of(self, model, exact, ids, recipe):
        """(evidence, the span it took): looked for once for each scorer and what it reads."""
        choice, length = recipe.choice, ids.shape[1]
        reads = scorers.reads(choice) if recipe.when == "after" else None
        if reads not in ("window", "prompt", "repeat"):
            return None, Span()
        window = min(recipe.window, kept(recipe, length)) if reads == "window" else None
        tables = recipe.name if recipe.name in model.tables else None
        key = (choice.scorer, choice.sinks, recipe.chunk, window, tables)
        if key not in self.by_method:
            with timed() as span:
                found = evidence_of(model, exact, recipe, tokens=ids)
                jax.block_until_ready(found)
            self.by_method[key] = found, span
        found, span = self.by_method[key]
        return found, dataclasses.replace(span)


def agnostic(model, exact, ids, recipe, room, item, truths, seen=None):
    """(what was heard, cache, spans): one cache, compressed without knowing a question."""
    found, made = (Seen() if seen is None else seen).of(model, exact, ids, recipe)
    with timed(made):
        cache = compare.build(model, exact, ids, recipe, room, found)
        jax.block_until_ready(cache)
    with timed() as scored:
        heard, _ = score.listen(model, cache, item, truths)
    return heard, cache, {"compress": made, "score": scored}


def aware(model, exact, ids, recipe, room, item, truths):
    """The same with a cache for each ask, compressed for its question if that can be."""
    looks = scorers.reads(recipe.choice) in ("window", "question")
    if recipe.store is None or recipe.when != "after" or not looks:
        return agnostic(model, exact, ids, recipe, room, item, truths)
    heard, cache, made, scored = [], exact, Span(), Span()
    for ask, truth in zip(item.asks, truths, strict=True):
        with timed(made):
            asked = np.asarray([ask.question], np.int32)
            cache = kvjax.condense(model, exact, recipe, tokens=ids, question=asked)
            jax.block_until_ready(cache)
        with timed(scored):
            heard.append(score.hear(model, cache, ask, truth)[0])
    return heard, cache, {"compress": made, "score": scored}


def recent(model, item, room):
    """What a reader hears who has seen the last tokens of the context only."""
    short = dataclasses.replace(item, context=item.context[-item.recent :])
    ids = np.asarray([short.context], np.int32)
    _, cache = kvjax.prefill(model, ids, max_length=room, logits="none")
    return score.listen(model, cache, short)[0]


def decode(model, cache, item) -> dict:
    """Milliseconds a token of a decoding of STEPS tokens, in a run that compiles nothing."""
    question, made = list(item.asks[0].question), None
    for _ in range(2):
        with timed() as span:
            made = kvjax.generate(
                model, question, cache=kvjax.fork(cache), max_new_tokens=STEPS, stop=()
            )
        if span.compile_s < COMPILED_S:
            break
    assert made is not None
    return {"ms": round(1000 * made.stats["decode_s"] / STEPS, 3), "tokens": len(item.context)}
