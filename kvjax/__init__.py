"""kvjax: transformers whose memory is an explicit, compressed cache."""

from kvjax.api import Model, condense, extend, fork, load, prefill, truncate
from kvjax.cache.cache import NAN, OVERFLOW, UNDERFLOW, Cache, Tokens, nbytes
from kvjax.cache.init import abstract_cache, init_cache
from kvjax.cache.ops import absorb_long, append, compress, insert, reset, select
from kvjax.cache.recipes import recipe, recipes
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.decode import decode, step
from kvjax.errors import InputError
from kvjax.generate import Generation, generate
from kvjax.model import look
from kvjax.sharding import RULES, Rules, cache_specs

__version__ = "0.1.0"

__all__ = [
    "absorb_long",
    "abstract_cache",
    "append",
    "Cache",
    "cache_specs",
    "CacheRecipe",
    "compress",
    "condense",
    "decode",
    "extend",
    "fork",
    "generate",
    "Generation",
    "init_cache",
    "InputError",
    "insert",
    "load",
    "look",
    "Model",
    "ModelConfig",
    "NAN",
    "nbytes",
    "OVERFLOW",
    "prefill",
    "recipe",
    "recipes",
    "reset",
    "Rules",
    "RULES",
    "select",
    "step",
    "Tokens",
    "truncate",
    "UNDERFLOW",
]
