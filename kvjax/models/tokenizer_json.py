"""Plain-text encoders out of tokenizer.json, the tokenizer file of Hugging Face folders."""

import json
import re

import tokenizers

from kvjax.errors import InputError
from kvjax.models.vocabulary import (
    BYTE_NAME,
    LOOKS_CONTROL,
    SPACE,
    Prefix,
    Vocabulary,
    byte_level_piece,
    check_control,
    hidden,
    sentence_piece,
)


def from_json(data: dict) -> Vocabulary:
    """The vocabulary of a parsed tokenizer.json (BPE and Unigram)."""
    model = data.get("model") or {}
    if model.get("type") not in ("BPE", "Unigram"):
        raise InputError(
            f"tokenizer.json has a {model.get('type')!r} model; kvjax reads BPE, Unigram"
        )
    added = data.get("added_tokens") or []
    control = check_control({a["content"]: a["id"] for a in added if _is_control(a)})
    tokens = _hide(model, added, control)
    byte_level = '"ByteLevel"' in json.dumps([data.get("pre_tokenizer"), data.get("decoder")])
    data = dict(data, truncation=None, padding=None, post_processor=None, model=model)
    data["added_tokens"] = [a for a in added if a["content"] not in control]
    prefix = _take_prefix(data)
    if model["type"] == "Unigram":
        cut = {"type": "Split", "pattern": {"Regex": BYTE_NAME}, "invert": False}
        steps = [cut | {"behavior": "MergedWithPrevious"}, data.get("pre_tokenizer")]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [s for s in steps if s]}
    backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    literal = {a["id"] for a in added}
    read = byte_level_piece if byte_level else sentence_piece
    pieces = [
        t.encode("utf-8", "replace") if i in literal else read(t) for i, t in enumerate(tokens)
    ]
    return Vocabulary(backend, tuple(pieces), control, prefix, _patterns(added, control))


def _is_control(added) -> bool:
    return bool(added.get("special")) or LOOKS_CONTROL.fullmatch(added["content"]) is not None


def _patterns(added, control):
    out = {}
    for a in added:
        if a["content"] in control:
            left, right = (r"\s*" if a.get(side) else "" for side in ("lstrip", "rstrip"))
            out[a["content"]] = left + re.escape(a["content"]) + right
    return out


def _hide(model, added, control) -> list[str]:
    """Puts all added tokens into the model's vocabulary, controls renamed; returns all tokens."""
    unigram = model["type"] == "Unigram"
    vocab = {t: i for i, (t, _) in enumerate(model["vocab"])} if unigram else dict(model["vocab"])
    vocab |= {a["content"]: a["id"] for a in added}
    size = max(vocab.values(), default=-1) + 1
    if size > 2 * len(vocab) + 1000 or min(vocab.values(), default=0) < 0:
        raise InputError(
            f"tokenizer.json has id {size - 1} among {len(vocab)} tokens; it is damaged"
        )
    tokens = [""] * size
    for token, i in vocab.items():
        tokens[i] = token
    if unigram:
        scores = [s for _, s in model["vocab"]] + [0.0] * (size - len(model["vocab"]))
        names = [hidden(t) if t in control else t or f"  {i}" for i, t in enumerate(tokens)]
        model["vocab"] = list(zip(names, scores, strict=True))
    else:
        model["vocab"] = {hidden(t) if t in control else t: i for t, i in vocab.items()}
        pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges") or ())
        model["merges"] = [(a, b) for a, b in pairs if not {a, b, a + b} & control.keys()]
        if model.get("unk_token") in control:
            model["unk_token"] = hidden(model["unk_token"])
    return tokens


def _take_prefix(data) -> Prefix:
    """Removes the step that puts a space in front of texts, and says what it did."""
    found = Prefix()

    def walk(step):
        nonlocal found
        if isinstance(step, list):
            return [kept for kept in map(walk, step) if kept is not None]
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == SPACE:
            found = Prefix(True, True, True)
            return None
        if kind == "Metaspace":
            old = "always" if step.get("add_prefix_space") else "never"
            scheme = step.get("prepend_scheme", old)
            found = Prefix(scheme != "never", scheme == "always") if not found.first else found
            return {k: v for k, v in step.items() if k != "add_prefix_space"} | {
                "prepend_scheme": "never"
            }
        lists = {k: walk(v) for k, v in step.items() if k in ("normalizers", "pretokenizers")}
        return step | lists

    for key in ("normalizer", "pre_tokenizer"):
        if data.get(key):
            data[key] = walk(data[key])
    return found
