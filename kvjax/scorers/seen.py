"""What a scorer may look at."""

from kvjax import struct
from kvjax.shapes import Array, Float, Int


@struct.dataclass
class Seen:
    """Entries of one layer that compete for room, in any order unless said."""

    k: Float[Array, "b n s d"]  # as stored: after RoPE unless the codec stores keys before it
    v: Float[Array, "b n s e"]
    pos: Int[Array, "b n s"]  # arrival index; -1 is empty
    length: Int[Array, "b"]  # arrivals of the row so far
    evidence: dict | None = (
        None  # what the scorer's observer saw (cache/evidence.py), slots in order
    )
