"""The axis letters and the array aliases used in signatures.

b batch   t new tokens   s slots   h query heads   n kv heads   g query heads per kv head
r budget rows   d key dim   e value dim   m model dim   f mlp dim   w vocabulary   l layers
    p pages   c ring slots   a arriving tokens
"""

from jaxtyping import Array, Bool, Float, Int, Key, Num

__all__ = ["Array", "Bool", "Float", "Int", "Key", "Num", "EMPTY"]

EMPTY = -1e30
"""Logit of a slot that is not seen: exp() of it is zero and gradients through it stay finite."""
