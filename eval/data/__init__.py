"""The questions that ship with the package."""

import json

from kvjax.data import unpacked
from kvjax.errors import unknown

SHA256 = {  # of each unpacked file
    "icl_langid": "d53a878cc41e62f9f8bb8ae21e3f124a45b446872c28b42388b8f8e6a11d375e",
    "mmlu_shots": "7cb11c1394662036b07a951570d22e7bbf4410c4e0d6dafdc70fafc10a1cc351",
    "moby_cloze": "57b3d4760a98354ee90e93a546b01cb6bccb42a3f1e26caae40f780153cb2be9",
}


def lines(name: str) -> list[dict]:
    """The records of the shipped file `name`.jsonl.xz, in order."""
    if name not in SHA256:
        raise unknown("shipped file", name, SHA256)
    text = unpacked(__name__, f"{name}.jsonl.xz", SHA256[name])
    return [json.loads(line) for line in text.splitlines()]
