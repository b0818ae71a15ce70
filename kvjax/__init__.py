"""kvjax: transformers whose memory is an explicit, compressed cache."""

from kvjax.api import Model, condense, extend, fork, load, prefill, truncate
from kvjax.cache.batch import insert, reset, select
from kvjax.cache.cache import NAN, OVERFLOW, TRIMMED, UNDERFLOW, Cache, Tokens, nbytes
from kvjax.cache.init import abstract_cache, init_cache
from kvjax.cache.ops import absorb_long, append, compress, split_floats
from kvjax.cache.recipes import recipe, recipes
from kvjax.checkpoint import load_cache, save_cache
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.decode import decode, step
from kvjax.errors import InputError
from kvjax.generate import Generation, generate
from kvjax.model import look
from kvjax.reuse import edit, join
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
    "edit",
    "extend",
    "fork",
    "generate",
    "Generation",
    "init_cache",
    "InputError",
    "insert",
    "load",
    "load_cache",
    "join",
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
    "save_cache",
    "select",
    "split_floats",
    "step",
    "Tokens",
    "TRIMMED",
    "truncate",
    "UNDERFLOW",
]
