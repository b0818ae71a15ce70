"""WHICH tokens are kept. A scorer maps `Seen` to scores [b n s]; higher is kept.

A scorer that asks for evidence has `watch()`, the observer (evidence.py) that looks along, and
static `reads`: what is read for it, "window" (the newest tokens, or the question), "prompt" (all
tokens, in order), "repeat" (a request to repeat the context, and the context), "question" (the
question, without which the recipe's window must be it) or "probes" (trained soft tokens).
One that can be fed as tokens arrive has `streams()`, an observer, and static `decay`
(cache/stat.py): what has gathered is `seen.stat`. Static `late`: a token has no score before the
next one.
"""

from kvjax import struct
from kvjax.config import CacheRecipe, Choice, Spec
from kvjax.scorers.accumulated import AccumulatedAttention
from kvjax.scorers.expected_attention import ExpectedAttention
from kvjax.scorers.gate import Gate
from kvjax.scorers.key_diff import KeyDiff
from kvjax.scorers.key_norm import KeyNorm
from kvjax.scorers.labels import Labels
from kvjax.scorers.last_attention import LastAttention
from kvjax.scorers.probe_attention import ProbeAttention
from kvjax.scorers.question_attention import QuestionAttention
from kvjax.scorers.reconstruction import Reconstruction
from kvjax.scorers.seen import Seen
from kvjax.scorers.sinks import Oldest
from kvjax.scorers.surrogate import Surrogate
from kvjax.scorers.window_attention import WindowAttention

__all__ = ["SCORERS", "Seen", "build"]

SCORERS = {
    "oldest": Oldest,
    "key_norm": KeyNorm,
    "key_diff": KeyDiff,
    "window_attention": WindowAttention,
    "last_attention": LastAttention,
    "accumulated": AccumulatedAttention,
    "expected_attention": ExpectedAttention,
    "reconstruction": Reconstruction,
    "question_attention": QuestionAttention,
    "labels": Labels,
    "surrogate": Surrogate,
    "probe_attention": ProbeAttention,
    "gate": Gate,
}


def reads(choice: Choice | None) -> str | None:
    """What is read for the scorer's evidence: "window", "prompt", "repeat", or None for nothing."""
    return None if choice is None else getattr(build(choice.scorer), "reads", None)


def streams(recipe: CacheRecipe | None) -> bool:
    """Whether what queries give each token is remembered beside it, as tokens arrive."""
    if recipe is None or recipe.choice is None or recipe.when != "during":
        return False
    return hasattr(build(recipe.choice.scorer), "streams")


def build(spec: Spec, tables=None):
    """The scorer that `spec` names, with its tables (of one layer) if it has any."""
    return struct.build("scorer", SCORERS, spec, tables)
