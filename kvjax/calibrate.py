"""Labels of heads, found once for a model: which ones look far back, whatever the text.

labels = calibrate.razor(model)
model = labels.on(model, "razor")
kvjax.generate(model, text, kvjax.recipe("razor"))
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from einops import rearrange

from kvjax import struct
from kvjax.api import Model, _mesh, _placed, _read, prefill
from kvjax.cache import recipes, sizes
from kvjax.cache.init import init_cache
from kvjax.config import CacheRecipe
from kvjax.data import moby_dick
from kvjax.errors import InputError, whole
from kvjax.evidence import Looked
from kvjax.inputs import number
from kvjax.observing import gather

REPEATS = 4
"""Times that the random block is read: the first time nothing can be looked up."""


@dataclass(frozen=True)
class HeadLabels:
    """A number for each kv head of each layer [l n], 0 in sliding-window layers, which keep all."""

    label: np.ndarray  # what recipes read
    scores: dict[str, np.ndarray]  # by name [l n]: what the labels were made from

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, kv head) of the labels above 0.5."""
        return [(int(a), int(b)) for a, b in np.argwhere(self.label > 0.5)]

    def table(self) -> dict[str, Any]:
        """The labels as the scorer `labels` reads them."""
        return {"scorer": {"label": jnp.asarray(self.label, jnp.float32)}}

    def on(self, model: Model, name: str) -> Model:
        """The model with these labels for the recipe `name`."""
        return dataclasses.replace(model, tables=model.tables | {name: self.table()})


@struct.dataclass
class Copying:
    """Attention of each query head to the same token one block earlier, and to the one after it.

    {"echo": [b h], "induction": [b h]}, summed over the queries from arrival `first + block` on.
    Of each query two keys are looked at. For layers that see everything; elsewhere meaningless.
    """

    block: int = struct.static(1)
    first: int = struct.static(0)  # arrival of the first token of the first block

    def __call__(self, looked: Looked):
        query, slots = looked.query, looked.k.shape[2]
        n, start = looked.k.shape[1], query.pos[:, :1]
        keys = jnp.concatenate([looked.k, looked.here], axis=2)  # [b n c+t d]
        q = rearrange(query.q, "b t (n g) d -> b n g t d", n=n).astype(jnp.float32)
        lse = rearrange(looked.lse, "b t (n g) -> b n g t", n=n)
        asked = query.pos >= self.first + self.block  # [b t]

        def weight(back):
            far = query.pos - back
            at = jnp.where(far >= start, slots + far - start, far)
            at = jnp.clip(at, 0, keys.shape[2] - 1)[:, None, :, None]
            k = jnp.take_along_axis(keys, at, axis=2).astype(jnp.float32)  # [b n t d]
            s = jnp.einsum("bngtd,bntd->bngt", q, k) * query.scale
            p = jnp.where(asked[:, None, None], jnp.exp(s - lse), 0.0)
            return rearrange(p.sum(axis=-1), "b n g -> b (n g)")

        return {"echo": weight(self.block), "induction": weight(self.block - 1)}

    def merge(self, one, two):
        return {name: one[name] + two[name] for name in one}


def razor(
    model: Model, *, block: int | None = None, induction: float = 0.14, echo: float = 0.01,
    seed: int = 0, progress: Callable[[int, int], None] | None = None,
) -> HeadLabels:  # fmt: skip
    """Labels 1 for heads that copy: the best by induction score, and the best by echo score.

    The model reads a block of random tokens REPEATS times. A query's echo is its attention to its
    own token one block earlier, its induction to the token after that one; of the blocks after the
    first the mean is taken, of the query heads of a kv head the maximum. ceil(induction * heads)
    and ceil(echo * heads) are labelled, over all layers together; ties go to the lower number.
    block: default min(2500, what a fifth of the context holds). progress(done, total) in tokens.
    Source: Tang et al. 2024, arXiv:2407.15891 (RazorAttention), section 3; the block and the two
    shares are those of the vendor's code, not re-read in the paper.
    """
    block = min(2500, max(model.config.context // 5, 2)) if block is None else block
    ids, first = copies(model, whole("block", block, 2), seed)
    shares = [
        ("induction", number("induction", induction, 0.0, 1.0)),
        ("echo", number("echo", echo, 0.0, 1.0)),
    ]
    sums = _along(model, ids, Copying(block, first), progress)
    mean = {name: x / (block * (REPEATS - 1)) for name, x in sums.items()}
    group = model.config.heads // model.config.kv_heads
    scores = {k: rearrange(x, "l (n g) -> l n g", g=group).max(-1) for k, x in mean.items()}
    full = sizes.full_layers(model.config)
    label = np.zeros_like(scores["echo"])
    for name, share in shares:
        label[full] = np.maximum(label[full], best(scores[name][full], share))
    return HeadLabels(label, {name: _only(x, full) for name, x in scores.items()})


def best(scores: np.ndarray, share: float) -> np.ndarray:
    """1 for the ceil(share * scores.size) highest, ties to the lower number; 0 for the others."""
    order = np.argsort(-scores.reshape(-1), kind="stable")
    label = np.zeros(scores.size, np.float32)
    label[order[: math.ceil(share * scores.size - 1e-9)]] = 1.0
    return label.reshape(scores.shape)


def _only(scores, layers):
    """Scores of these layers; 0 in the others."""
    out = np.zeros_like(scores)
    out[layers] = scores[layers]
    return out


def copies(model: Model, block: int, seed: int) -> tuple[np.ndarray, int]:
    """A begin token (where the model has one) and REPEATS times a random block: (ids [1 t], the
    arrival of the block's first token). No control token is drawn."""
    tokenizer, words = model.tokenizer, np.arange(model.config.vocab)
    begin = []
    if tokenizer is not None:
        control = list(tokenizer.vocabulary.control.values())
        words = np.setdiff1d(words[: tokenizer.vocab_size], control)
        begin = [] if tokenizer.bos is None else [tokenizer.bos]
    drawn = np.random.default_rng(seed).choice(words, block)
    ids = np.concatenate([np.asarray(begin, np.int64), np.tile(drawn, REPEATS)])
    if len(ids) > model.config.context:
        raise InputError(
            f"{REPEATS} blocks of {block} tokens are {len(ids)} and the model's context is "
            f"{model.config.context}; use block={(model.config.context - 1) // REPEATS}"
        )
    return ids[None].astype(np.int32), len(begin)


def _along(model, ids, watch, progress):
    """What an observer has seen of a text [1 t] read from its start: leaves [l h], summed."""
    recipe, length = CacheRecipe(), ids.shape[1]
    width, seen = min(recipe.chunk, length), None
    cache = _placed(model, init_cache(model.config, recipe, 1, length))
    for start in range(0, length, width):
        piece = ids[:, start : start + width]
        count = np.array([piece.shape[1]], np.int32)
        piece = np.pad(piece, ((0, 0), (0, width - piece.shape[1])))
        with _mesh(model):
            _, cache, seen = _read(
                model.params, model.config, cache, piece, count, "none", None, watch, seen
            )
        if progress is not None:
            progress(int(start + count[0]), length)
    assert seen is not None
    return {name: np.concatenate([np.asarray(g[name])[:, 0] for g in seen]) for name in seen[0]}


def kvzip_heads(
    model: Model, texts: Any = None, *, length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HeadLabels:  # fmt: skip
    """Labels heads by the most attention that any token of a sample gets while it is repeated.

    One pass of KVzip's scores over each of `texts` (strings, or token ids [t]; cut to `length`, by
    default what half the context holds, at most 4,096); of several the maximum. The first tokens,
    which the recipe keeps as sinks, are not looked at: every head attends to them. The default text
    is the beginning of Moby Dick, which ships with kvjax; the paper takes a sample of SCBench's
    English QA (and of its code, for code), so labels made without texts are no reproduction.
    progress(done, total) in texts.
    Source: Kim et al. 2025, arXiv:2505.23416 (KVzip), section 4.3, and its code (utils/head_score).
    """
    length = min(4096, max(model.config.context // 2, 16)) if length is None else length
    choice = recipes.recipe("kvzip_heads").choice
    assert choice is not None
    sinks = choice.sinks
    recipe = recipes.recipe("kvzip", sinks=sinks, first=sinks)
    texts = [moby_dick()[: 8 * whole("length", length, sinks + 1)]] if texts is None else texts
    if isinstance(texts, str) or not len(texts):
        raise InputError(f"texts must be a list of at least one text, got {texts!r:.60}")
    label = np.zeros((model.config.layers, model.config.kv_heads), np.float32)
    for i, text in enumerate(texts):
        label = np.maximum(label, _needed(model, recipe, _ids(model, text)[:length]))
        if progress is not None:
            progress(i + 1, len(texts))
    return HeadLabels(label, {"reconstruction": label})


def _ids(model, text) -> np.ndarray:
    if not isinstance(text, str):
        return np.asarray(text)
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer: give token ids instead of texts")
    return np.asarray(model.tokenizer.encode(text), np.int32)


def _needed(model, recipe, ids) -> np.ndarray:
    """The highest score of each head's tokens [l n] in one text; 0 in sliding-window layers."""
    if len(ids) <= recipe.choice.sinks:
        raise InputError(
            f"a text of {len(ids)} tokens has nothing after the first {recipe.choice.sinks}"
        )
    _, cache = prefill(model, ids[None], max_length=len(ids), logits="none")
    with _mesh(model):
        counts = sizes.counts(recipe, [len(ids)])
        seen: Any = gather(model, cache, recipe, counts, ids[None], None)
    label = np.concatenate([np.asarray(g["maxima"])[:, 0].max(axis=-1) for g in seen])
    return _only(label, sizes.full_layers(model.config))
