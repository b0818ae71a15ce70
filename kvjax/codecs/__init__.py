"""HOW a token is stored. A codec is built for one side, keys or values; `Pair` joins two.

The contract of a side: static `group` (tokens that share a scale) and `rope` ("after" or "before"
RoPE is stored), `encode(x [... s d], valid [... s]) -> codes` with leaves `[... s ...]`, or
`[... s/g ...]` where g tokens share an entry, for any multiple s of `group`; `decode(codes, dtype)
-> [... s d]`; `bound(x)`: the largest error of an entry, per vector [... s].

What lies in a cache is packed, a page at a time: a codec may have `pack(codes) -> stored`, whose
argument has the slots of one page for its tokens, `unpack(stored, slots) -> codes`, and `unit`, of
which the slots of a page must be a multiple. They use no tables. Without them codes are stored as
they are. Codecs that turn vectors first are `turned.Turned`.
"""

import math
from typing import Any, Protocol

from kvjax import struct
from kvjax.codecs.fp8 import Fp8
from kvjax.codecs.grouped import Grouped
from kvjax.codecs.int4 import Int4
from kvjax.codecs.kivi import Kivi
from kvjax.codecs.per_token import Int8
from kvjax.codecs.raw import Raw
from kvjax.codecs.rotated import Rotated
from kvjax.codecs.turboquant import TurboQuant
from kvjax.codecs.turned import Turned
from kvjax.config import Spec, Store


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
    "fp8": Fp8,
    "int4": Int4,
    "kivi": Kivi,
    "grouped": Grouped,
    "rotated": Rotated,
    "turboquant": TurboQuant,
}


@struct.dataclass
class Pair:
    """The codecs of keys and of values, as one."""

    k: Codec
    v: Codec
    page: int = struct.static(128)  # slots of a page

    @property
    def group(self) -> int:
        return math.lcm(self.k.group, self.v.group)

    @property
    def unit(self) -> int:
        """Slots of a page are a multiple of it: whole groups, and whole words of packed codes."""
        return math.lcm(self.group, *(getattr(side, "unit", 1) for side in (self.k, self.v)))

    @property
    def raw(self) -> bool:
        """Whether codes are the tokens themselves, so that reading all of them makes no copy."""
        return isinstance(self.k, Raw) and isinstance(self.v, Raw)

    def encode(self, k, v, valid=None):
        return self.k.encode(k, valid), self.v.encode(v, valid)

    def decode(self, codes, dtype):
        return self.k.decode(codes[0], dtype), self.v.decode(codes[1], dtype)

    def pack(self, codes):
        """What is stored of the codes of pages, whose slots are the tokens of one page."""
        return self._each("pack", codes)

    def unpack(self, stored):
        return self._each("unpack", stored, self.page)

    def _each(self, name, codes, *page):
        sides = zip((self.k, self.v), codes, strict=True)
        return tuple(getattr(a, name)(x, *page) if hasattr(a, name) else x for a, x in sides)

    def write(self, k, v, valid=None):
        """What is stored of pages of tokens [... s d], s slots a page."""
        return self.pack(self.encode(k, v, valid))

    def read(self, stored, dtype):
        """Keys and values [... s d] of stored pages."""
        return self.decode(self.unpack(stored), dtype)

    @property
    def inside(self) -> "Pair":
        """The codecs that read vectors as they lie: in another basis, if theirs turns them."""
        k, v = (x.inside if isinstance(x, Turned) else x for x in (self.k, self.v))
        return Pair(k, v, self.page)

    def turn_query(self, q):
        """Queries in the basis of the keys that `inside` reads."""
        return self.k.turn(q).astype(q.dtype) if isinstance(self.k, Turned) else q

    def turn_back(self, out):
        """What attention gave from the values that `inside` reads, in the basis of the model."""
        return self.v.back(out) if isinstance(self.v, Turned) else out

    def round_trip(self, k, v):
        """What is read back after storing, with gradients passed straight through."""
        import jax

        k2, v2 = self.decode(self.encode(k, v), k.dtype)
        return k + jax.lax.stop_gradient(k2 - k), v + jax.lax.stop_gradient(v2 - v)


def build(spec: Spec, side: str, tables=None):
    """The codec that `spec` names, for side "k" or "v", with its tables (of one layer) if any."""
    return struct.build("codec", CODECS, spec, {"side": side} | (tables or {}))


def pair(store: Store, tables=None) -> Pair:
    """Both codecs of a store. tables: {"k": {...}, "v": {...}}, one layer's arrays by field."""
    tables = tables or {}
    k, v = (build(getattr(store, side), side, tables.get(side)) for side in "kv")
    return Pair(k, v, store.page)
