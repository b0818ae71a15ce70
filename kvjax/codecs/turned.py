"""Codes in another basis: vectors are turned by an orthogonal matrix, then coded.

Products of turned queries and turned keys are those of the vectors themselves, so whoever attends
turns the query once, reads keys and values as they lie, and turns back what comes out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Turned:
    """A codec whose `inside` codes what its `basis` has turned, with an error of `error(turned)`
    in length at most; all three are the subclass's."""

    @property
    def inside(self) -> Any:
        raise NotImplementedError

    def basis(self, d: int) -> np.ndarray:
        raise NotImplementedError

    def error(self, turned) -> Any:
        raise NotImplementedError

    def encode(self, x, valid=None):
        return self.inside.encode(self.turn(x), valid)

    def decode(self, codes, dtype):
        return self.back(self.inside.decode(codes, jnp.float32)).astype(dtype)

    def pack(self, codes):
        return self.inside.pack(codes)

    def unpack(self, stored, slots):
        return self.inside.unpack(stored, slots)

    @property
    def unit(self) -> int:
        return self.inside.unit

    def turn(self, x):
        """x [... d] in the basis of the codes, float32."""
        return _product(x, self.basis(x.shape[-1]).T)

    def back(self, x):
        """The vectors [... d] that were turned, float32."""
        return _product(x, self.basis(x.shape[-1]))

    def bound(self, x):
        """Largest error of an entry: all of that of the turned vector, and of turning it."""
        top = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
        d = x.shape[-1]
        return self.error(self.turn(x)) + 1e-6 * d * top


def _product(x, matrix):
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def hadamard(d: int) -> np.ndarray:
    """Signed Hadamard matrix [d d]; of other sizes than powers of 2 a random orthogonal one."""
    if d & (d - 1):
        return orthogonal(d)
    made = np.ones((1, 1))
    while len(made) < d:
        made = np.block([[made, made], [made, -made]])
    # signs, else a constant vector would be turned into a single number
    signs = np.random.default_rng([2404, 456, d]).choice([-1.0, 1.0], d)
    return (made * signs / d**0.5).astype(np.float32)


@functools.cache
def orthogonal(d: int) -> np.ndarray:
    """A random orthogonal matrix [d d], the same in every process."""
    q, r = np.linalg.qr(gaussian(d).astype(np.float64))
    return (q * np.sign(np.diag(r))).astype(np.float32)


@functools.cache
def gaussian(d: int, *stream: int) -> np.ndarray:
    """Standard normal numbers [d d], the same in every process; another stream, others."""
    made = np.random.default_rng([2504, 19874, d, *stream]).standard_normal((d, d))
    return made.astype(np.float32)
