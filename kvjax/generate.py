"""Text from a prompt: prefill, then the decoding loop in short jitted runs."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.api import Model, _mesh, extend, prefill, tables_of
from kvjax.cache.cache import Cache, nbytes
from kvjax.cache.recipes import a_recipe, resolve
from kvjax.config import CacheRecipe
from kvjax.decode import generate_some
from kvjax.errors import InputError, whole
from kvjax.inputs import a_cache, array, checked, fits, number
from kvjax.inputs import rows as checked_rows
from kvjax.sampling import sample

RUN = 16
"""Steps in a jitted run: streamed text comes in pieces of at most so many tokens."""


@dataclass(frozen=True)
class Generation:
    """What `generate` gives; lists over rows when it was given a batch."""

    text: str | list[str]
    tokens: list[int] | list[list[int]]  # without the stop token
    cache: Cache  # holds the prompt and every token of `tokens`
    stats: dict[str, Any]  # prompt_tokens, new_tokens, prefill_s, decode_s, cache_bytes, peak_bytes


def generate(
    model: Model,
    prompt: str | Sequence[Any],
    recipe: CacheRecipe | None = None,
    *,
    cache: Cache | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> Generation:
    """Continues a prompt: a string, strings, ids, or rows of ids of any lengths.

    With `cache` (consumed: fork it to keep it) the prompt follows what that holds, under its own
    recipe. stop: token ids that end a row; default those of the tokenizer, () for none.
    on_token(row, id) is called for each token, in runs of up to 16. Equal seeds give equal tokens.
    """
    max_new_tokens = whole("max_new_tokens", max_new_tokens)
    temperature = number("temperature", temperature, 0.0)
    top_p = number("top_p", top_p, 1e-9, 1.0)
    recipe = None if recipe is None else a_recipe(recipe)
    cache = None if cache is None else a_cache(cache)
    tokens, lengths, single = _prompt(model, prompt, cache is not None)
    if stop is None:
        stop = sorted(model.tokenizer.stop_ids) if model.tokenizer else ()
    stop = tuple(int(i) for i in array("stop", stop).astype(int).reshape(-1))
    begin = time.perf_counter()
    logits, cache, peak = _start(model, tokens, lengths, recipe, cache, max_new_tokens)
    jax.block_until_ready(logits)
    between = time.perf_counter()
    key = jax.random.key(seed)
    first = _sample(logits, jax.random.fold_in(key, 0), temperature, top_p)
    rows, cache = _loop(model, cache, first, key, max_new_tokens, temperature, top_p,
                        stop, on_token)  # fmt: skip
    stats = dict(
        prompt_tokens=lengths.tolist(), new_tokens=[len(r) for r in rows],
        prefill_s=between - begin, decode_s=time.perf_counter() - between,
        cache_bytes=nbytes(cache), peak_bytes=peak,
    )  # fmt: skip
    text = [model.tokenizer.decode(r) for r in rows] if model.tokenizer else [""] * len(rows)
    return Generation(
        text[0] if single else text, rows[0] if single else rows, checked(cache), stats
    )


def _prompt(model, prompt, follows):
    """Ids [b, t], lengths [b], and whether one row was given plainly."""
    if isinstance(prompt, str):
        prompt, single = [prompt], True
    elif isinstance(prompt, Sequence) and any(isinstance(p, str) for p in prompt):
        single = False
    else:
        try:
            prompt = [np.asarray(p) for p in prompt]
        except (TypeError, ValueError):
            raise InputError(f"a prompt is text or token ids, got {str(prompt)[:60]}") from None
        single = bool(prompt) and prompt[0].ndim == 0
        prompt = [np.asarray(prompt)] if single else prompt
    if not len(prompt):
        raise InputError("the prompt is empty; give at least one token")
    rows = [_ids(model, p, add_bos=False if follows else None) for p in prompt]
    lengths = np.array([len(r) for r in rows])
    if (lengths == 0).any():
        raise InputError(
            f"prompts {np.flatnonzero(lengths == 0).tolist()} are empty; give at least one token"
        )
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return *checked_rows(model.config, tokens, lengths), single


def _ids(model, prompt, add_bos):
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError("this model has no tokenizer; give token ids")
        return model.tokenizer.encode(prompt, add_bos=add_bos)
    row = array("a prompt", prompt)
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise InputError(f"token ids must be whole numbers in a row, got {str(prompt)[:60]}")
    return row.tolist()


def _start(model, tokens, lengths, recipe, cache, more) -> tuple[Any, Cache, int]:
    """Logits of the last prompt tokens, the cache, and the bytes held at the most."""
    if cache is None:
        length = int(lengths.max()) + more
        if length > model.config.context:
            raise InputError(
                f"{int(lengths.max())} prompt tokens and {more} new ones are more than the model's "
                f"context of {model.config.context}; shorten the prompt or max_new_tokens"
            )
        step = 1 << max((length - 1).bit_length() - 3, 5)  # few shapes for many lengths
        room = min(-(-length // step) * step, model.config.context)
        logits, cache = prefill(model, tokens, recipe, max_length=room, lengths=lengths)
        exact = 2 * cache.batch * model.config.layers * model.config.kv_heads * room
        exact *= model.config.head_dim * jnp.dtype(model.config.dtype).itemsize
        after = cache.recipe.when == "after" and cache.recipe.store is not None
        return logits, cache, nbytes(cache) + (exact if after else 0)
    if recipe is not None and resolve(recipe, cache.max_length) != cache.recipe:
        raise InputError(
            f"the cache was made with {cache.recipe.name!r} and recipe is {recipe.name!r} with its "
            "own options: a cache keeps its recipe; leave recipe out"
        )
    need, reach = (int(jnp.max(x + lengths)) + more for x in (cache.seen, cache.clock))
    fits(model.config, need, cache.max_length, "prefill with a larger one", reach)
    logits, cache = extend(model, tokens, cache, lengths=lengths)
    return logits, cache, nbytes(cache)


def _loop(
    model, cache, first, key, count, temperature, top_p, stop, on_token
) -> tuple[list, Cache]:
    """Tokens of each row, and the cache that holds them all."""
    rows = [[] for _ in range(cache.batch)]
    last, done = first, np.zeros(cache.batch, bool)
    fresh = np.asarray(first)[:, None]
    made = 0
    while True:
        for j in range(min(fresh.shape[1], count - made)):
            for i, token in enumerate(fresh[:, j].tolist()):
                done[i] |= token in stop or token < 0
                if not done[i]:
                    rows[i].append(token)
                    if on_token:
                        on_token(i, token)
        made += fresh.shape[1]
        # each run first remembers `last`; the final one remembers the last token and stops there
        left = count - made + 1
        if done.all() or left < 1:
            return rows, cache
        run = min(RUN, 1 << (count - 1).bit_length())
        with _mesh(model):
            out, last, cache = _run(
                model.params, model.config, cache, last, key, jnp.int32(made), jnp.asarray(done),
                jnp.int32(left), tables_of(model, cache.recipe), run, temperature, top_p, stop,
            )  # fmt: skip
        fresh = np.asarray(out)


@functools.partial(jax.jit, static_argnames=("config", "steps", "temperature", "top_p", "stop"),
                   donate_argnames="cache")  # fmt: skip
def _run(
    params, config, cache, last, key, first, done, limit, tables, steps, temperature, top_p, stop
):
    return generate_some(
        params, config, cache, last, key, steps=steps, first=first, done=done, limit=limit,
        tables=tables, temperature=temperature, top_p=top_p, stop=stop,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("temperature", "top_p"))
def _sample(logits, key, temperature, top_p):
    return sample(logits, key, temperature=temperature, top_p=top_p)
