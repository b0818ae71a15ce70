"""TurboQuant: turned at random, every coordinate is nearly normal, and the best levels known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.codecs import packing
from kvjax.codecs.scales import TINY, halves, nearest, whole
from kvjax.codecs.turned import Turned, gaussian, orthogonal
from kvjax.errors import InputError, unknown

STREAM = 1  # of the sketch's matrix; the rotation is of another


@struct.dataclass
class TurboQuant(Turned):
    """Rounds each coordinate of the turned, normalized vector to the best 2**bits levels.

    The levels are those of Lloyd and Max for a coordinate of a random direction: nothing is
    calibrated. form="prod" spends one of the bits on the sign of a random projection of what is
    left, which makes products with queries unbiased and noisier. "mse" products are too small by
    the factor 1 - D, the mean square error. d * bits / 8 + 2 bytes a vector, "prod" 2 more.
    Source: Zandieh et al. 2025, arXiv:2504.19874; no code of the authors was seen. One number of
    bits for all channels: the paper's mixtures (2.5, 3.5 bits) are not here.
    """

    side: str = struct.static("k")
    group: int = struct.static(1)
    rope: str = struct.static("after")
    bits: int = struct.static(4)  # 1 to 4, "prod" from 2
    form: str = struct.static("mse")  # or prod

    def check(self):
        if self.form not in ("mse", "prod"):
            raise unknown("value of form", self.form, ("mse", "prod"))
        least = 1 if self.form == "mse" else 2
        if not least <= self.bits <= 4:
            raise InputError(
                f"bits must be a whole number from {least} to 4 of form {self.form!r}, "
                f"got {self.bits}"
            )

    def basis(self, d: int):
        return orthogonal(d)

    @property
    def inside(self):
        return Direction(self.bits) if self.form == "mse" else Sketched(self.bits - 1)

    def error(self, turned):
        return self.inside.error(turned)


@struct.dataclass
class Direction:
    """Length and direction of vectors whose directions are random."""

    bits: int = struct.static(4)

    @property
    def unit(self) -> int:
        return packing.unit(self.bits)

    def encode(self, x, valid=None):
        norm, y = _normed(x)
        steps = jnp.asarray(_between(x.shape[-1], self.bits))
        codes = sum((y > step).astype(jnp.uint8) for step in steps)
        return {"codes": codes, "norm": halves(nearest(norm))}

    def decode(self, codes, dtype):
        return (self.unit_vectors(codes) * whole(codes["norm"])[..., None]).astype(dtype)

    def unit_vectors(self, codes):
        """The levels [... d] of the codes, nearly unit vectors."""
        return jnp.take(jnp.asarray(levels(codes["codes"].shape[-1], self.bits)), codes["codes"])

    def pack(self, codes):
        return {**codes, "codes": packing.pack(codes["codes"], self.bits)}

    def unpack(self, stored, slots):
        return {**stored, "codes": packing.unpack(stored["codes"], self.bits, slots)}

    def error(self, x):
        """Longest error [...]: of a direction that is far from all levels, and the length's
        rounding to bfloat16."""
        norm, _ = _normed(x)
        far = _farthest(x.shape[-1], self.bits)
        return norm * (far + 2.0**-8 * (1 + far) + 1e-5) + TINY


@struct.dataclass
class Sketched:
    """`Direction`, and the signs of a projection of what it leaves, with its length."""

    bits: int = struct.static(3)

    @property
    def rough(self) -> Direction:
        return Direction(self.bits)

    @property
    def unit(self) -> int:
        return 32  # signs fill words

    def encode(self, x, valid=None):
        made = self.rough.encode(x)
        _, y = _normed(x)
        rest = y - self.rough.unit_vectors(made)
        sketch = _project(rest, gaussian(x.shape[-1], STREAM).T)
        left = jnp.linalg.norm(rest, axis=-1)  # of the unit vector
        return made | {"signs": (sketch >= 0).astype(jnp.uint8), "left": halves(nearest(left))}

    def decode(self, codes, dtype):
        d = codes["codes"].shape[-1]
        signs = 2.0 * codes["signs"].astype(jnp.float32) - 1.0
        rest = _project(signs, gaussian(d, STREAM)) * (np.pi / 2) ** 0.5 / d
        y = self.rough.unit_vectors(codes)
        y = y + rest * whole(codes["left"])[..., None]
        return (y * whole(codes["norm"])[..., None]).astype(dtype)

    def pack(self, codes):
        made = self.rough.pack(codes)
        return made | {"signs": packing.pack(codes["signs"], 1)}

    def unpack(self, stored, slots):
        made = self.rough.unpack(stored, slots)
        return made | {"signs": packing.unpack(stored["signs"], 1, slots)}

    def error(self, x):
        """Longest error [...]: that of `Direction`, and as much as a sketch can add to it."""
        d = x.shape[-1]
        most = (np.pi / 2 / d) ** 0.5 * np.linalg.norm(gaussian(d, STREAM), 2)
        return self.rough.error(x) * (1 + 1.01 * most)


def _normed(x):
    """Length [...] and direction [... d], float32; a zero vector has direction 0."""
    x = x.astype(jnp.float32)
    top = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), TINY)  # squares of x itself may overflow
    y = x / top[..., None]
    size = jnp.maximum(jnp.linalg.norm(y, axis=-1), TINY)
    return top * size, y / size[..., None]


def _project(x, matrix):
    return jnp.matmul(x, matrix, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def levels(d: int, bits: int) -> np.ndarray:
    """The 2**bits levels of least mean square error for a coordinate of a random unit vector of d
    dimensions, whose density is proportional to (1 - y^2) ** ((d - 3) / 2); float32, ascending."""
    y = min(10 / d**0.5, 1.0) * np.linspace(-1, 1, 100_001)[1:-1]
    weight = np.exp((d - 3) / 2 * np.log1p(-(y**2)))
    mass, moment = np.cumsum(weight), np.cumsum(weight * y)
    at = np.linspace(-2.5, 2.5, 2**bits) if bits > 1 else np.array([-1.0, 1.0])
    at = np.clip(at / d**0.5, -0.99, 0.99)
    for _ in range(5000):
        cut = (at[1:] + at[:-1]) / 2
        under, sums = (
            np.concatenate([[0.0], np.interp(cut, y, x), x[-1:]]) for x in (mass, moment)
        )
        new = np.diff(sums) / np.diff(under)
        done, at = np.abs(new - at).max() < 1e-9 / d**0.5, new
        if done:
            break
    return ((at - at[::-1]) / 2).astype(np.float32)  # symmetric


def _between(d, bits):
    made = levels(d, bits)
    return ((made[1:] + made[:-1]) / 2).astype(np.float32)


def _farthest(d, bits):
    """No unit vector is farther from its levels: half the widest gap in each coordinate, and at
    most its whole length beyond the last level."""
    half = float(np.diff(levels(d, bits)).max() / 2)
    return (d * half**2 + 1.0) ** 0.5
