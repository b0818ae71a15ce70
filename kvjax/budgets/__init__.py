"""How many entries each head gets: per head, per layer, per model, in chunks, or whole heads.

A budget has three parts. `wants` is arithmetic on the host: how many entries to keep, from the
length of a row; `entries` says for how many of them a head, or if `pooled` the model, must have
room. A call maps scores [.. n s], who competes, who is protected, and those numbers (of all rows,
[.. b]) to the mask of what is kept. The leading axes of the scores are [l b] in condense and
[b] while streaming, which only a budget with `streams` can.

Static `pooled` says that heads or layers may keep unequal numbers, in a pool of pages. A budget
that counts entries by itself has `over`: the rows [b] that it would have kept more of.
"""

from kvjax import struct
from kvjax.budgets.ask import Ask
from kvjax.budgets.chunks import Chunks
from kvjax.budgets.heads import Heads
from kvjax.budgets.labelled import Labelled
from kvjax.budgets.model import Model
from kvjax.budgets.pooled import Pooled
from kvjax.budgets.pyramid import Pyramid
from kvjax.budgets.threshold import Threshold
from kvjax.budgets.uniform import Uniform
from kvjax.config import Spec

__all__ = ["BUDGETS", "Ask", "build"]

BUDGETS = {
    "uniform": Uniform,
    "pooled": Pooled,
    "pyramid": Pyramid,
    "model": Model,
    "heads": Heads,
    "labelled": Labelled,
    "chunks": Chunks,
    "threshold": Threshold,
}


def build(spec: Spec):
    """The budget that `spec` names."""
    return struct.build("budget", BUDGETS, spec)
