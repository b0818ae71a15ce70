"""Decoding: one step, and the whole loop on the device."""

import jax
import jax.numpy as jnp

from kvjax.cache.cache import Cache, takes_more
from kvjax.cache.ops import append, compress
from kvjax.config import ModelConfig
from kvjax.model import look
from kvjax.params import Params
from kvjax.sampling import sample
from kvjax.shapes import Array, Int


def step(params: Params, config: ModelConfig, cache: Cache, tokens: Int[Array, "b t"], *, tables=None):
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
    key,
    *,
    steps: int,
    tables=None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: tuple[int, ...] | None = None,
):
    """Generates `steps` tokens a row: `(tokens [b steps], cache)`.

    tokens are the last ones, not yet in the cache; the last one generated is not in it either. A row
    that has given a token of `stop` gives -1 from then on and remembers nothing more. Two nested
    scans: the outer carries the bodies and compresses every `recipe.stride` tokens, the inner
    carries only the tails. Deterministic in `key`.
    """
    cache = compress(cache, tables=tables)
    stride = min(cache.recipe.stride, steps) if any(map(takes_more, cache.groups)) else steps
    bodies = lambda c: tuple(g.bodies for g in c.groups)  # noqa: E731

    def join(light, heavy):
        groups = tuple(g.replace(bodies=b) for g, b in zip(light.groups, heavy))
        return light.replace(groups=groups)

    def strip(cache):
        return join(cache, [() for _ in cache.groups])

    def one(carry, i):
        light, heavy, last, done = carry["light"], carry["heavy"], carry["last"], carry["done"]
        whole = join(light, heavy)
        logits, new = look(params, config, whole, last[:, None], tables=tables, logits="last")
        whole = append(whole, new, jnp.where(done, 0, 1))
        token = sample(logits, jax.random.fold_in(key, i), temperature=temperature, top_p=top_p)
        out = jnp.where(done, -1, token)
        for end in stop or ():
            done = done | (token == end)
        return dict(light=strip(whole), last=jnp.where(done, last, token), done=done), out

    def several(carry, i, count):
        heavy = carry.pop("heavy")
        carry, out = jax.lax.scan(
            lambda c, j: one(c | {"heavy": heavy}, j), carry, i + jnp.arange(count)
        )
        whole = compress(join(carry["light"], heavy), tables=tables)
        return dict(carry, light=strip(whole), heavy=bodies(whole)), out

    carry = dict(light=strip(cache), heavy=bodies(cache), last=tokens.astype(jnp.int32),
                 done=jnp.zeros(tokens.shape, bool))  # fmt: skip
    full = steps // stride
    carry, out = jax.lax.scan(
        lambda c, i: several(c, i * stride, stride), carry, jnp.arange(full)
    )
    out = jnp.reshape(jnp.moveaxis(out, 2, 0), (tokens.shape[0], -1))
    if steps % stride:
        carry, rest = several(carry, full * stride, steps % stride)
        out = jnp.concatenate([out, rest.T], axis=1)
    return out, join(carry["light"], carry["heavy"])
