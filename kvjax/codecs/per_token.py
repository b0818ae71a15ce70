"""Int8: eight bits an entry with one scale per token and kv head."""

import jax.numpy as jnp

from kvjax import struct
from kvjax.codecs.scales import TINY


@struct.dataclass
class Int8:
    """Rounds each vector to 255 levels between minus and plus its largest magnitude.

    Symmetric, so that `q.k = scale * (q.codes)`; d + 4 bytes a vector. The scale is float32, as in
    the card: a bfloat16 scale would add an error of the size of half a level.
    Source: the per-token int8 caches of serving engines (vLLM, TensorRT-LLM).
    """

    side: str = struct.static("k")
    group: int = struct.static(1)
    rope: str = struct.static("after")

    def encode(self, x, valid=None):
        x = x.astype(jnp.float32)
        top = jnp.max(jnp.abs(x), axis=-1)
        scale = jnp.maximum(top / 127.0, TINY)  # below it XLA would flush the scale to zero
        codes = jnp.round(x / scale[..., None])
        return {"codes": codes.astype(jnp.int8), "scale": scale}

    def decode(self, codes, dtype):
        return (codes["codes"].astype(jnp.float32) * codes["scale"][..., None]).astype(dtype)

    def bound(self, x):
        """Largest error of an entry: half a level, a rounding of float32, its smallest number."""
        return jnp.max(jnp.abs(x), axis=-1) * (0.5 / 127.0 + 1e-6) + TINY
