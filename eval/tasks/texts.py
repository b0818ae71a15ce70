"""Real texts as token ids, cut to exact lengths."""

import functools
import random
from typing import Any

from kvjax import data
from kvjax.errors import InputError

FRONT = 30_000  # characters of contents and front matter in Moby Dick


def rng(name: str, seed: int, index: int) -> random.Random:
    """Random numbers of one item: they depend on nothing else."""
    return random.Random(f"{name}/{seed}/{index}")


@functools.lru_cache(maxsize=4)
def prose(tokenizer: Any) -> tuple[int, ...]:
    """Token ids of Moby Dick from its first chapter on."""
    return tuple(tokenizer.encode(data.moby_dick()[FRONT:], add_bos=False))


def start(tokenizer: Any) -> tuple[int, ...]:
    """What a text begins with: the token that the model expects first, or nothing."""
    return tuple(tokenizer.encode("", add_bos=None))


def window(ids, random_: random.Random, count: int) -> tuple[int, ...]:
    """`count` neighbouring ids, from anywhere."""
    if len(ids) < count:
        raise InputError(f"the text has {len(ids)} tokens and {count} are asked for; lower length")
    first = random_.randrange(len(ids) - count + 1)
    return tuple(ids[first : first + count])
