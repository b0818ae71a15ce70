"""Raw: the token itself, in the dtype of the cache."""

from kvjax import struct


@struct.dataclass
class Raw:
    """Stores keys and values as they are."""

    side: str = struct.static("k")
    group: int = struct.static(1)
    rope: str = struct.static("after")

    def encode(self, x, valid=None):
        return x

    def decode(self, codes, dtype):
        return codes.astype(dtype)

    def bound(self, x):
        """Largest error of an entry: none."""
        return 0.0 * abs(x).max(axis=-1)
