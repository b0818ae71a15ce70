"""One code path for every family: training, prefill, decoding and verification are `look`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from kvjax.attention import Query, attend_own
from kvjax.cache import stat
from kvjax.cache.cache import Cache, Tokens, attend, merge_all, places, raw_keys, readable
from kvjax.config import ModelConfig
from kvjax.evidence import Looked
from kvjax.layers import angles, mlp, rms_norm, rotate
from kvjax.params import Params
from kvjax.shapes import Array, Float, Int

LOGITS = ("all", "last", "hidden", "none")


def look(
    params: Params,
    config: ModelConfig,
    cache: Cache | None,
    tokens: Int[Array, "b t"] | Float[Array, "b t m"],
    *,
    count: Int[Array, "b"] | None = None,
    tables: Any = None,
    logits: str = "all",
) -> tuple[Any, Tokens]:
    """Reads new tokens against the cache and changes nothing: `(logits, new)`.

    tokens are ids or embeddings; past count[b] (default: all) a row is padding. cache=None reads
    them alone: training. logits: "all" [b t w], "last" [b w] (each row's last real token), "hidden"
    [b t m] (after the last norm), or "none". `new` is what `append` and `absorb_long` take.
    """
    return observe(params, config, cache, tokens, None, count=count, tables=tables, logits=logits)


def observe(params, config, cache, tokens, observer, *, count=None, tables=None, logits="all"):
    """`look` with an observer (evidence.py) along: its evidence comes with the new tokens.

    In training (cache=None) the observer's `mix(query, k, v, pos, tables, use, hidden)` stands for
    attention: ((out, lse), evidence), from keys and values [b n t d], a layer's own tables, and the
    normed input [b t m].
    observer=None: that of the recipe's scorer, if it streams (cache/stat.py).
    """
    streaming = cache is not None and stat.streams(cache)
    assert observer is None or not streaming, "a cache that streams has its own observer"
    if logits not in LOGITS:
        raise ValueError(f"{logits=} must be one of {LOGITS}")
    b, t = tokens.shape[:2]
    count = jnp.full((b,), t, jnp.int32) if count is None else count
    x = _embed(params, config, tokens)
    step = jnp.arange(t, dtype=jnp.int32)
    real = step < count[:, None]
    start = jnp.zeros((b, 1), jnp.int32) if cache is None else cache.seen[:, None]
    clock = start if cache is None else cache.clock[:, None]
    pos = jnp.where(real, start + step, -1)
    new, evidence = [], []
    for group in _groups(config, cache):
        x, (k, v), seen = _run(params, config, cache, group, x, pos, clock + step, tables, observer)
        new.append((k, v))
        evidence.append(seen)
    k, v = (jnp.concatenate(z) if len(new) > 1 else z[0] for z in zip(*new, strict=True))
    return _finish(params, config, x, count, logits), Tokens(
        k, v, tuple(evidence) if observer or streaming else ()
    )


def _groups(config, cache):
    """(start, stop, LayerCache or None): stretches of layers that are scanned together."""
    if cache is None:
        return [(start, stop, None) for start, stop, _ in config.runs()]
    return [(g.start, g.stop, g) for g in cache.groups]


def _embed(params, config, tokens):
    dtype = jnp.dtype(config.dtype)
    if tokens.ndim == 3:
        return tokens.astype(dtype)
    x = jnp.take(params.embed, tokens, axis=0, mode="clip").astype(dtype)
    if config.style.scaled_embedding:
        x = x * jnp.asarray(config.width**0.5, dtype)
    return x


def _run(params, config, cache, group, x, pos, rotary, tables, observer):
    """Scans layers start to stop. The scan reads weights and cache and writes neither."""
    start, stop, memory = group
    kind = config.kinds[config.pattern[start]]
    turn = angles(kind.rope, config.head_dim, rotary[:, :, None])  # [b t 1 d/2]
    at = None if memory is None else places(cache, memory)
    recipe = None if cache is None else cache.recipe
    tables = jax.tree.map(lambda x: x[start:stop], tables)
    pool = pages = None
    if cache is not None and memory is not None and memory.pooled is not None:
        pool, pages = cache.pool, _pages(cache.pool, memory)

    weights, use = _weights(params.blocks, start, stop, indexed=cache is not None)

    def layer(x, inputs):
        w, memory, tables, pages = inputs
        mine = memory, tables, pages and (pool, *pages)
        return _layer(
            config, kind, functools.partial(use, w), x, pos, turn, at, recipe, mine, observer
        )

    x, (k, v, seen) = jax.lax.scan(layer, x, (weights, memory, tables, pages))
    return x, (k, v), seen


def _pages(pool, group):
    """Where the pages of a group's layers are: first and count, each [l b]."""
    stop = group.pooled + group.stop - group.start
    return tuple(x[group.pooled : stop] for x in (pool.first, pool.count))


def _weights(blocks, start, stop, indexed):
    """What the scan carries of the weights of layers start to stop, and `use(carried, fn, *args)`,
    which calls `fn(block, *args)` with the weights of one layer."""
    if isinstance(blocks, tuple):  # a leaf per layer: read where they lie

        def switch(i, fn, *args):
            return jax.lax.switch(
                i, [functools.partial(fn, block) for block in blocks[start:stop]], *args
            )

        return jnp.arange(stop - start), switch
    if indexed and stop - start < blocks.q.shape[0]:  # a static slice would copy the stretch

        def take(i, fn, *args):
            one = lambda w: jax.lax.dynamic_index_in_dim(w, i, 0, keepdims=False)  # noqa: E731
            return fn(jax.tree.map(one, blocks), *args)

        return jnp.arange(start, stop), take
    if stop - start < blocks.q.shape[0]:
        blocks = jax.tree.map(lambda w: w[start:stop], blocks)
    return blocks, lambda block, fn, *args: fn(block, *args)


def _layer(config, kind, use, x, pos, turn, at, recipe, mine, observer):
    memory, tables, pooled = mine
    q, k, v, y = use(functools.partial(_open, config), x)
    plain, stored = q, k
    q, k = rotate(q, *turn), rotate(k, *turn)
    if recipe is None or not raw_keys(recipe):
        stored = k
    query = Query(q, pos, config.scale, kind.window)
    k, v_ = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    if memory is None and observer is not None:
        out, seen = observer.mix(query, k, v_, pos, tables, use, y)
    else:
        out, seen = attend_own(query, k, v_, pos), ()
    if memory is not None:
        assert recipe is not None
        pieces, read = attend(memory, query, at, recipe, kind.rope, tables, pooled)
        out = merge_all([out, *pieces])
        along = observer or stat.observer(recipe, memory, tables)
        if along is not None:
            tail = read(0, memory.tail.capacity)
            bodies = ()
            if observer is None:
                bodies = readable(memory, at, recipe, kind.rope, q.dtype, tables)
            seen = along(
                Looked(query, plain, *tail, at.pos, k, out[1], y, tables, use,
                       bodies, memory.tail.stat, stat.apart(recipe, x.shape[1]))
            )  # fmt: skip
    return use(functools.partial(_close, config), x, out[0].astype(x.dtype)), (stored, v, seen)


def _open(config, w, x):
    """Queries, keys and values [b t heads d] before RoPE, and the normed input."""
    style, eps = config.style, config.eps
    y = rms_norm(x, w.attn_norm, eps, style)
    q, k, v = (_project(y, m, b) for m, b in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias)))
    if style.qk_norm:
        q, k = rms_norm(q, w.q_norm, eps, style), rms_norm(k, w.k_norm, eps, style)
    return q, k, v, y


def _close(config, w, x, out):
    """The rest of a layer, from what attention gave [b t h e]."""
    style, eps = config.style, config.eps
    y = rearrange(out, "b t h e -> b t (h e)")
    y = jnp.einsum("btf,mf->btm", y, rearrange(w.o, "m h e -> m (h e)"))
    if style.post_norms:
        y = rms_norm(y, w.post_attn_norm, eps, style)
    x = x + y
    y = mlp(rms_norm(x, w.mlp_norm, eps, style), w.gate, w.up, w.down, style)
    if style.post_norms:
        y = rms_norm(y, w.post_mlp_norm, eps, style)
    return x + y


def _project(x, weight, bias):
    """[b t m] to [b t heads d]."""
    h, d, m = weight.shape  # one matrix: XLA's CPU product would transpose three axes elementwise
    y = jnp.einsum("btm,fm->btf", x, weight.reshape(h * d, m)).reshape(*x.shape[:2], h, d)
    return y if bias is None else y + bias


def _finish(params, config, x, count, logits):
    if logits == "none":
        return None
    if logits == "last":
        x = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
    x = rms_norm(x, params.norm, config.eps, config.style)
    if logits == "hidden":
        return x
    head = params.embed if params.head is None else params.head
    y = jnp.einsum("btm,wm->btw", x, head, preferred_element_type=jnp.float32)
    return y[:, 0] if logits == "last" else y
