"""Reads a model's numbers from config.json or from GGUF metadata."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvjax.config import LayerKind, ModelConfig, Style
from kvjax.errors import InputError

LARGEST = 1 << 24  # of any size: above every published one, small enough to multiply
MOST_LAYERS = 4096


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Typed look-ups in `values`; a missing or wrong one raises with its key and the place."""

    values: Mapping
    where: str
    prefix: str = ""

    def get(self, key, default=None):
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def wrong(self, key, wanted):
        return InputError(
            f"{self.where}: {self.prefix}{key} is {str(self.get(key))[:60]!r}, expected {wanted}; "
            "get the file again"
        )

    def count(self, key, default=None, most=LARGEST) -> int:
        """A whole number from 1 to `most`; a list counts if its entries agree."""
        value = self.get(key, default)
        if isinstance(value, (list, tuple)) and value and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, f"a whole number from 1 to {most}")
        return value

    def real(self, key, default=None) -> float:
        """A finite number above zero; a float32 becomes the shortest decimal that rounds to it."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.wrong(key, "a finite number above 0")
        short = float(str(np.float32(value)))
        return short if np.float32(value) == value else float(value)

    def flag(self, key, default) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def refuse(self, key, *allowed) -> None:
        """Raises unless the value is absent or one of `allowed`."""
        if self.get(key) is not None and self.get(key) not in allowed:
            raise InputError(
                f"{self.where}: {self.prefix}{key} is {str(self.get(key))[:60]!r}, and kvjax has "
                f"only {', '.join(map(repr, allowed)) or 'models without it'}; use another model"
            )


def sizes_from_hf(n: Numbers, head_dim=None) -> dict:
    """The sizes of a ModelConfig; `head_dim` where the file has none (None: width over heads)."""
    width, heads = n.count("hidden_size"), n.count("num_attention_heads")
    return dict(
        vocab=n.count("vocab_size"),
        width=width,
        mlp=n.count("intermediate_size"),
        heads=heads,
        kv_heads=n.count("num_key_value_heads", heads),
        head_dim=n.count("head_dim", head_dim or width // heads),
        eps=n.real("rms_norm_eps", 1e-6),
    )


def sizes_from_gguf(n: Numbers, shapes) -> dict:
    """The same from GGUF metadata; the vocabulary is the embedding's number of rows."""
    width, heads = n.count("embedding_length"), n.count("attention.head_count")
    head_dim = n.count("attention.key_length", width // heads)
    n.refuse("attention.value_length", head_dim)
    n.refuse("rope.dimension_count", head_dim)
    embed = shapes.get("token_embd.weight")
    if not embed:
        raise InputError(f"{n.where}: tensor token_embd.weight is missing; get the file again")
    return dict(
        vocab=embed[0],
        width=width,
        mlp=n.count("feed_forward_length"),
        heads=heads,
        kv_heads=n.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        eps=n.real("attention.layer_norm_rms_epsilon", 1e-6),
    )


def build(family, sizes, types, kinds: dict[str, LayerKind], context, style: Style, where):
    """The ModelConfig with one of `kinds` for each entry of `types`; checks that heads divide."""
    unknown = [t for t in types if t not in kinds]
    if unknown:
        raise InputError(
            f"{where}: layer type {str(unknown[0])[:40]!r} is not one of {sorted(kinds)}; "
            "use another model"
        )
    order = list(dict.fromkeys(kinds[t] for t in types))
    pattern = tuple(order.index(kinds[t]) for t in types)
    h, n, d = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    if h % n:
        raise InputError(
            f"{where}: {h} query heads do not divide by {n} kv heads; get the file again"
        )
    if d % 2:
        raise InputError(
            f"{where}: head_dim {d} is odd, RoPE needs an even one; get the file again"
        )
    return ModelConfig(
        family=family, kinds=tuple(order), pattern=pattern, context=context, style=style, **sizes
    )


def layer_types(n: Numbers, default) -> list[str]:
    """`layer_types` of a config.json, or `default(layers)`."""
    layers = n.count("num_hidden_layers", most=MOST_LAYERS)
    types = n.get("layer_types")
    if types is None:
        return default(layers)
    if not isinstance(types, list) or len(types) != layers:
        raise n.wrong("layer_types", f"a list of {layers} names")
    return [str(t) for t in types]
