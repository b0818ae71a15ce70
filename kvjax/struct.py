"""Frozen pytrees: flax's dataclass, typed so that a checker sees what it adds."""

import dataclasses
from typing import TYPE_CHECKING, Any, Self, TypeVar, dataclass_transform

from flax import struct
from flax.struct import field

from kvjax.errors import unknown

__all__ = ["Record", "build", "dataclass", "field", "static"]

T = TypeVar("T")


@dataclass_transform(field_specifiers=(field,), frozen_default=True)
def dataclass(cls: type[T]) -> type[T]:
    """`flax.struct.dataclass`: a frozen dataclass whose fields are leaves, but for static ones."""
    return struct.dataclass(cls)


def static(default: T) -> T:
    """A field that is no leaf: hashable, and a change recompiles."""
    return field(pytree_node=False, default=default)


def build(what: str, table, spec, fields=None):
    """The method of a table that `spec` names, with the spec's options and other `fields`."""
    if spec.name not in table:
        raise unknown(what, spec.name, table)
    given = dict(spec.options) | dict(fields or {})
    known = [f.name for f in dataclasses.fields(table[spec.name])]
    for name in given:
        if name not in known:
            raise unknown(f"option or table of {what} {spec.name!r}", name, known)
    return table[spec.name](**given)


class Record:
    """Base of the pytrees that are updated: declares the `replace` that `dataclass` gives them."""

    if TYPE_CHECKING:

        def replace(self, **changes: Any) -> Self:
            """The same with some fields changed."""
            ...
