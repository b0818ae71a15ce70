"""KIVI: keys quantized per channel over groups of tokens, values per token over channels."""

from kvjax import struct
from kvjax.codecs import min_max, packing


@struct.dataclass
class Kivi:
    """Rounds each key channel to 4 levels over 32 tokens, each value to 4 levels over 32 channels.

    Keys have channels of large magnitude, so that a scale of their own costs the others nothing.
    Asymmetric between minimum and maximum; d * bits / 8 + 4 * d / 32 bytes a vector: 2 bits are 3.
    Source: Liu et al. 2024, arXiv:2402.02750.
    """

    side: str = struct.static("k")
    rope: str = struct.static("after")
    bits: int = struct.static(2)  # 1 to 8
    group_size: int = struct.static(32)  # tokens that share a scale of keys; channels, of values

    def check(self):
        packing.check_bits(self.bits, 1)
        min_max.check_size(self.group_size)

    @property
    def group(self) -> int:
        return self.group_size if self.side == "k" else 1

    @property
    def unit(self) -> int:
        return packing.unit(self.bits)

    @property
    def _axis(self) -> int:
        return -2 if self.side == "k" else -1

    def encode(self, x, valid=None):
        return min_max.encode(x, self.bits, self.group_size, self._axis, valid)

    def decode(self, codes, dtype):
        return min_max.decode(codes, self.group_size, self._axis, dtype)

    def pack(self, codes):
        return min_max.pack(codes, self.bits)

    def unpack(self, stored, slots):
        return min_max.unpack(stored, self.bits, slots)

    def bound(self, x):
        """Largest error of an entry: half a level of its group."""
        return min_max.bound(x, self.bits, self.group_size, self._axis)
