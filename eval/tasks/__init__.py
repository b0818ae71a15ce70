"""Tasks by name. A task is a frozen dataclass of its options that makes items when called."""

import inspect
from collections.abc import Callable

from kvjax.eval.tasks.cloze import Cloze
from kvjax.eval.tasks.code import Identifier, NextLine
from kvjax.eval.tasks.files import Asked, LongBench
from kvjax.eval.tasks.humaneval import HumanEval
from kvjax.eval.tasks.key_values import KeyValues
from kvjax.eval.tasks.language import ManyShot
from kvjax.eval.tasks.losses import Loss
from kvjax.eval.tasks.needles import Needles
from kvjax.eval.tasks.questions import Questions
from kvjax.eval.tasks.turns import Turns
from kvjax.eval.tasks.variables import Variables
from kvjax.eval.tasks.words import CommonWords, FrequentWords

TASKS = {
    "niah_single": Needles(),
    "niah_multikey": Needles(keys=5, asks=5),
    "niah_multivalue": Needles(values=3),
    "niah_multiquery": Needles(keys=4, queries=4),
    "variables": Variables(),
    "common_words": CommonWords(),
    "frequent_words": FrequentWords(),
    "questions": Questions(),
    "key_values": KeyValues(),
    "turns": Turns(),
    "langid": ManyShot(),
    "langid_renamed": ManyShot(labels="renamed"),
    "cloze": Cloze(),
    "prose_loss": Loss(),
    "code_loss": Loss(text="code"),
    "identifier": Identifier(),
    "next_line": NextLine(),
    "humaneval": HumanEval(),
    "asked": Asked(""),
    "longbench": LongBench(""),
}
"""Every task by name, with its defaults; `niah_single@2048,depth=0.5` sets options."""


def sentence(task: Callable) -> str:
    """What a task asks, from its docstring."""
    return (inspect.getdoc(task) or "").partition("\n")[0]
