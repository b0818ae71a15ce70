"""Fp8: eight-bit floats with one scale per token and kv head."""

import jax
import jax.numpy as jnp

from kvjax import struct
from kvjax.codecs.scales import TINY
from kvjax.errors import unknown

FORMS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


@struct.dataclass
class Fp8:
    """Rounds each vector to 8-bit floats whose largest is its largest magnitude.

    Small entries keep their relative precision, 2**-4 in e4m3 and 2**-3 in e5m2; d + 4 bytes a
    vector. The scale is float32, and of each vector: one of a whole tensor would need calibration.
    Source: the fp8 caches of serving engines (vLLM, MaxText).
    """

    side: str = struct.static("k")
    group: int = struct.static(1)
    rope: str = struct.static("after")
    form: str = struct.static("e4m3")  # or e5m2

    def check(self):
        if self.form not in FORMS:
            raise unknown("value of form", self.form, FORMS)

    @property
    def _most(self) -> float:
        return float(jnp.finfo(FORMS[self.form]).max)  # 448 or 57344

    def encode(self, x, valid=None):
        x = x.astype(jnp.float32)
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / self._most, TINY)
        return {"codes": (x / scale[..., None]).astype(FORMS[self.form]), "scale": scale}

    def decode(self, codes, dtype):
        return (codes["codes"].astype(jnp.float32) * codes["scale"][..., None]).astype(dtype)

    def pack(self, codes):
        """As bytes: XLA for the CPU would make a float16 copy of the codes of all layers around a
        loop that reads a layer's."""
        return self._as(jnp.uint8, codes)

    def unpack(self, stored, slots):
        return self._as(FORMS[self.form], stored)

    def _as(self, dtype, codes):
        return {**codes, "codes": jax.lax.bitcast_convert_type(codes["codes"], dtype)}

    def bound(self, x):
        """Largest error of an entry: half a step at the top, where steps are 32 of 448 (e4m3) or
        8192 of 57344 (e5m2)."""
        step = 1 / 14 if self.form == "e4m3" else 1 / 7
        return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) * (0.5 * step + 1e-6) + TINY
