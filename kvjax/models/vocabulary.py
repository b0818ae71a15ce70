"""Plain-text encoders out of GGUF metadata: what the tokenizer is built from.

The encoders know no control token: its entry in the vocabulary is renamed to begin with a space,
which no text contains once it is normalized, so that user text can never become one.
"""

import math
import re
from dataclasses import dataclass

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from kvjax.errors import InputError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types of GGUF
LONGEST = 256  # characters of a control token, and of a piece that merges are made for
SPACE = "\u2581"  # SentencePiece writes a space so
LOOKS_CONTROL = re.compile(
    r"<\|.*\|>|<(start|end)_of_\w+>|<(bos|eos|pad|unk|mask|s)>|</s>|\[/?INST\]", re.S
)
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
BYTE_NAME = r"<(?=0x[0-9A-F]{2}>)"  # a unigram text is cut here, lest it hold a byte's piece

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2, _DIGITS = "gpt2", "digits"
PRE = {  # tokenizer.ggml.pre: how text is cut before merges
    "default": _GPT2, "gpt-2": _GPT2, "gpt2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "stablelm2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip


@dataclass(frozen=True)
class Prefix:
    """Where SentencePiece-style encoders put a space in front of a text."""

    first: bool = False
    later: bool = False  # also to texts that follow a control token
    double: bool = False  # even where the text begins with a space


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A plain-text encoder, the bytes of each id, and the control tokens apart."""

    backend: tokenizers.Tokenizer
    pieces: tuple[bytes, ...]
    control: dict[str, int]
    prefix: Prefix = Prefix()
    patterns: dict[str, str] | None = None  # of control tokens that take white space with them


def hidden(text: str) -> str:
    """The name under which a control token stays in a vocabulary, out of reach of any text."""
    return " " + text


def check_control(control: dict[str, int]) -> dict[str, int]:
    """`control`, or InputError where one of its names is longer than any model's."""
    longest = max(map(len, control), default=0)
    if longest > LONGEST:
        raise InputError(
            f"a control token has {longest} characters where {LONGEST} are the most; "
            "the tokenizer is damaged: fetch it again"
        )
    return control


def byte_letters() -> dict[str, int]:
    """The letter of byte-level BPE for each byte, as GPT-2 chose them."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in seen]
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(rest)}


_LETTERS = byte_letters()


def byte_level_piece(text: str) -> bytes:
    if all(c in _LETTERS for c in text):
        return bytes(_LETTERS[c] for c in text)
    return text.encode("utf-8", "replace")


def sentence_piece(text: str) -> bytes:
    match = BYTE_PIECE.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace(SPACE, " ").encode()


def token_id(metadata: dict, key: str, size: int) -> int | None:
    """The id of the token with this role in GGUF metadata, or None where the file names none."""
    i = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if i is None or type(i) is int and 0 <= i < size:
        return i
    raise InputError(
        f"tokenizer.ggml.{key}_token_id is {i!r:.40} in a vocabulary of {size}; "
        "the file is damaged: fetch it again"
    )


def _gguf_lists(metadata: dict) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise InputError("the GGUF file has no tokenizer.ggml.tokens; convert it with a tokenizer")
    types = _list(metadata, "token_type", len(tokens)) or [NORMAL] * len(tokens)
    for key in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        i = token_id(metadata, key, len(tokens))
        if i is not None and types[i] == NORMAL:
            types[i] = CONTROL
    merges = metadata.get("tokenizer.ggml.merges")
    made = {m.replace(" ", "", 1) for m in merges if isinstance(m, str)} if merges else set()
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        plain = kind == NORMAL and token in made  # Qwen merges its way to an ordinary "<unk>"
        if kind == UNKNOWN or (
            kind in (USER, NORMAL) and not plain and LOOKS_CONTROL.fullmatch(token)
        ):
            types[i] = CONTROL
    return tokens, types


def _names(tokens: list[str], types: list[int]) -> list[str]:
    """Names under which the encoder holds the tokens: controls and repeated ones out of reach."""
    names, seen = [], set()
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        name = hidden(token) if kind in (CONTROL, UNUSED) else token
        name = f"  {i}" if name in seen or not name else name
        seen.add(name)
        names.append(name)
    return names


def from_gguf(metadata: dict) -> Vocabulary:
    """The vocabulary in the metadata of a GGUF file; models gpt2, llama (BPE) and t5 (unigram)."""
    tokens, types = _gguf_lists(metadata)
    kind = str(metadata.get("tokenizer.ggml.model"))
    build = {"gpt2": _gpt2, "llama": _llama, "t5": _unigram}.get(kind)
    if build is None:
        raise InputError(f"tokenizer.ggml.model is {kind!r}; kvjax reads gpt2, llama and t5")
    names = _names(tokens, types)
    try:
        backend = build(metadata, names, types)
        user = [tokenizers.AddedToken(names[i], normalized=False) for i in _where(types, USER)]
        backend.add_tokens(user)
    except InputError:
        raise
    except Exception as e:  # tokenizers raises bare exceptions
        raise InputError(f"the tokenizer in the GGUF file is damaged: {e!s:.200}") from None
    read = byte_level_piece if kind == "gpt2" else sentence_piece
    literal = (CONTROL, USER)
    pieces = [
        t.encode("utf-8", "replace") if k in literal else read(t)
        for t, k in zip(tokens, types, strict=True)
    ]
    control = check_control({tokens[i]: i for i in reversed(_where(types, CONTROL)) if tokens[i]})
    space = kind != "gpt2" and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return Vocabulary(backend, tuple(pieces), control, Prefix(space, space, space))


def _where(types, kind):
    return [i for i, k in enumerate(types) if k == kind]


def _gpt2(metadata, names, types):
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    if pre not in PRE:
        raise InputError(f"tokenizer.ggml.pre is {pre!r}; kvjax knows {', '.join(sorted(PRE))}")
    vocab = {name: i for i, name in enumerate(names)}
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges") or ()]
    if any(len(m) != 2 for m in merges):
        raise InputError("tokenizer.ggml.merges has an entry without a space; fetch the file again")
    whole_words = PRE[pre] is _LLAMA3
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=whole_words))
    backend.pre_tokenizer = _cut(PRE[pre])
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()  # as the published tokenizer.json has it
    return backend


def _cut(regex):
    if regex in (_GPT2, _DIGITS):
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if regex is _DIGITS else []
        return pre_tokenizers.Sequence([*digits, cut])
    split = pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _list(metadata, key, size) -> list:
    """A list of metadata with one entry for each token, or an empty one where it is absent."""
    found = metadata.get(f"tokenizer.ggml.{key}")
    found = [] if found is None else found
    if not isinstance(found, list) or len(found) not in (0, size):
        count = len(found) if isinstance(found, list) else "no"
        raise InputError(
            f"tokenizer.ggml.{key} has {count} entries for {size} tokens; "
            "the file is damaged: fetch it again"
        )
    return list(found)


def _scores(metadata, names):
    scores = [float(s) for s in _list(metadata, "scores", len(names))]
    if not scores or not all(map(math.isfinite, scores)):
        raise InputError(
            "tokenizer.ggml.scores is empty or not finite; the file is damaged: fetch it again"
        )
    return scores


def _llama(metadata, names, types):
    """SentencePiece BPE: of two neighbours those join whose joint piece scores highest."""
    scores = _scores(metadata, names)
    vocab = {name: i for i, name in enumerate(names)}
    whole = {name for name, kind in zip(names, types, strict=True) if kind == NORMAL}
    merges = []
    for name, kind, score in zip(names, types, scores, strict=True):
        if kind == NORMAL and len(name) <= LONGEST:
            cuts = ((name[:n], name[n:]) for n in range(1, len(name)))
            merges += [
                (-score, vocab[a], vocab[b], a, b) for a, b in cuts if a in whole and b in whole
            ]
    pairs = [pair[3:] for pair in sorted(merges)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id") or 0
    model = models.BPE(
        vocab, pairs, unk_token=names[unknown], fuse_unk=True, byte_fallback=BYTE in types
    )
    return _spaced(model)


def _unigram(metadata, names, types):
    table = list(zip(names, _scores(metadata, names), strict=True))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id") or 0
    backend = _spaced(models.Unigram(table, unknown, byte_fallback=BYTE in types))
    backend.pre_tokenizer = pre_tokenizers.Split(
        tokenizers.Regex(BYTE_NAME), "merged_with_previous"
    )
    return backend


def _spaced(model):
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE)
    return backend
