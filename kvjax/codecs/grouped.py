"""Grouped: asymmetric levels per token over groups of channels, as in Hugging Face's cache."""

from kvjax import struct
from kvjax.codecs import min_max, packing


@struct.dataclass
class Grouped:
    """Rounds each group of 64 channels of a token to 16 levels between its least and its largest.

    One rule for keys and values; d * bits / 8 + 4 * d / 64 bytes a vector. A token is coded once:
    Hugging Face's cache codes all of them again whenever its window is full.
    Source: QuantizedLayer of Hugging Face transformers (quanto; HQQ refines the minimum).
    """

    side: str = struct.static("k")
    group: int = struct.static(1)
    rope: str = struct.static("after")
    bits: int = struct.static(4)  # 1 to 8
    group_size: int = struct.static(64)  # channels that share a scale

    def check(self):
        packing.check_bits(self.bits, 1)
        min_max.check_size(self.group_size)

    @property
    def unit(self) -> int:
        return packing.unit(self.bits)

    def encode(self, x, valid=None):
        return min_max.encode(x, self.bits, self.group_size, -1, valid)

    def decode(self, codes, dtype):
        return min_max.decode(codes, self.group_size, -1, dtype)

    def pack(self, codes):
        return min_max.pack(codes, self.bits)

    def unpack(self, stored, slots):
        return min_max.unpack(stored, self.bits, slots)

    def bound(self, x):
        """Largest error of an entry: half a level of its group."""
        return min_max.bound(x, self.bits, self.group_size, -1)
