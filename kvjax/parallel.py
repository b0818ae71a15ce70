"""ParallelComp: chunks of a long document read apart, the best kept, shrunk, and seen together.

Every chunk is read from position 0, so that none exceeds the length a model was trained on. Chunks
under which the query is most likely stay; each keeps what the end of the query attends to.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange, reduce

from kvjax import struct
from kvjax.api import Model, _mesh, _placed, prefill
from kvjax.attention import mass
from kvjax.cache import condense, init, sizes
from kvjax.cache.batch import select
from kvjax.cache.cache import Cache
from kvjax.cache.select import top
from kvjax.cache.slots import unpack_pos
from kvjax.codecs import pair
from kvjax.config import CacheRecipe, Choice, ModelConfig, Spec, Store
from kvjax.errors import InputError, unknown, whole
from kvjax.evidence import Looked
from kvjax.inputs import checked, number, rows
from kvjax.model import observe

ZONES = ("sink", "recent", "middle", "all")


@dataclass(frozen=True)
class Stats:
    """What `encode` did."""

    nll: np.ndarray  # [chunks] mean negative log-likelihood of the query's tokens, in nats
    kept: tuple[int, ...]  # the chunks of the cache, in the order of the document
    lengths: tuple[int, ...]  # their tokens, with the token put before them
    entries: np.ndarray  # [layers] entries per kv head that the cache holds


def encode(
    model: Model,
    document: Any,
    query: Any,
    *,
    chunk: int,
    keep_chunks: int = 3,
    capacity: int = 512,
    recent: int = 8,
    kernel: int = 7,
    threshold: float = 0.1,
    zone: str | None = None,
    layers: tuple[int, int] | None = None,
    ends: int = 100,
    later: int = 512,
    bos: int | None = None,
    together: int = 4,
) -> tuple[Cache, Stats]:
    """A cache of one row for a document of any length, for the query that is read next.

    document and query are ids. The document is cut into chunks of `chunk` tokens, read `together`
    at a time, each behind `bos` (None: the tokenizer's, if it puts one before texts); the
    `keep_chunks` stay under which the query has the lowest mean negative log-likelihood. Of each,
    every kv head keeps the `capacity` entries (bos among them) that the last `recent` tokens of
    chunk and query attend to most, max-pooled over `kernel`. zone ("sink": the first `ends` tokens
    of a chunk, "recent": its last, "middle", "all") also drops what the last token alone attends to
    with more than `threshold`, in layers layers[0] up to, not with, layers[1] (default all). All
    heads of a layer lose equally many: those with fewer lose what they attend to least.

    The query is not in the cache: `extend` it, from the position after the longest chunk. There is
    room for `later` tokens. Held at once: keep_chunks shrunk chunks and `together` whole ones.
    Source: ParallelComp 2025, arXiv:2502.14317, and its code. Fill-ins, so no reproduction: weights
    are averaged over the query heads of a kv head (the code stores every query head); all tokens of
    the query count in its likelihood (the code's n - 1 lack the first); capacity never evicts bos,
    which goes in all heads of a layer if in one it exceeds the threshold; biased tokens are dropped
    chunk by chunk, not after joining.
    """
    numbers = dict(chunk=chunk, keep_chunks=keep_chunks, later=later, together=together,
                   capacity=capacity, recent=recent, kernel=kernel, ends=ends)  # fmt: skip
    _ = [whole(name, value) for name, value in numbers.items()]
    plan = _planned(model, capacity, recent, kernel, threshold, zone, layers, ends, bos)
    text, asked = _ids(model, "document", document), _ids(model, "query", query)
    width = chunk + plan.first
    if width + len(asked) > model.config.context:
        raise InputError(
            f"chunks of {width} tokens and {len(asked)} of the query are more than the model's "
            f"context of {model.config.context}; lower chunk"
        )
    if plan.first and text[0] == plan.bos:
        text = text[1:]
    nll, pieces = _best(model, text, asked, chunk, together, keep_chunks, plan)
    made = joined(model, list(pieces.values()), later=later, first=plan.first)
    held = np.concatenate([np.asarray((unpack_pos(g.bodies[0].pos) >= 0).sum((1, 2, 3, 4)))
                           for g in made.groups]) // model.config.kv_heads  # fmt: skip
    lengths = tuple(int(p.seen[0]) for p in pieces.values())
    return made, Stats(nll, tuple(pieces), lengths, held)


def _best(model, text, asked, chunk, together, keep_chunks, plan):
    """(nll of all chunks, the shrunk caches of the best by number), `together` chunks at a time."""
    total = -(-len(text) // chunk)
    nll, pieces = np.zeros(total), {}
    for start in range(0, total, together):
        batch = range(start, min(start + together, total))
        tokens, lengths = _cut(text, batch, chunk, together, plan)
        found, cache, evidence = _read(model, tokens, lengths, asked, plan)
        nll[batch.start : batch.stop] = found[: len(batch)]
        best = sorted((*pieces, *batch), key=lambda i: (nll[i], i))[:keep_chunks]
        new = [i for i in batch if i in best]
        if new:
            small = _shrunk(model, cache, evidence, lengths, plan)
            pieces |= {i: select(small, jnp.asarray([i - start])) for i in new}
        pieces = {i: pieces[i] for i in sorted(best)}
    return nll, pieces


@dataclass(frozen=True)
class Plan:
    """The settings of `encode`, checked."""

    recipe: CacheRecipe
    recent: int
    threshold: float
    zone: str | None
    layers: tuple[int, int]
    ends: int
    bos: int | None

    @property
    def first(self) -> int:
        """Tokens put before every chunk."""
        return int(self.bos is not None)


def _planned(model, capacity, recent, kernel, threshold, zone, layers, ends, bos) -> Plan:
    config, tokenizer = model.config, model.tokenizer
    if zone is not None and zone not in ZONES:
        raise unknown("value of zone", zone, ZONES)
    low, high = (0, config.layers) if layers is None else layers
    if not 0 <= low < high <= config.layers:
        raise InputError(f"layers {low} up to {high} do not lie within the {config.layers} layers")
    if any(config.kinds[i].window is not None for i in config.pattern):
        raise InputError("chunks that share positions need layers that see everything")
    if bos is None and tokenizer is not None and tokenizer.add_bos:
        bos = tokenizer.bos
    options = (("kernel", kernel), ("pool", "max"))
    choice = Choice(Spec("window_attention", options), slots=capacity, sinks=int(bos is not None))
    recipe = CacheRecipe("parallel_comp", "after", store=Store(page=32), choice=choice)
    return Plan(recipe, recent, number("threshold", threshold, 0.0), zone, (low, high), ends, bos)


def _ids(model, name, value) -> np.ndarray:
    """A row of ids, given plainly or as a batch of one."""
    made = np.asarray(value)
    tokens, _ = rows(model.config, made[None] if made.ndim == 1 else made)
    if len(tokens) != 1:
        raise InputError(f"{name} must be one row of ids, got {len(tokens)}")
    return tokens[0]


def _cut(text, batch, chunk: int, together: int, plan: Plan):
    """Tokens [together, width] and lengths of the chunks `batch`; missing rows repeat the last."""
    tokens = np.zeros((together, plan.first + chunk), np.int32)
    lengths = np.zeros(together, np.int32)
    for row in range(together):
        i = min(batch.start + row, batch.stop - 1)
        piece = text[i * chunk : (i + 1) * chunk]
        if plan.bos is not None:
            tokens[row, 0] = plan.bos
        lengths[row] = plan.first + len(piece)
        tokens[row, plan.first : lengths[row]] = piece
    return tokens, lengths


@struct.dataclass
class Ends:
    """Attention from the last `recent` of the new queries, {"sums": [b h c]}; and from the last one
    alone, "last", if it is wanted."""

    recent: int = struct.static(8)
    last: bool = struct.static(False)

    def __call__(self, looked: Looked):
        made = {"sums": self._from(looked, self.recent)}
        return made | ({"last": self._from(looked, 1)} if self.last else {})

    def _from(self, looked, number):
        query, step = looked.query, jnp.arange(looked.query.pos.shape[1])
        count = (query.pos >= 0).sum(axis=1, keepdims=True)
        asking = query.replace(pos=jnp.where(step >= count - number, query.pos, -1))
        before, _ = mass(asking, looked.k, looked.pos, looked.lse)
        own, _ = mass(asking, looked.here, query.pos, looked.lse)
        return before + looked.placed(own)


def _read(model, tokens, lengths, asked, plan: Plan):
    """Reads chunks, each alone, and the query after each: (nll [b], exact cache, evidence)."""
    _, cache = prefill(model, tokens, max_length=tokens.shape[1], lengths=lengths, logits="none")
    again = np.minimum(max(plan.recent - len(asked), 1), lengths)  # tokens of the chunk read again
    follow = np.zeros((len(tokens), max(plan.recent - len(asked), 1) + len(asked)), np.int32)
    for row, (length, n) in enumerate(zip(lengths, again, strict=True)):
        follow[row, : n + len(asked)] = [*tokens[row, length - n : length], *asked]
    watch = Ends(plan.recent, plan.zone is not None)
    with _mesh(model):
        nll, evidence = _ask(model.params, cache, follow, again, len(asked), model.config, watch)
    return np.asarray(nll), cache, evidence


@functools.partial(jax.jit, static_argnames=("size", "config"))
def _ask(params, cache, follow, again, size: int, config: ModelConfig, watch):
    """follow [b t]: the last again[b] tokens of a chunk, the query's `size`, and padding."""
    view = cache.replace(seen=cache.seen - again, clock=cache.clock - again)
    out, new = observe(params, config, view, follow, watch, count=again + size)
    assert out is not None
    at = (again - 1)[:, None] + jnp.arange(size)  # of the logits that foretell the query
    said = jnp.take_along_axis(jax.nn.log_softmax(out, axis=-1), at[..., None], axis=1)
    want = jnp.take_along_axis(follow, at + 1, axis=1)
    return -jnp.take_along_axis(said, want[..., None], axis=2).mean(axis=(1, 2)), new.evidence


def _shrunk(model, cache, evidence, lengths, plan: Plan) -> Cache:
    """The chunks with what each keeps, condensed."""
    config, recipe = model.config, plan.recipe
    counts, wants = sizes.counts(recipe, lengths), sizes.wants(config, recipe, lengths)
    room = sizes.sizes(config, recipe, [cache.max_length], 1)
    with _mesh(model):
        keep, _ = condense.chosen(cache, evidence, counts, wants, config, recipe)
        if plan.zone is not None:
            keep = _unbiased(keep, evidence, cache, plan)
        return condense.packed(cache, keep, jnp.asarray(counts), config, recipe, room)


@functools.partial(jax.jit, static_argnames="plan")
def _unbiased(keep, evidence, cache: Cache, plan: Plan):
    """Masks without the tokens of the zone that draw too much attention, in the chosen layers."""
    out = []
    for group, mask, seen in zip(cache.groups, keep, evidence, strict=True):
        layer = jnp.arange(group.start, group.stop)[:, None, None, None]
        mine = (layer >= plan.layers[0]) & (layer < plan.layers[1])
        out.append(jnp.where(mine, _less(mask, seen["last"], cache.seen, plan), mask))
    return tuple(out)


def _less(keep, last, length, plan: Plan):
    """keep [l b n s] without biased tokens: equally many fewer in every head of a layer.

    last: weights [l b h s] of the last token, averaged over the query heads of a kv head.
    """
    weight = reduce(last, "l b (n g) s -> l b n s", "mean", n=keep.shape[2])
    slot = jnp.arange(keep.shape[3], dtype=jnp.int32)
    start, stop = slot < plan.ends, slot >= length[:, None, None] - plan.ends
    zones = {"sink": start, "recent": stop, "middle": ~(start | stop), "all": slot >= 0}
    biased = keep & zones[plan.zone or "all"] & (weight > plan.threshold)
    before = slot < plan.first  # one token of the join, alike in all chunks: not to be made up for
    gone = (biased & before).any(axis=(2, 3), keepdims=True)
    biased &= ~before
    most = biased.sum(axis=-1).max(axis=2, keepdims=True)
    rest = keep & ~before
    pos = jnp.broadcast_to(slot, keep.shape)
    none = jnp.zeros(keep.shape, bool)
    return top(weight, rest & ~biased, none, pos, rest.sum(-1) - most) | (keep & before & ~gone)


def joined(model: Model, pieces: list[Cache], *, later: int, first: int = 0) -> Cache:
    """Condensed pieces of one recipe as one context, each at the positions it was read at.

    The next token follows the longest. Of all pieces but the first, the first `first` tokens are
    dropped. Only what is kept is held, and room for `later` tokens.
    """
    groups = [[p.groups[i].bodies[0] for p in pieces] for i in range(len(pieces[0].groups))]
    most = 0
    for bodies in groups:
        held = sum((unpack_pos(b.pos) >= first * (j > 0)).sum((3, 4)) for j, b in enumerate(bodies))
        most = max(most, int(jnp.max(jnp.asarray(held))))
    recipe, length = pieces[0].recipe, sum(p.max_length for p in pieces) + later
    room = sizes.Sizes(later, -(-sizes.bucket(max(most, 1)) // groups[0][0].page))
    seen = jnp.stack([p.seen for p in pieces])
    with _mesh(model):
        made = _joined(groups, seen, most, model.config, recipe, room, length, first)
    return checked(_placed(model, made))


@functools.partial(jax.jit, static_argnames=("config", "recipe", "room", "length", "first"))
def _joined(groups, seen, most, config, recipe, room: sizes.Sizes, length: int, first: int):
    """seen [pieces 1]: tokens of each; most: entries per head in all; length: the max_length."""
    starts, total, made = jnp.cumsum(seen, axis=0) - seen, seen.sum(axis=0), []
    for bodies, run in zip(groups, config.runs(), strict=True):
        new = init.layers(config, recipe, 1, length, room, *run)
        body, codec = new.bodies[0], pair(recipe.store)
        flat = lambda x: rearrange(x, "l b n p s ... -> l b n (p s) ...")  # noqa: E731
        parts = []
        for j, old in enumerate(bodies):
            pos = flat(unpack_pos(old.pos))
            pos = jnp.where(pos >= first * (j > 0), pos + starts[j], -1)
            parts.append((*map(flat, codec.read(old.codes, jnp.dtype(config.dtype))), pos))
        k, v, pos = (jnp.concatenate(x, axis=3) for x in zip(*parts, strict=True))
        pack = lambda x, b=body, c=codec: condense.gather(x[2] >= 0, b, x[0], x[1], x[2], c, None)  # noqa: E731
        codes, pos = jax.lax.map(pack, (k, v, pos))
        made.append(new.replace(bodies=(body.replace(codes=codes, pos=pos),)))
    held, none = jnp.full_like(total, most), jnp.zeros_like(total)
    return Cache(tuple(made), total, seen.max(axis=0), total, total, held, none,
                 recipe=recipe, max_length=length)  # fmt: skip
