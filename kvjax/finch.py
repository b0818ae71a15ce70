"""Finch: reads a text chunk by chunk together with the question, and keeps what it looks at.

After each chunk the entries that the question attends to most stay, are closed up, and are the
first tokens before the next chunk. So a text longer than the model's context is read at a cost
linear in its length, in a working cache of the size of what is kept and a chunk.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import budgets
from kvjax.cache import condense, init, ops, positions, sizes
from kvjax.cache.cache import Cache, Tail
from kvjax.cache.select import ids
from kvjax.cache.slots import pack_pos, unpack_pos
from kvjax.config import CacheRecipe, ModelConfig, Store
from kvjax.errors import InputError
from kvjax.inputs import rows
from kvjax.model import observe
from kvjax.observing import watcher
from kvjax.shapes import Array, Int

WORKING = CacheRecipe("finch", store=Store(positions="read"))
"""The working cache holds keys before RoPE: they are turned on read, and once at the end."""


def kept(recipe: CacheRecipe, length: int, chunk: int) -> np.ndarray:
    """Entries per kv head after each chunk of a text of `length` tokens.

    The last number is what the recipe keeps of the whole, and the others are in proportion.
    count="paper" is the paper's arithmetic: with cf = ceil(length / what is kept), a chunk of m
    tokens adds floor(m / cf). (Its target counts the question in, which is not kept here.)
    """
    each = sizes.kept(recipe, length)
    stops = np.minimum(np.arange(chunk, length + chunk, chunk), length)
    if recipe.choice is not None and recipe.choice.count == "paper":
        made = np.cumsum(np.diff(stops, prepend=0) // -(-length // each))
    else:
        made = (2 * each * stops + length) // (2 * length)
    made[-1] = max(made[-1], 1)
    return made.astype(np.int32)


def read(
    model: Any,
    tokens: np.ndarray,
    lengths: np.ndarray,
    recipe: CacheRecipe,
    question: Any,
    max_length: int,
    chunk: int,
    logits: str,
    tables: Any = None,
) -> tuple[Any, Cache]:
    """`prefill` with a finch recipe and a question: `(logits, cache)`.

    The cache holds what is kept of the text and not the question, which the caller feeds after it,
    at positions that follow the kept tokens. logits [b w] or [b t w] are those of the chunks, each
    seeing what was kept before it. Rows may differ in length: each keeps its own share.
    Source: Corallo and Papotti 2024, arXiv:2408.00167, section 3 and its code; the order of the
    steps is theirs, a chunk size chosen by itself ("auto") is left out.
    """
    if logits not in ("last", "all", "none"):
        raise InputError(f"logits must be 'last', 'all' or 'none', got {logits!r}")
    asked, asks = _checked(model.config, recipe, question, len(tokens), max_length)
    counts = [kept(recipe, int(n), chunk) for n in lengths]
    before = max(int(c[:-1].max(initial=0)) for c in counts)  # kept when a chunk is read
    longest = before + min(chunk, tokens.shape[1]) + int(asks.max())
    if longest > model.config.context:
        raise InputError(
            f"{recipe.name} keeps {before} tokens and reads a chunk of {chunk} and the question "
            f"after them: {longest} in all, and the model's context is {model.config.context}; "
            "lower keep or chunk"
        )
    # by what is kept in the end: the same for texts of other lengths if the recipe gives slots
    slots = sizes.bucket(max(int(c[-1]) for c in counts)) + chunk
    b = len(tokens)
    cache = init.init_cache(model.config, CacheRecipe(), b, slots).replace(recipe=WORKING)
    shape = (model.config.layers, b, model.config.kv_heads, slots)
    work, outs, last = (cache, jnp.zeros(shape, jnp.int32)), [], None
    for i, first in enumerate(range(0, tokens.shape[1], chunk)):
        piece = tokens[:, first : first + chunk]
        short = piece.shape[1]
        piece = np.pad(piece, ((0, 0), (0, chunk - short)))
        count = np.clip(lengths - first, 0, chunk).astype(np.int32)
        want = np.array([c[min(i, len(c) - 1)] for c in counts], np.int32)
        out, work = _chunk(model.params, work, piece, count, asked, asks, want, jnp.int32(first),
                           model.config, recipe, logits)  # fmt: skip
        if logits == "all":
            outs.append(out[:, :short])
        elif logits == "last":
            ends = (lengths > first) & (lengths <= first + chunk)
            last = out if last is None else jnp.where(ends[:, None], out, last)
    room = sizes.sizes(model.config, recipe, lengths, max_length - int(lengths.min()))
    made = _finished(*work, jnp.asarray(lengths), model.config, recipe, room, max_length, tables)
    return (jnp.concatenate(outs, axis=1) if outs else last), made


def _checked(config: ModelConfig, recipe: CacheRecipe, question, batch: int, max_length: int):
    """The question's ids, padded to eights, and lengths; refuses what cannot work."""
    if question is None:
        raise InputError(
            f"{recipe.name} reads the text together with the question: pass question=, ids [b, q]"
        )
    init.check(config, recipe, max_length)
    assert recipe.store is not None and recipe.choice is not None
    if any(kind.window is not None for kind in (config.kinds[i] for i in config.pattern)):
        raise InputError(
            f"{recipe.name} renumbers what is kept while it reads, which sliding-window layers "
            "cannot follow: condense an exact cache with question= instead"
        )
    if recipe.when != "after" or recipe.store.positions != "rerot":
        raise InputError(
            f"{recipe.name} renumbers what is kept: it needs when='after' and positions='rerot', "
            f"got {recipe.when!r} and {recipe.store.positions!r}"
        )
    if budgets.build(recipe.choice.budget).pooled or recipe.choice.budget.name != "uniform":
        raise InputError(f"{recipe.name} keeps equally many entries in every head and layer")
    asked, asks = rows(config, question)
    if len(asked) != batch:
        raise InputError(f"tokens have {batch} rows and the question has {len(asked)}")
    return np.pad(asked, ((0, 0), (0, -asked.shape[1] % 8))), asks


@functools.partial(jax.jit, static_argnames=("config", "recipe", "logits"), donate_argnames="work")
def _chunk(
    params,
    work: tuple[Cache, Int[Array, "l b n s"]],
    piece: Int[Array, "b m"],
    count: Int[Array, "b"],
    asked: Int[Array, "b q"],
    asks: Int[Array, "b"],
    want: Int[Array, "b"],
    first: Int[Array, ""],
    config: ModelConfig,
    recipe: CacheRecipe,
    logits: str,
):
    """Reads a chunk into the working cache, looks from the question, keeps want[b] entries.

    work: the cache, whose tokens are numbered by rank, and the arrival of each of its slots.
    """
    cache, arrival = work
    held = cache.seen
    out, new = observe(params, config, cache, piece, None, count=count, logits=logits)
    cache = ops.absorb_long(cache, new, count)
    slot = jnp.arange(arrival.shape[-1], dtype=jnp.int32)
    fresh = first + slot - held[:, None]
    arrival = jnp.where(slot < held[:, None, None], arrival, fresh[:, None])
    _, looked = observe(params, config, cache, asked, watcher(recipe), count=asks, logits="none")
    window = jnp.minimum(recipe.window, want)
    keep, _ = condense.chosen(cache, looked.evidence, want, want - window, config, recipe)
    newest = (slot >= (cache.seen - window)[:, None]) & (slot < cache.seen[:, None])
    groups, where = [], []
    for group, mask in zip(cache.groups, keep, strict=True):
        mine = arrival[group.start : group.stop]
        tail, at = _closed_up(group.tail, mine, mask | newest[:, None])
        groups.append(group.replace(tail=tail))
        where.append(at)
    # a row that had ended keeps all that it held
    cache = cache.replace(groups=tuple(groups), seen=want, clock=want)
    return out, (cache, jnp.concatenate(where))


def _closed_up(tail: Tail, arrival, keep):
    """The kept entries (mask [l b n s]) of a tail in its first slots, and their arrivals.

    What is past them is as it was, and no query sees it.
    """
    at = jax.lax.map(lambda mask: ids(mask, mask.shape[-1])[0], keep)
    take = lambda x: jnp.take_along_axis(x, at[..., None], axis=3)  # noqa: E731
    return Tail(take(tail.k), take(tail.v)), jnp.take_along_axis(arrival, at, axis=3)


@functools.partial(jax.jit, static_argnames=("config", "recipe", "room", "max_length"))
def _finished(
    cache: Cache,
    arrival,
    lengths: Int[Array, "b"],
    config: ModelConfig,
    recipe: CacheRecipe,
    room: sizes.Sizes,
    max_length: int,
    tables,
) -> Cache:
    """The condensed cache of the recipe: keys turned to their ranks, arrivals those of the text."""
    count = cache.seen
    rank = jnp.arange(arrival.shape[-1], dtype=jnp.int32)
    keep, groups = [], []
    for group in cache.groups:
        rope = config.kinds[config.pattern[group.start]].rope
        k = jax.lax.map(lambda k, r=rope: positions.turn(k, rank, r), group.tail.k)
        groups.append(group.replace(tail=Tail(k, group.tail.v)))
        body = rank < (count - jnp.minimum(recipe.window, count))[:, None]  # [b s]
        keep.append(jnp.broadcast_to(body[None, :, None], k.shape[:4]))
    exact = cache.replace(groups=tuple(groups), max_length=max_length)
    made = condense.packed(exact, tuple(keep), count, config, recipe, room, tables)
    return _renumbered(made, arrival, lengths - count, lengths)


def _renumbered(made: Cache, arrival, later, lengths) -> Cache:
    """The cache with arrivals of the text in place of ranks; the window came last: later[b] on."""
    groups = []
    for group in made.groups:
        mine = arrival[group.start : group.stop]
        bodies = []
        for body in group.bodies:
            if body.pos is None:  # for the tokens to come
                bodies.append(body.replace(base=body.base + later))
                continue
            rank = unpack_pos(body.pos)
            flat = jnp.maximum(rank, 0).reshape(*rank.shape[:3], -1)
            pos = jnp.take_along_axis(mine, flat, axis=3).reshape(rank.shape)
            pos = pack_pos(jnp.where(rank < 0, -1, pos), body.pos.dtype)
            bodies.append(body.replace(pos=pos))
        capacity = group.tail.capacity
        at = (jnp.arange(capacity) - later[:, None]) % capacity
        tail = jax.tree.map(
            lambda x, at=at: jnp.take_along_axis(x, at[None, :, None, :, None], 3), group.tail
        )
        groups.append(group.replace(tail=tail, bodies=tuple(bodies)))
    return made.replace(groups=tuple(groups), seen=lengths, high=lengths, edge=made.edge + later)
