"""HOW a token is stored. A codec is built for one side, keys or values; `Pair` joins two.

The contract of a side: static `group` (tokens that share a scale) and `rope` ("after" or "before"
RoPE is stored), `encode(x [... s d], valid [... s]) -> codes` with leaves `[... s ...]`,
`decode(codes, dtype) -> [... s d]`, `bound(x)`: the largest error of an entry, per vector [... s].
"""

import math
from typing import Any, Protocol

from kvjax import struct
from kvjax.codecs.per_token import Int8
from kvjax.codecs.raw import Raw
from kvjax.config import Spec, Store
from kvjax.errors import unknown


class Codec(Protocol):
    """One side of a store."""

    @property
    def group(self) -> int: ...

    @property
    def rope(self) -> str: ...

    def encode(self, x, valid=None) -> Any: ...

    def decode(self, codes, dtype) -> Any: ...

    def bound(self, x) -> Any: ...


CODECS = {
    "raw": Raw,
    "int8": Int8,
}


@struct.dataclass
class Pair:
    """The codecs of keys and of values, as one."""

    k: Codec
    v: Codec

    @property
    def group(self) -> int:
        return math.lcm(self.k.group, self.v.group)

    @property
    def raw(self) -> bool:
        """Whether codes are the tokens themselves, so that reading all of them makes no copy."""
        return isinstance(self.k, Raw) and isinstance(self.v, Raw)

    def encode(self, k, v, valid=None):
        return self.k.encode(k, valid), self.v.encode(v, valid)

    def decode(self, codes, dtype):
        return self.k.decode(codes[0], dtype), self.v.decode(codes[1], dtype)

    def round_trip(self, k, v):
        """What is read back after storing, with gradients passed straight through."""
        import jax

        k2, v2 = self.decode(self.encode(k, v), k.dtype)
        return k + jax.lax.stop_gradient(k2 - k), v + jax.lax.stop_gradient(v2 - v)


def build(spec: Spec, side: str, tables=None):
    """The codec that `spec` names, for side "k" or "v", with its tables (of one layer) if any."""
    if spec.name not in CODECS:
        raise unknown("codec", spec.name, CODECS)
    return CODECS[spec.name](side=side, **dict(spec.options), **(tables or {}))


def pair(store: Store, tables=None) -> Pair:
    """Both codecs of a store. tables: {"k": {...}, "v": {...}}, one layer's arrays by field."""
    tables = tables or {}
    return Pair(build(store.k, "k", tables.get("k")), build(store.v, "v", tables.get("v")))
