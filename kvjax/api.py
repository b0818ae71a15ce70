"""For people with a model and a text: load, prefill, extend, condense, generate. Host functions."""

import contextlib
import dataclasses
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

from kvjax import finch, scorers, sharding
from kvjax.cache import init, ops, sizes
from kvjax.cache.cache import Cache
from kvjax.cache.condense import compact
from kvjax.cache.recipes import a_recipe, resolve
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.errors import InputError, whole
from kvjax.inputs import a_cache, array, checked, finite, fits, rows
from kvjax.model import observe
from kvjax.observing import Evidence, asks, gather, merged, suits, watcher
from kvjax.params import Params, apart
from kvjax.scorers.probe_attention import PROBES


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
    progress(done_bytes, total_bytes) is called while a file is fetched. Tables that `kvjax train`
    made for the model come along.
    """
    from kvjax import tables
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
    made = Model(params, config, tok, mesh=mesh)
    return dataclasses.replace(made, tables=tables.found(name_or_path, made))


def prefill(
    model: Model, tokens: Any, recipe: CacheRecipe | None = None, *, max_length: int,
    lengths: Any = None, mask: Any = None, question: Any = None, chunk: int | None = None,
    logits: str = "last",
) -> tuple[Any, Cache]:  # fmt: skip
    """Reads prompts into a new cache: `(logits, cache)`.

    tokens [b, t] ids, right padded with `lengths` [b], or padded anywhere with `mask` [b, t]. Fed
    in chunks (default recipe.chunk), the last one padded: one compilation for all prompts. A recipe
    with when="after" reads exactly, then condenses; `question` [b, q] ids are then what its scorer
    looks from (query-aware); "finch" reads the question after every chunk and condenses at once, so
    that its texts may exceed the context. logits: "last" [b w] at each row's last token, "all"
    [b t w], "none".
    """
    recipe, max_length = a_recipe(recipe), whole("max_length", max_length)
    tokens, lengths = rows(model.config, tokens, lengths, mask)
    width = min(recipe.chunk if chunk is None else whole("chunk", chunk), max_length)
    guided = scorers.reads(recipe.choice) == "question"
    if guided and (question is not None or not recipe.window):
        return _finch(model, tokens, lengths, recipe, question, max_length, width, logits)
    asks(recipe, question)
    fits(model.config, int(lengths.max()), max_length, "raise max_length")
    after = recipe.when == "after" and recipe.store is not None
    resolved = resolve(recipe, max_length)
    init.check(model.config, resolved, max_length)
    # its sliding windows reach back past the window that the scorer reads again
    exact = CacheRecipe(window=recipe.window, stride=recipe.stride, lookahead=recipe.lookahead)
    cache = _placed(
        model, init.init_cache(model.config, exact if after else resolved, len(tokens), max_length)
    )
    along = after and scorers.reads(resolved.choice) == "prompt"
    watch = watcher(resolved) if along else None
    out, cache, seen = _feed(
        model, cache, tokens, lengths, width, logits, watch, tables_of(model, resolved)
    )
    if after:
        cache = _condense(model, cache, resolved, tokens, question, seen)
    return out, cache


def _finch(model, tokens, lengths, recipe, question, max_length, chunk, logits):
    """A text that is condensed for a question while it is read; it may exceed the context."""
    if int(lengths.max()) > max_length:
        raise InputError(
            f"this takes {int(lengths.max())} tokens and max_length is {max_length}; raise "
            "max_length"
        )
    with _mesh(model):
        out, cache = finch.read(
            model, tokens, lengths, recipe, question, max_length, chunk, logits,
            tables_of(model, recipe),
        )  # fmt: skip
    return out, checked(_placed(model, cache))


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
    total, reach = (int(jnp.max(x + jnp.asarray(lengths))) for x in (cache.seen, cache.clock))
    fits(model.config, total, cache.max_length, "prefill with a larger one", reach)
    width = min(
        cache.recipe.chunk, max(8, 1 << (tokens.shape[1] - 1).bit_length()), cache.max_length
    )
    return _feed(model, cache, tokens, lengths, width, logits)[:2]


def condense(
    model: Model, cache: Cache, recipe: CacheRecipe, *, tokens: Any = None, question: Any = None,
    evidence: Any = None,
) -> Cache:  # fmt: skip
    """The cache that `recipe` makes of an exact one, which is left as it is.

    tokens [b t] are the ids it was made from: a scorer that asks for evidence reads them again (its
    window, or the question [b q], if given; or all); without them such a recipe raises. evidence is
    what `evidence_of` gave for a recipe that differs in its budget only: then nothing is read.
    """
    recipe = _after(model, cache, recipe)
    if recipe.store is None:
        return fork(cache)
    if evidence is not None:
        evidence = suits(evidence, cache, recipe).groups
    return _condense(model, cache, recipe, tokens, question, evidence)


def evidence_of(
    model: Model, cache: Cache, recipe: CacheRecipe, *, tokens: Any = None, question: Any = None
) -> Evidence:
    """What the recipe's scorer sees in an exact cache: to condense it at several budgets."""
    recipe = _after(model, cache, recipe)
    scorer = None if recipe.choice is None else recipe.choice.scorer
    return Evidence(_seen(model, cache, recipe, tokens, question), scorer)


def _seen(model, cache, recipe, tokens, question):
    counts = sizes.counts(recipe, np.asarray(cache.seen))
    with _mesh(model):
        return gather(model, cache, recipe, counts, tokens, question, tables_of(model, recipe))


def _after(model, cache, recipe) -> CacheRecipe:
    """The recipe, if it condenses exact caches such as this one."""
    recipe = a_recipe(recipe)
    if not all(group.keeps_all for group in a_cache(cache).groups):
        raise InputError(
            f"condense takes an exact cache, this one is {cache.recipe.name!r} already"
        )
    if recipe.store is None:
        return recipe
    recipe = resolve(recipe, cache.max_length)
    if recipe.when != "after":
        raise InputError(f"{recipe.name} compresses as tokens arrive: give it to prefill")
    init.check(model.config, recipe, cache.max_length)
    return recipe


def _condense(model, cache, recipe, tokens, question, evidence):
    lengths = np.asarray(cache.seen)
    if lengths.min() < 1:
        raise InputError("condense got a cache with an empty row; prefill it first")
    tables = tables_of(model, recipe)
    if evidence is None:
        evidence = _seen(model, cache, recipe, tokens, question)
    with _mesh(model):
        later = cache.max_length - int(lengths.min())
        made = compact(cache, evidence, lengths, model.config, recipe, later, tables)
    return checked(_placed(model, made))


@functools.partial(jax.jit, static_argnames=("config", "logits"), donate_argnames="cache")
def _read(params, config, cache, tokens, count, logits, tables=None, watch=None, seen=None):
    """One chunk: logits, the cache with it, and what an observer that looks along has seen."""
    out, new = observe(
        params, config, cache, tokens, watch, count=count, logits=logits, tables=tables
    )
    if watch is not None:
        seen = new.evidence if seen is None else merged(watch, seen, new.evidence)
    return out, ops.absorb_long(cache, new, count, tables=tables), seen


def _feed(model, cache, tokens, lengths, width, logits, watch=None, watched=None):
    """Chunks of `width` tokens; logits of "last" come from the chunk where each row ends.

    watch: an observer that looks along, with the tables `watched`. Returns (logits, cache, what it
    has seen).
    """
    if logits not in ("last", "all", "none"):
        raise InputError(f"logits must be 'last', 'all' or 'none', got {logits!r}")
    parts, last, seen = [], None, None
    tables = watched if watch is not None else tables_of(model, cache.recipe)
    for first in range(0, tokens.shape[1], width):
        piece = tokens[:, first : first + width]
        short = piece.shape[1]
        piece = np.pad(piece, ((0, 0), (0, width - short)))
        count = np.clip(lengths - first, 0, short).astype(np.int32)
        with _mesh(model):
            read = functools.partial(_read, model.params, model.config)
            out, cache, seen = read(cache, piece, count, logits, tables, watch, seen)
        if logits == "all":
            parts.append(out[:, :short])
        elif logits == "last":
            ends = (lengths > first) & (lengths <= first + width)
            last = out if last is None else jnp.where(ends[:, None], out, last)
    cache = checked(cache)
    return (jnp.concatenate(parts, axis=1) if parts else last), cache, seen


def tables_of(model: Model, recipe: CacheRecipe):
    """The tables that a recipe's methods read layer by layer, or None."""
    tables = model.tables.get(recipe.name)
    finite(f"tables of {recipe.name}", tables)
    if tables and PROBES in tables:  # of no layer: `gather` reads them
        tables = {name: x for name, x in tables.items() if name != PROBES} or None
    for at, leaf in jax.tree_util.tree_leaves_with_path(tables):
        if np.shape(leaf)[:1] != (model.config.layers,):
            raise InputError(
                f"tables of {recipe.name}: {jax.tree_util.keystr(at)} has shape {np.shape(leaf)} "
                f"and the model {model.config.layers} layers; use the tables made for this model"
            )
    return tables


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
