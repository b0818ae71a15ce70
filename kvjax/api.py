"""For people with a model and a text: load, prefill, extend, condense, generate. Host functions."""

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from kvjax import scorers, sharding
from kvjax.cache import init, ops
from kvjax.cache.cache import Cache
from kvjax.cache.condense import compact
from kvjax.cache.evidence import OBSERVERS
from kvjax.cache.recipes import resolve
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.errors import InputError
from kvjax.inputs import a_cache, a_recipe, array, checked, fits, rows, whole
from kvjax.model import look, observe
from kvjax.params import Params, apart


@dataclass(frozen=True)
class Model:
    """A model to call: weights, numbers, tokenizer, and the tables of its codecs by name."""

    params: Params
    config: ModelConfig
    tokenizer: Any
    tables: dict[str, Any] = field(default_factory=dict)
    mesh: Mesh | None = None


def load(
    name_or_path: str | os.PathLike[str] = "smollm2-135m", *, dtype: Any = None,
    mesh: Mesh | None = None, unofficial: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Model:  # fmt: skip
    """The model of a name ("smollm2-135m"), a GGUF file, a Hugging Face folder or a hub name.

    A named model is fetched once, checked by its sha256 and cached. dtype is of weights,
    activations and exact cache; default float32 from GGUF, as stored from a folder. mesh places the
    weights by `sharding.RULES`. unofficial allows re-uploads that are not the publisher's.
    progress(done_bytes, total_bytes) is called while a file is fetched.
    """
    from kvjax.models import fetch, tokenizer
    from kvjax.models import load as loading

    # compiled once for all runs of a user
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(fetch.cache_folder() / "compiled"))
    params, config, source = loading.load_weights(
        name_or_path, dtype, unofficial=unofficial, progress=progress
    )
    kind, where = source
    tok = (
        tokenizer.Tokenizer.from_gguf(where)
        if kind == "gguf"
        else tokenizer.Tokenizer.from_folder(where)
    )
    if mesh is not None:
        mesh = sharding.auto(mesh)
        params = sharding.place(params, sharding.param_specs(params, mesh), mesh)
    elif jax.default_backend() == "cpu":
        params = apart(params)
    return Model(params, config, tok, mesh=mesh)


def prefill(
    model: Model, tokens: Any, recipe: CacheRecipe | None = None, *, max_length: int,
    lengths: Any = None, mask: Any = None, question: Any = None, chunk: int | None = None,
    logits: str = "last",
) -> tuple[Any, Cache]:  # fmt: skip
    """Reads prompts into a new cache: `(logits, cache)`.

    tokens [b, t] ids, right padded with `lengths` [b], or padded anywhere with `mask` [b, t]. Fed
    in chunks (default recipe.chunk), the last one padded: one compilation for all prompts. A recipe
    with when="after" reads exactly, then condenses; `question` [b, q] ids are then what its scorer
    looks from (query-aware). logits: "last" [b w] at each row's last token, "all" [b t w], "none".
    """
    recipe, max_length = a_recipe(recipe), whole("max_length", max_length)
    tokens, lengths = rows(model.config, tokens, lengths, mask)
    fits(model.config, int(lengths.max()), max_length, "raise max_length")
    after = recipe.when == "after" and recipe.store is not None
    resolved = resolve(recipe, max_length)
    init.check(model.config, resolved, max_length)
    # its sliding windows reach back past the window that the scorer reads again
    exact = CacheRecipe(window=recipe.window, stride=recipe.stride, lookahead=recipe.lookahead)
    cache = _placed(
        model, init.init_cache(model.config, exact if after else resolved, len(tokens), max_length)
    )
    width = min(recipe.chunk if chunk is None else whole("chunk", chunk), max_length)
    out, cache = _feed(model, cache, tokens, lengths, width, logits)
    if after:
        cache = condense(model, cache, recipe, tokens=tokens, question=question)
    return out, cache


def extend(
    model: Model, tokens: Any, cache: Cache, *, lengths: Any = None, logits: str = "last"
) -> tuple[Any, Cache]:
    """Reads more tokens [b, t] into a cache: `(logits, cache)`.

    The cache given is consumed: fork it first to keep it.
    """
    a_cache(cache)
    tokens, lengths = rows(model.config, tokens, lengths)
    if len(tokens) != cache.batch:
        raise InputError(f"the cache holds {cache.batch} rows and tokens have {len(tokens)}")
    total = int(jnp.max(cache.seen + jnp.asarray(lengths)))
    fits(model.config, total, cache.max_length, "prefill with a larger one")
    width = min(
        cache.recipe.chunk, max(8, 1 << (tokens.shape[1] - 1).bit_length()), cache.max_length
    )
    return _feed(model, cache, tokens, lengths, width, logits)


def condense(
    model: Model, cache: Cache, recipe: CacheRecipe, *, tokens: Any = None, question: Any = None
) -> Cache:
    """The cache that `recipe` makes of an exact one, which is left as it is.

    tokens [b t] are the ids it was made from: a scorer that asks for evidence reads its window (or
    the question [b q], if given) again; without them such a recipe raises.
    """
    recipe = a_recipe(recipe)
    if any(group.bodies for group in a_cache(cache).groups):
        raise InputError(
            f"condense takes an exact cache, this one is {cache.recipe.name!r} already"
        )
    if recipe.store is None:
        return fork(cache)
    recipe = resolve(recipe, cache.max_length)
    if recipe.when != "after":
        raise InputError(f"{recipe.name} compresses as tokens arrive: give it to prefill")
    init.check(model.config, recipe, cache.max_length)
    lengths = np.asarray(cache.seen)
    if lengths.min() < 1:
        raise InputError("condense got a cache with an empty row; prefill it first")
    counts = np.array([init.kept(recipe, int(n)) for n in lengths], np.int32)
    counts = np.maximum(counts, 1) if recipe.choice is not None else lengths
    evidence = ()
    if recipe.choice is not None and scorers.observes(recipe.choice.scorer):
        evidence = _evidence(model, cache, recipe, counts, tokens, question)
    later = cache.max_length - int(lengths.min())
    sizes = init.Sizes(init.bucket(int(lengths.max())), init.bucket(max(later, 1)))
    with _mesh(model):
        made = compact(cache, evidence, jnp.asarray(counts), model.config, recipe, sizes,
                       tables_of(model, recipe))  # fmt: skip
    return checked(_placed(model, made))


def _evidence(model, cache, recipe, counts, tokens, question):
    """What the scorer's observer sees, from the question or from the last window of the prompt."""
    lengths = np.asarray(cache.seen)
    observer = scorers.observes(recipe.choice.scorer)
    assert observer is not None
    watch = OBSERVERS[observer]()
    if question is not None:
        asked, count = rows(model.config, question)
        if len(asked) != len(lengths):
            raise InputError(
                f"the cache holds {len(lengths)} rows and the question has {len(asked)}"
            )
    elif tokens is None:
        raise InputError(
            f"{recipe.name} looks at the prompt again: pass tokens=, the ids of the cache"
        )
    else:
        tokens, _ = rows(model.config, tokens, lengths)
        count = np.minimum(recipe.window, counts)
        width = max(int(recipe.window), 1)
        at = np.clip((lengths - count)[:, None] + np.arange(width), 0, tokens.shape[1] - 1)
        asked = np.take_along_axis(tokens, at, axis=1)
        _reaches_back(cache, count)
        cache = cache.replace(seen=cache.seen - count, clock=cache.clock - count)
    with _mesh(model):
        return _observe(
            model.params, model.config, cache, jnp.asarray(asked), jnp.asarray(count), watch
        )


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


@functools.partial(jax.jit, static_argnames="config")
def _observe(params, config, cache, tokens, count, watch):
    _, new = observe(params, config, cache, tokens, watch, count=count, logits="none")
    return new.evidence


@functools.partial(jax.jit, static_argnames=("config", "logits"), donate_argnames="cache")
def _read(params, config, cache, tokens, count, logits, tables=None):
    out, new = look(params, config, cache, tokens, count=count, logits=logits, tables=tables)
    return out, ops.absorb_long(cache, new, count, tables=tables)


def _feed(model, cache, tokens, lengths, width, logits):
    """Chunks of `width` tokens; logits of "last" come from the chunk where each row ends."""
    if logits not in ("last", "all", "none"):
        raise InputError(f"logits must be 'last', 'all' or 'none', got {logits!r}")
    parts, last = [], None
    for first in range(0, tokens.shape[1], width):
        piece = tokens[:, first : first + width]
        short = piece.shape[1]
        piece = np.pad(piece, ((0, 0), (0, width - short)))
        count = np.clip(lengths - first, 0, short).astype(np.int32)
        with _mesh(model):
            out, cache = _read(
                model.params,
                model.config,
                cache,
                piece,
                count,
                logits,
                tables_of(model, cache.recipe),
            )
        if logits == "all":
            parts.append(out[:, :short])
        elif logits == "last":
            ends = (lengths > first) & (lengths <= first + width)
            last = out if last is None else jnp.where(ends[:, None], out, last)
    cache = checked(cache)
    return (jnp.concatenate(parts, axis=1) if parts else last), cache


def tables_of(model: Model, recipe: CacheRecipe):
    """The tables that a recipe's methods read, or None."""
    return model.tables.get(recipe.name)


def _mesh(model):

    return (
        contextlib.nullcontext() if model.mesh is None else jax.set_mesh(sharding.auto(model.mesh))
    )


def _placed(model, cache):
    if model.mesh is None:
        return cache
    return sharding.place(cache, sharding.cache_specs(cache, model.mesh), model.mesh)


def fork(cache: Cache) -> Cache:
    """An independent copy: no buffer is shared."""
    return jax.tree.map(jnp.copy, cache)


def truncate(cache: Cache, length: Any) -> Cache:
    """`ops.truncate` that raises where a row cannot forget exactly; under jit it flags instead.

    A copy: no buffer is shared with the cache given.
    """
    if isinstance(cache.flags, Tracer) or isinstance(length, Tracer):
        return ops.truncate(cache, length)
    least = array("length", length)
    if least.shape not in ((), (cache.batch,)) or not np.issubdtype(least.dtype, np.integer):
        raise InputError(f"length must be whole numbers, one or {cache.batch}, got {length!r:.60}")
    to = jnp.broadcast_to(jnp.asarray(least, jnp.int32), cache.seen.shape)
    return fork(checked(ops.truncate(cache, to)))
