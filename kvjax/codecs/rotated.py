"""Rotated: levels per token after a Hadamard transform, which spreads what stands out."""

from kvjax import struct
from kvjax.codecs import packing
from kvjax.codecs.grouped import Grouped
from kvjax.codecs.turned import Turned, hadamard

ALL = 1 << 30  # a group of so many channels is all of them


@struct.dataclass
class Rotated(Turned):
    """Rounds each vector, turned by a signed Hadamard matrix, to 16 levels of its own range.

    One large channel of size A becomes A / sqrt(d) in all, so that the others keep their levels.
    Asymmetric over the whole head; d * bits / 8 + 4 bytes a vector. Values are turned on the way in
    and their sum on the way out, not folded into the weights as QuaRot does; keys are turned after
    RoPE, as in QuaRot (RotateKV turns four heads together before it).
    Source: Ashkboos et al. 2024, arXiv:2404.00456 (QuaRot); Su et al. 2025, arXiv:2501.16383.
    """

    side: str = struct.static("k")
    group: int = struct.static(1)
    rope: str = struct.static("after")
    bits: int = struct.static(4)  # 1 to 8

    def check(self):
        packing.check_bits(self.bits, 1)

    def basis(self, d: int):
        return hadamard(d)

    @property
    def inside(self) -> Grouped:
        return Grouped(self.side, bits=self.bits, group_size=ALL)

    def error(self, turned):
        return turned.shape[-1] ** 0.5 * self.inside.bound(turned)
