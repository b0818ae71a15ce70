"""WHICH tokens are kept. A scorer maps `Seen` to scores [b n s]; higher is kept.

Static `observe` names the observer whose evidence it asks for (cache/evidence.py), or is None.
"""

from kvjax.config import Spec
from kvjax.errors import unknown
from kvjax.scorers.key_norm import KeyNorm
from kvjax.scorers.seen import Seen
from kvjax.scorers.sinks import Oldest
from kvjax.scorers.window_attention import WindowAttention

__all__ = ["SCORERS", "Seen", "build"]

SCORERS = {
    "oldest": Oldest,
    "key_norm": KeyNorm,
    "window_attention": WindowAttention,
}


def observes(spec: Spec) -> str | None:
    """The observer whose evidence the scorer asks for."""
    return getattr(build(spec), "observe", None)


def build(spec: Spec, tables=None):
    """The scorer that `spec` names, with its tables (of one layer) if it has any."""
    if spec.name not in SCORERS:
        raise unknown("scorer", spec.name, SCORERS)
    return SCORERS[spec.name](**dict(spec.options), **(tables or {}))
