"""WHICH tokens are kept. A scorer maps `Seen` to scores [b n s]; higher is kept.

Static `observe` names the evidence it asks for: None, or "mass" (the attention that each entry
gets from the newest queries, as many as the recipe's window).
"""

from kvjax.config import Spec
from kvjax.errors import unknown
from kvjax.scorers.key_norm import KeyNorm
from kvjax.scorers.seen import Seen
from kvjax.scorers.sinks import Oldest
from kvjax.scorers.window_attention import WindowAttention

__all__ = ["SCORERS", "Seen", "build"]

SCORERS = {"oldest": Oldest, "key_norm": KeyNorm, "window_attention": WindowAttention}


def build(spec: Spec):
    """The scorer that `spec` names."""
    if spec.name not in SCORERS:
        raise unknown("scorer", spec.name, SCORERS)
    return SCORERS[spec.name](**dict(spec.options))
