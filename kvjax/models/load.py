"""Loads weights by name or path."""

from pathlib import Path
from typing import Any

from kvjax.config import ModelConfig
from kvjax.errors import InputError
from kvjax.models import fetch, gguf, safetensors
from kvjax.params import Params


def load_weights(
    name_or_path, dtype=None, *, unofficial=False, progress=None
) -> tuple[Params, ModelConfig, tuple[str, Any]]:
    """(weights, config, source) of a named model, a GGUF file, a Hugging Face folder or a hub name.

    `source` is ("gguf", metadata) or ("folder", path): where the tokenizer comes from. `dtype` is
    of weights, activations and exact cache: by default float32 from GGUF, as stored from a folder.
    """
    try:
        path = fetch.find(name_or_path, unofficial=unofficial, progress=progress)
        return _read(path, dtype)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"cannot read {name_or_path}: {reason}; check the path") from error


def _read(path: Path, dtype):
    if path.is_dir():
        return *safetensors.read(path, dtype), ("folder", path)
    if path.name.endswith(".safetensors"):
        raise InputError(f"{path} is one weight file; give the folder with its config.json")
    params, config, metadata = gguf.read(path, dtype)
    return params, config, ("gguf", metadata)
