"""Asking a model to repeat its context, chunk by chunk: the reading behind KVzip's scores."""

import functools

import jax.numpy as jnp
import numpy as np

from kvjax import scorers
from kvjax.cache.sizes import bucket
from kvjax.config import CacheRecipe
from kvjax.errors import InputError

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
OVERLAP = 8  # tokens of the chunk before, with which the later request ends


def requests(tokenizer) -> tuple[list[int], list[int], list[int]]:
    """Token ids of the first request, of the later ones, and of the turn to the assistant.

    Without a tokenizer all are empty: the chunk alone is repeated. Without a chat template the turn
    is a line break.
    """
    if tokenizer is None:
        return [], [], []
    return tokenizer.encode(FIRST, add_bos=False), tokenizer.encode(LATER, add_bos=False), turn(
        tokenizer
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def turn(tokenizer) -> list[int]:
    """What a chat template writes between a user's words and the assistant's."""
    if tokenizer.template is None:
        return tokenizer.encode("\n", add_bos=False)
    mark = "\n############"
    text = tokenizer.chat([{"role": "user", "content": "context" + mark}])
    return tokenizer.encode(text.partition(mark)[2], special=True, add_bos=False)


def inputs(tokens, lengths, scorer, tokenizer):
    """The scoring inputs: (first token of the chunk, ids [b t], count [b]) for each chunk.

    All have one width, so that they share a compilation.
    """
    first_ask, later_ask, turn_ids = requests(tokenizer)
    size = _size(tokens, scorer)
    width = max(len(first_ask), len(later_ask) + OVERLAP) + len(turn_ids) + size
    for start in range(scorer.first, int(lengths.max()), size):
        ids = np.zeros((len(tokens), width), np.int32)
        count = np.zeros(len(tokens), np.int32)
        for row, (text, length) in enumerate(zip(tokens, lengths, strict=True)):
            stop = min(start + size, int(length))
            if stop <= start:
                continue
            ask = first_ask
            if start > scorer.first:
                ask = [*later_ask, *(text[start - OVERLAP : start] if later_ask else ())]
            whole = [*ask, *turn_ids, *text[start:stop]]
            ids[row, : len(whole)] = whole
            count[row] = len(whole)
        yield start, ids, count


def _size(tokens, scorer) -> int:
    """Tokens of a chunk; a short text is one chunk, of few sizes, so that many texts share one."""
    return min(scorer.part, bucket(max(tokens.shape[1] - scorer.first, 1)))


def repeat(look, model, cache, recipe: CacheRecipe, tokens, watch, tables):
    """The evidence of all passes; `look(model, cache, ids, count, watch, tables)` is one."""
    assert recipe.choice is not None
    scorer = scorers.build(recipe.choice.scorer)
    lengths = np.asarray(cache.seen)
    if scorer.first >= lengths.min():
        raise InputError(
            f"{recipe.name}: first={scorer.first} leaves nothing of {lengths.min()} tokens to "
            "repeat; lower it"
        )
    size = _size(tokens, scorer)
    total = None
    for start, ids, count in inputs(tokens, lengths, scorer, model.tokenizer):
        here = watch.replace(first=jnp.int32(start), size=size, sinks=recipe.choice.sinks)
        seen = look(model, cache, ids, count, here, tables)
        total = (
            seen
            if total is None
            else tuple(here.merge(a, b) for a, b in zip(total, seen, strict=True))
        )
    return total
