"""Frozen pytrees: flax's dataclass, typed so that a checker sees what it adds."""

from typing import TYPE_CHECKING, Any, Self, TypeVar, dataclass_transform

from flax import struct
from flax.struct import field

__all__ = ["Record", "dataclass", "field", "static"]

T = TypeVar("T")


@dataclass_transform(field_specifiers=(field,), frozen_default=True)
def dataclass(cls: type[T]) -> type[T]:
    """`flax.struct.dataclass`: a frozen dataclass whose fields are leaves, but for static ones."""
    return struct.dataclass(cls)


def static(default: T) -> T:
    """A field that is no leaf: hashable, and a change recompiles."""
    return field(pytree_node=False, default=default)


class Record:
    """Base of the pytrees that are updated: declares the `replace` that `dataclass` gives them."""

    if TYPE_CHECKING:

        def replace(self, **changes: Any) -> Self:
            """The same with some fields changed."""
            ...
