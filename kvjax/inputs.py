"""Checks of what host functions are given: each raises one sentence before any work is lost."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.cache.cache import NAN, OVERFLOW, TRIMMED, Cache
from kvjax.config import ModelConfig
from kvjax.errors import InputError


def rows(config: ModelConfig, tokens: Any, lengths: Any = None, mask: Any = None):
    """Ids [b, t] right padded on the host, and their lengths; any mask is compacted once."""
    tokens = array("tokens", tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"tokens must be whole numbers [batch, length], got {tokens.dtype} {tokens.shape}"
        )
    b, t = tokens.shape
    if mask is not None:
        if lengths is not None:
            raise InputError("give lengths or mask, not both")
        mask = array("mask", mask).astype(bool)
        if mask.shape != tokens.shape:
            raise InputError(f"mask has shape {mask.shape} and tokens {tokens.shape}")
        order = np.argsort(~mask, axis=1, kind="stable")
        tokens, lengths = np.take_along_axis(tokens, order, axis=1), mask.sum(axis=1)
        tokens = tokens[:, : max(int(lengths.max(initial=0)), 1)]
    lengths = np.full(b, t) if lengths is None else array("lengths", lengths)
    if not np.issubdtype(lengths.dtype, np.integer):
        raise InputError(f"lengths must be whole numbers, got {lengths.tolist()}")
    if lengths.shape != (b,) or (lengths > t).any():
        raise InputError(f"lengths {lengths.tolist()} do not fit tokens of shape {(b, t)}")
    if b == 0 or t == 0 or (lengths < 1).any():
        raise InputError(f"every row needs at least one token, got lengths {lengths.tolist()}")
    tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    if tokens.min() < 0 or tokens.max() >= config.vocab:
        raise InputError(
            f"token ids go from {tokens.min()} to {tokens.max()} and the vocabulary has "
            f"{config.vocab}"
        )
    return tokens.astype(np.int32), lengths.astype(np.int32)


def array(name: str, value: Any) -> np.ndarray:
    """value as an array; ragged lists and other things are refused."""
    try:
        made = np.asarray(value)
    except ValueError:
        made = np.asarray(None)
    if made.dtype == object:
        raise InputError(f"{name} must be an array of equal rows, got {str(value)[:60]}")
    return made


def finite(name: str, tree: Any) -> None:
    """Refuses arrays on the host or a device that hold a NaN or an infinity."""
    for at, leaf in jax.tree_util.tree_leaves_with_path(tree):
        numbers = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if numbers and not isinstance(leaf, Tracer) and not bool(jnp.isfinite(leaf).all()):
            raise InputError(
                f"{name}: {jax.tree_util.keystr(at)} holds NaN or infinity; make it anew"
            )


def number(name: str, value: Any, low: float, high: float = math.inf) -> float:
    """value as a finite float of low to high."""
    try:
        made = float(value)
    except (TypeError, ValueError):
        made = math.nan
    if not math.isfinite(made) or not low <= made <= high:
        until = "" if high == math.inf else f" to {high}"
        raise InputError(f"{name} must be a number from {low}{until}, got {value!r}")
    return made


def a_cache(value: Any) -> Cache:
    if not isinstance(value, Cache):
        raise InputError(f"expected a cache, got {type(value).__name__}")
    return value


def fits(
    config: ModelConfig, length: int, room: int, remedy: str, reach: int | None = None
) -> None:
    """Whether `length` tokens fit a cache of `room` and the model's context.

    reach: the rotary positions that they take, if not as many (condensed and renumbered, say).
    """
    if length > room:
        raise InputError(f"this takes {length} tokens and max_length is {room}; {remedy}")
    if (length if reach is None else reach) > config.context:
        raise InputError(
            f"{length if reach is None else reach} tokens are more than the model's context of "
            f"{config.context}; shorten the text"
        )


def checked(cache: Cache) -> Cache:
    """Raises for flags that the pure functions have set; TRIMMED is a note and stays."""
    flags = np.asarray(cache.flags) & ~TRIMMED
    if flags.any():
        at = np.flatnonzero(flags).tolist()
        bits = int(np.bitwise_or.reduce(flags))
        if bits & NAN:
            raise InputError(
                f"NaN among keys or values of rows {at}: weights or inputs are damaged"
            )
        if bits & OVERFLOW:
            raise InputError(
                f"no room for the tokens of rows {at} in {cache.max_length}; raise max_length"
            )
        raise InputError(f"rows {at} cannot forget tokens that are compressed already; fork first")
    return cache
