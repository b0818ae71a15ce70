"""What a recipe asks of a budget."""

from kvjax import struct


@struct.dataclass
class Ask:
    """What a recipe asks of a row: numbers on the host."""

    length: int = struct.static(0)
    keep: float = struct.static(1.0)
    slots: int | None = struct.static(None)
    paper: bool = struct.static(False)  # count="paper": the card's own arithmetic
    window: int = struct.static(0)
    layers: int = struct.static(1)
    heads: int = struct.static(1)
    sinks: int = struct.static(0)

    @property
    def each(self) -> int:
        """Entries per head, window included."""
        if self.slots is not None:
            return min(self.slots, self.length)
        return max((int if self.paper else round)(self.keep * self.length), 1)

    @property
    def recent(self) -> int:
        """The window, shrunk to what is kept."""
        return min(self.window, self.each)
