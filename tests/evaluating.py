"""Small tasks on a model of random weights, for tests of `kvjax.eval`."""

import cases
import numpy as np

from kvjax import eval as evaluation
from kvjax.eval import Ask, Item

LENGTH = 64
RECIPES = ["streaming_llm@0.5", "snapkv@1,window=8", "int8"]


def draw(seed, index, count):
    return tuple(np.random.default_rng([seed, index]).integers(1, 60, count).tolist())


def plain(tokenizer, count, seed):
    """Two asks on each context, and a loss of four tokens with a recent text."""
    made = []
    for i in range(count):
        ids = draw(seed, i, LENGTH + 12)
        one, two = ids[LENGTH : LENGTH + 5], ids[LENGTH + 5 :]
        asks = (Ask(one[:3], one[3:], info={"depth": 0.5}), Ask(two[:2], two[2:6], "loss"))
        made.append(Item(ids[:LENGTH], asks, recent=16))
    return made


def turns(tokenizer, count, seed):
    """New text between two asks, and options."""
    made = []
    for i in range(count):
        ids = draw(seed + 1, i, LENGTH + 30)
        options = ((3,), (5, 6), (7,))
        one, two, more = ids[LENGTH : LENGTH + 2], ids[LENGTH + 2 : LENGTH + 6], ids[LENGTH + 6 :]
        asks = (Ask(one, options[1], "option", options), Ask(two[:2], two[2:], before=more[:16]))
        made.append(Item(ids[:LENGTH], asks))
    return made


MODEL = cases.model()
TASKS = {"plain": plain, "turns": turns}


def run(out=None, **options):
    options = {"recipes": RECIPES, "tasks": TASKS, "items": 3} | options
    return evaluation.run(MODEL, options.pop("recipes"), options.pop("tasks"), out=out, **options)
