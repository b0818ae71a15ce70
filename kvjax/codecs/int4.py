"""Int4: a few bits an entry with one scale per token and kv head, packed."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.codecs import packing
from kvjax.codecs.scales import TINY, at_least, halves, whole


@struct.dataclass
class Int4:
    """Rounds each vector to 15 levels between minus and plus its largest magnitude.

    Symmetric, as `int8`; d / 2 + 2 bytes a vector, d * bits / 8 + 2 with another number of bits.
    The scale is bfloat16, rounded up before it divides: it makes levels up to 0.8% wider.
    Source: the per-token int4 cache of serving engines (MaxText).
    """

    side: str = struct.static("k")
    group: int = struct.static(1)
    rope: str = struct.static("after")
    bits: int = struct.static(4)  # 2 to 8

    def check(self):
        packing.check_bits(self.bits, 2)

    @property
    def unit(self) -> int:
        return packing.unit(self.bits)

    @property
    def top(self) -> int:
        """The code of the largest magnitude: 7 of 4 bits."""
        return 2 ** (self.bits - 1) - 1

    def encode(self, x, valid=None):
        x = x.astype(jnp.float32)
        scale = at_least(jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / self.top, TINY))
        codes = jnp.round(x / scale[..., None]) + self.top  # 0 .. 2 top
        return {"codes": codes.astype(jnp.uint8), "scale": halves(scale)}

    def decode(self, codes, dtype):
        levels = codes["codes"].astype(jnp.float32) - self.top
        return (levels * whole(codes["scale"])[..., None]).astype(dtype)

    def pack(self, codes):
        return {**codes, "codes": packing.pack(codes["codes"], self.bits)}

    def unpack(self, stored, slots):
        return {**stored, "codes": packing.unpack(stored["codes"], self.bits, slots)}

    def bound(self, x):
        """Largest error of an entry: half a level of the rounded scale."""
        top = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
        return 0.5 * at_least(top / self.top) + 1e-6 * top + TINY
