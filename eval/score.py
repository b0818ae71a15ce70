"""What a cache says about the answers of an item: measured, not yet graded."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.api import Model, tables_of
from kvjax.cache.cache import Cache
from kvjax.eval.items import Ask, Item
from kvjax.model import look

OPTIONS = 16  # options are padded to a multiple, so that few shapes compile


@dataclass
class Heard:
    """What was measured of one ask; every peer gives the same."""

    lp: list[float]  # log-probability of each token of the answer, in nats, teacher-forced
    best: list[bool]  # whether that token is the likeliest
    options: list[float] = field(default_factory=list)  # log-probability of each one's first token
    made: list[int] = field(default_factory=list)  # generated ids, greedy, without the stop token
    kl: list[float] | None = None  # KL(exact || this) at each token of the answer; None for exact
    top1: list[bool] | None = None  # whether exact and this have the same likeliest token there


def width(count: int) -> int:
    """A length rounded up, so that asks of many lengths share few compilations."""
    step = max(32, 1 << max((count - 1).bit_length() - 4, 0))
    return -(-count // step) * step


def listen(
    model: Model, cache: Cache, item: Item, truths: list | None = None
) -> tuple[list[Heard], list[jax.Array]]:
    """Asks everything of an item: (what was heard, log-probabilities [t w] of each answer).

    The cache is read and not changed, but for texts that come `before` an ask, which a copy takes.
    truths are the log-probabilities that the exact cache gave, for the divergence from them.
    """
    heard, tables = [], []
    for i, ask in enumerate(item.asks):
        if ask.before:
            before = np.asarray([ask.before], np.int32)
            cache = kvjax.extend(model, before, kvjax.fork(cache), logits="none")[1]
        one, table = hear(model, cache, ask, None if truths is None else truths[i])
        heard.append(one)
        tables.append(table)
    return heard, tables


def hear(model: Model, cache: Cache, ask: Ask, truth: Any = None) -> tuple[Heard, jax.Array]:
    """One ask of a cache."""
    ids = [*ask.question, *ask.answer]
    size = len(ids)
    tokens = np.zeros((1, width(size)), np.int32)
    tokens[0, :size] = ids
    first = [option[0] for option in ask.options]
    options = np.zeros(-(-len(first) // OPTIONS) * OPTIONS, np.int32)
    options[: len(first)] = first
    start = len(ask.question) - 1
    lp, best, others, table, kl, top1 = _hear(
        model.params, model.config, cache, tokens, np.asarray([size], np.int32),
        np.int32(start), options, truth, tables_of(model, cache.recipe),
    )  # fmt: skip
    count = len(ask.answer)
    out = Heard(
        np.asarray(lp)[:count].tolist(), np.asarray(best)[:count].tolist(),
        np.asarray(others)[: len(first)].tolist(),
    )  # fmt: skip
    if truth is not None:
        out.kl, out.top1 = np.asarray(kl)[:count].tolist(), np.asarray(top1)[:count].tolist()
    if ask.max_new_tokens:
        # one prompt gives one row of tokens
        out.made = kvjax.generate(  # pyright: ignore[reportAttributeAccessIssue]
            model, list(ask.question), cache=kvjax.fork(cache), max_new_tokens=ask.max_new_tokens
        ).tokens
    return out, table


@functools.partial(jax.jit, static_argnames="config")
def _hear(params, config, cache, tokens, count, start, options, truth, tables):
    logits, _ = look(params, config, cache, tokens, count=count, tables=tables)
    # row j predicts token j of the answer; rows past its end are padding
    rows = jnp.roll(logits[0].astype(jnp.float32), -start, axis=0)
    wanted = jnp.roll(tokens[0], -start - 1)
    table = jax.nn.log_softmax(rows, axis=-1)  # [t w]
    lp = jnp.take_along_axis(table, wanted[:, None], axis=1)[:, 0]
    likeliest = table.argmax(-1)
    kl = top1 = None
    if truth is not None:
        kl = (jnp.exp(truth) * (truth - table)).sum(-1)
        top1 = truth.argmax(-1) == likeliest
    return lp, likeliest == wanted, table[0, options], table, kl, top1
