"""Decoding: one step, and the whole loop on the device."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache, takes_more
from kvjax.cache.ops import append, compress
from kvjax.cache.slots import Slots
from kvjax.config import ModelConfig
from kvjax.errors import InputError
from kvjax.model import look
from kvjax.params import Params
from kvjax.sampling import sample
from kvjax.shapes import Array, Int


def step(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    tokens: Int[Array, "b t"],
    *,
    tables: Any = None,
) -> tuple[Any, Cache]:
    """Reads tokens and remembers them: `(logits [b t w], cache)`; `look` then `append`.

    The caller compresses at least every `recipe.stride` tokens.
    """
    logits, new = look(params, config, cache, tokens, tables=tables)
    return logits, append(cache, new)


def decode(
    params: Params,
    config: ModelConfig,
    cache: Cache,
    tokens: Int[Array, "b"],
    key: Array,
    *,
    steps: int,
    tables: Any = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: tuple[int, ...] | None = None,
) -> tuple[Int[Array, "b steps"], Cache]:
    """Generates `steps` tokens a row: `(tokens [b steps], cache)`.

    tokens are the last ones, not yet in the cache; the last one generated is not in it either. A
    row that has given a token of `stop` gives -1 from then on and remembers nothing more.
    Deterministic in `key`; temperature 0 is greedy.
    """
    out, _, cache = generate_some(
        params, config, cache, tokens, key, steps=steps, tables=tables,
        temperature=temperature, top_p=top_p, stop=stop,
    )  # fmt: skip
    return out, cache


def generate_some(
    params, config, cache, tokens, key, *, steps, first=0, done=None, limit=None, tables=None,
    temperature=0.0, top_p=1.0, stop=None,
):  # fmt: skip
    """`decode` that can be taken up again: `(tokens [b steps], last [b], cache)`.

    first: steps done before (for the keys); done [b]: rows that have ended; limit: steps after
    which all rows end (traced). Two nested scans: the outer carries the bodies and compresses every
    `recipe.stride` tokens, the inner carries only the tails and what scorers remember of each slot.
    """
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    cache = compress(cache, tables=tables)
    stride = min(cache.recipe.stride, steps) if any(map(takes_more, cache.groups)) else steps
    done = jnp.zeros(tokens.shape, bool) if done is None else done

    def one(carry, i):
        whole = _join(carry["light"], carry["heavy"])
        last, done = carry["last"], carry["done"]
        if limit is not None:
            done = done | (i >= limit)
        logits, new = look(params, config, whole, last[:, None], tables=tables, logits="last")
        whole = append(whole, new, jnp.where(done, 0, 1))
        token = sample(
            logits, jax.random.fold_in(key, first + i), temperature=temperature, top_p=top_p
        )
        out = jnp.where(done, -1, token)
        last = jnp.where(done, last, token)
        for end in stop or ():
            done = done | (token == end)
        return dict(light=_light(whole), last=last, done=done), out

    def several(carry, i, count):
        heavy = carry["heavy"]
        light = {k: v for k, v in carry.items() if k != "heavy"}
        light, out = jax.lax.scan(
            lambda c, j: one(c | {"heavy": heavy}, j), light, i + jnp.arange(count)
        )
        whole = compress(_join(light["light"], heavy), tables=tables)
        return dict(light, light=_light(whole), heavy=_bodies(whole)), out

    carry = dict(
        light=_light(cache), heavy=_bodies(cache), last=tokens.astype(jnp.int32), done=done
    )
    full = steps // stride
    carry, out = jax.lax.scan(lambda c, i: several(c, i * stride, stride), carry, jnp.arange(full))
    out = jnp.reshape(jnp.moveaxis(out, 2, 0), (tokens.shape[0], -1))
    if steps % stride:
        carry, rest = several(carry, full * stride, steps % stride)
        out = jnp.concatenate([out, rest.T], axis=1)
    return out, carry["last"], _join(carry["light"], carry["heavy"])


def _bodies(cache):
    """What no step changes: the bodies without what is remembered of their slots, and the pool."""
    bodies = tuple(tuple(map(_forgetful, g.bodies)) for g in cache.groups)
    return bodies, cache.pool


def _forgetful(body):
    return body.replace(stat=None) if isinstance(body, Slots) else body


def _light(cache):
    """The cache without its bodies, and their `stat`: what the inner scan carries."""
    stats = tuple(tuple(getattr(b, "stat", None) for b in g.bodies) for g in cache.groups)
    groups = tuple(g.replace(bodies=()) for g in cache.groups)
    return cache.replace(groups=groups, pool=None), stats


def _join(light, heavy):
    (cache, stats), (bodies, pool) = light, heavy
    groups = []
    for group, codes, stat in zip(cache.groups, bodies, stats, strict=True):
        pairs = zip(codes, stat, strict=True)
        whole = tuple(b if s is None else b.replace(stat=s) for b, s in pairs)
        groups.append(group.replace(bodies=whole))
    return cache.replace(groups=tuple(groups), pool=pool)
