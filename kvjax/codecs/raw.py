"""Raw: the token itself, in the dtype of the cache."""

from flax import struct


def static(default):
    return struct.field(pytree_node=False, default=default)


@struct.dataclass
class Raw:
    """Stores keys and values as they are."""

    side: str = static("k")
    group: int = static(1)
    rope: str = static("after")

    def encode(self, x, valid=None):
        return x

    def decode(self, codes, dtype):
        return codes.astype(dtype)

    def bound(self, x):
        """Largest error of an entry: none."""
        return 0.0 * abs(x).max(axis=-1)
