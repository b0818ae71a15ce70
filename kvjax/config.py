"""What a model and a recipe are: frozen, hashable, JSON in and out."""

import dataclasses
import json
import typing
from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies of one kind of layer.

    scaling: "none", "linear" (positions divided by factor), "llama3" (Llama 3.1 report: low
    frequencies divided by factor, a ramp between), or "yarn" (arXiv:2309.00071, NTK by parts).
    """

    base: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    original_length: int = 0  # context before scaling (llama3, yarn)
    low: float = 1.0  # llama3 low_freq_factor
    high: float = 4.0  # llama3 high_freq_factor
    beta_fast: float = 32.0  # yarn: rotations at which extrapolation is complete
    beta_slow: float = 1.0  # yarn: rotations at which interpolation is complete
    attention_factor: float | None = None  # yarn: scales cos and sin; None is 0.1 ln(factor) + 1


@dataclass(frozen=True)
class LayerKind:
    """What layers of one kind see, and how they rotate."""

    window: int | None = None  # sliding window, counting the query itself; None sees everything
    rope: Rope = Rope()


@dataclass(frozen=True)
class Style:
    """The structural switches in which the families differ."""

    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3, Gemma 3: RMS norm over the head dim before RoPE
    post_norms: bool = False  # Gemma 3: norms after attention and after the mlp, before the sum
    gelu: bool = False  # Gemma 3: tanh GELU gate in place of SiLU
    unit_offset: bool = False  # Gemma 3: norms multiply by 1 + weight
    scaled_embedding: bool = False  # Gemma 3: embeddings times sqrt(model dim)
    tied: bool = True  # the output matrix is the embedding
    query_scale: float | None = None  # None is head_dim ** -0.5


@dataclass(frozen=True)
class ModelConfig:
    """Numbers of a decoder: sizes, the kinds of its layers, and their order."""

    family: str
    vocab: int
    width: int  # m
    mlp: int  # f
    heads: int  # h
    kv_heads: int  # n
    head_dim: int  # d, of keys and values
    kinds: tuple[LayerKind, ...]
    pattern: tuple[int, ...]  # for each layer, its index into kinds
    context: int  # the longest context the model was made for
    style: Style = Style()
    eps: float = 1e-6
    dtype: str = "float32"  # of activations and of the exact cache

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @property
    def scale(self) -> float:
        """What query-key products are multiplied by."""
        return self.style.query_scale or self.head_dim**-0.5

    def runs(self) -> tuple[tuple[int, int, LayerKind], ...]:
        """Maximal stretches (start, stop, kind) of neighbouring layers of one kind."""
        out = []
        for i, kind in enumerate(self.pattern):
            if out and self.pattern[out[-1][0]] == kind:
                out[-1][1] = i + 1
            else:
                out.append([i, i + 1])
        return tuple((a, b, self.kinds[self.pattern[a]]) for a, b in out)


@dataclass(frozen=True)
class Spec:
    """A method by its name in a table, with the options that differ from its defaults."""

    name: str
    options: tuple[tuple[str, str | bool | int | float | None], ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f",{k}={v}" for k, v in self.options)


@dataclass(frozen=True)
class Store:
    """How the older part is stored."""

    k: Spec = Spec("raw")  # codec of keys
    v: Spec = Spec("raw")  # codec of values
    page: int = 128  # slots a page
    positions: str = "keep"  # keep | rerot | read: cache/positions.py


@dataclass(frozen=True)
class Choice:
    """Which tokens of the older part are kept."""

    scorer: Spec
    budget: Spec = Spec("uniform")  # budgets.py
    slots: int | None = None  # entries per kv head, window included; None: keep decides
    sinks: int = 0  # the first tokens, always kept
    count: str = "exact"  # "paper": the card's own arithmetic


@dataclass(frozen=True)
class CacheRecipe:
    """What a cache keeps, how, and when; made by `kvjax.recipe`."""

    name: str = "exact"
    when: str = "during"  # "after": prefill is exact, then condenses; "during": as tokens arrive
    keep: float = 1.0  # fraction of token entries kept
    window: int = 0  # the newest tokens, kept exactly and never dropped
    stride: int = 32  # tokens between two compressions while decoding
    lookahead: int = 0  # room for drafts that may be taken back
    chunk: int = 512  # tokens a step of prefill; part of the result when="during"
    store: Store | None = None  # None: the exact cache, a tail and nothing else
    choice: Choice | None = None  # None: every token is kept
    fold: Spec | None = None  # features of a state that takes what eviction drops; None forgets
    reducer: Spec | None = None  # what stands for what condense drops: kvjax/reducers


def to_json(config) -> str:
    """JSON text of any frozen config of this module."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def from_json(kind, text: str):
    """The config of type `kind` that `to_json` wrote; unknown or missing fields are errors."""
    return _build(kind, json.loads(text), kind.__name__)


def _build(kind: typing.Any, value, where):
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object, got {type(value).__name__}")
        hints = typing.get_type_hints(kind)
        unknown = sorted(set(value) - set(hints))
        if unknown:
            raise ValueError(f"{where}: unknown field {unknown[0]!r}; it has {sorted(hints)}")
        needed = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
        missing = [n for n in needed if n not in value]
        if missing:
            raise ValueError(f"{where}: field {missing[0]!r} is missing")
        fields = {k: _build(hints[k], v, f"{where}.{k}") for k, v in value.items()}
        return typing.cast(typing.Any, kind)(**fields)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}: expected a list, got {type(value).__name__}")
        item = args[0] if len(args) == 2 and args[1] is Ellipsis else None
        kinds = [item] * len(value) if item else list(args)
        return tuple(_build(k, v, where) for k, v in zip(kinds, value, strict=True))
    if args:  # a union: None, or the first member that fits
        if value is None and type(None) in args:
            return None
        for member in args:
            try:
                return _build(member, value, where)
            except ValueError:
                continue
        raise ValueError(f"{where}: {value!r} fits none of {args}")
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    if kind is typing.Any or kind is object:
        return value
    raise ValueError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {value!r}")
