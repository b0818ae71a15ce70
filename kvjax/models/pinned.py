"""A model file that lies in pinned packages of the Python package index."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Pinned:
    """Which packages hold the file, and what it must be, byte for byte."""

    file: str  # name in the cache folder
    bytes: int
    sha256: str
    parts: tuple[tuple[str, str], ...]  # (package==version, end of the member's path), in order
    licence: str
    unofficial: str | None = None  # what a re-upload is; such a one needs an explicit flag


def parts(package: str, version: str, member: str, first: int, count: int):
    """The parts of a file cut into `count` packages; `member` is formatted with i from `first`."""
    return tuple((f"{package}{n + 1}=={version}", member.format(i=first + n)) for n in range(count))
