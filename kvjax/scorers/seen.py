"""What a scorer may look at."""

from kvjax import struct
from kvjax.config import Rope
from kvjax.shapes import Array, Bool, Float, Int


@struct.dataclass
class Seen:
    """Entries of one layer, in any order unless said."""

    k: Float[Array, "b n s d"]  # as stored: after RoPE unless the codec stores keys before it
    v: Float[Array, "b n s e"]
    pos: Int[Array, "b n s"]  # arrival index; -1 is empty
    length: Int[Array, "b"]  # arrivals of the row so far
    evidence: dict | None = None  # what the scorer's observer saw (evidence.py), slots in order
    open: Bool[Array, "b n s"] | None = None  # who competes; None: all that are not empty
    stat: Float[Array, "b n s"] | None = None  # while streaming, what was remembered of each
    rope: Rope = struct.static(Rope())  # of the layer
    scale: float = struct.static(1.0)  # of query-key products

    @property
    def competes(self):
        """Mask of the entries that compete: a recent window is real and does not."""
        return self.pos >= 0 if self.open is None else self.open
