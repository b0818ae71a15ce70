"""Text to token ids and back, where user text can never become a control token."""

import codecs
import functools
import json
import pathlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvjax.errors import InputError
from kvjax.models import chat as chats
from kvjax.models import tokenizer_json, vocabulary
from kvjax.models.vocabulary import Vocabulary

STOPS = (  # ends of a turn or of a text, by the names that published models give them
    "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
    "<|end_of_text|>", "<|eos|>", "<eos>", "</s>",
)  # fmt: skip
FILE_BYTES = 256 << 20  # the largest tokenizer.json that is read


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its rules; frozen and safe to share."""

    vocabulary: Vocabulary
    bos: int | None = None
    eos: int | None = None
    stop_ids: frozenset[int] = frozenset()
    add_bos: bool = False  # whether encode puts bos in front
    template: str | None = None  # of chats, in jinja

    @classmethod
    def from_gguf(cls, metadata: dict) -> "Tokenizer":
        """The tokenizer in the metadata of a GGUF file: plain lists, strings and numbers."""
        words = vocabulary.from_gguf(metadata)
        size = len(words.pieces)
        ids = {k: vocabulary.token_id(metadata, k, size) for k in ("bos", "eos", "eot", "eom")}
        llama3 = str(metadata.get("tokenizer.ggml.pre")) in ("llama-bpe", "llama3", "llama-v3")
        usual = metadata.get("tokenizer.ggml.model") == "llama" or llama3
        add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", usual))
        stops = _stops(words, (ids["eos"], ids["eot"], ids["eom"]))
        template = metadata.get("tokenizer.chat_template")
        template = template if isinstance(template, str) else None
        return cls(words, ids["bos"], ids["eos"], stops, add_bos, template)

    @classmethod
    def from_folder(cls, path) -> "Tokenizer":
        """The tokenizer of a Hugging Face folder: tokenizer.json and the configs beside it."""
        folder = pathlib.Path(path)
        data = _read(folder / "tokenizer.json")
        if data is None:
            raise InputError(f"{folder} has no tokenizer.json; save a fast tokenizer there")
        config = _read(folder / "tokenizer_config.json") or {}
        ends = (_read(folder / "generation_config.json") or {}).get("eos_token_id")
        try:
            special = {k: _text(config.get(f"{k}_token")) for k in ("bos", "eos")}
            first = _first_special(data.get("post_processor"))
            special["bos"] = special["bos"] or first
            words = tokenizer_json.from_json(data)
        except InputError:
            raise
        except Exception as e:  # tokenizers raises bare exceptions
            raise InputError(f"{folder / 'tokenizer.json'} is damaged: {e!s:.200}") from None
        bos, eos = (words.control.get(special[k] or "") for k in ("bos", "eos"))
        add_bos = config.get("add_bos_token")
        add_bos = (first is not None and first == special["bos"]) if add_bos is None else add_bos
        stops = _stops(words, (eos, *(ends if isinstance(ends, list) else [ends])))
        return cls(words, bos, eos, stops, bool(add_bos), _template(folder, config))

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.pieces)

    @functools.cached_property
    def _pattern(self) -> re.Pattern:
        """Matches any control token, the longest first."""
        own = self.vocabulary.patterns or {}
        names = sorted(self.vocabulary.control, key=len, reverse=True)
        return re.compile("|".join(own.get(n) or re.escape(n) for n in names) or r"(?!)")

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.vocabulary.control.values())

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`; names of control tokens in it are text unless `special`."""
        ids = self._ids(self._split(text) if special else [text])
        return self._with_bos(ids, self.add_bos if add_bos is None else add_bos)

    def _split(self, text: str) -> list[str | int]:
        """Texts, and the ids of the control tokens between them."""
        out, start = [], 0
        for match in self._pattern.finditer(text):
            name = match[0] if match[0] in self.vocabulary.control else match[0].strip()
            out += [text[start : match.start()], self.vocabulary.control[name]]
            start = match.end()
        return [*out, text[start:]]

    def _ids(self, parts: Iterable[str | int]) -> list[int]:
        ids, prefix = [], self.vocabulary.prefix
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                wanted = prefix.later if ids else prefix.first
                add = wanted and (prefix.double or part[0] != " ")
                ids += self._plain(" " + part if add else part)
        return ids

    def _plain(self, text: str) -> list[int]:
        try:
            return self.vocabulary.backend.encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError):
            raise InputError("the text holds half a surrogate pair; decode it as UTF-8") from None
        except Exception as e:  # tokenizers raises bare exceptions
            raise InputError(f"the tokenizer cannot encode this text: {e!s:.200}") from None

    def _with_bos(self, ids: list[int], add: bool) -> list[int]:
        if not add or self.bos is None:
            return ids
        start = next((i for i, x in enumerate(ids) if x != self.bos), len(ids))
        return [self.bos, *ids[start:]]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no whole character become U+FFFD."""
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(i) for i in ids]) + stream.finish()

    def stream(self, *, skip_special: bool = True) -> "Stream":
        """A decoder that takes one id at a time."""
        return Stream(self, skip_special)

    def chat(self, messages: list[dict], *, add_generation_prompt: bool = True) -> str:
        """The chat as text, for reading; ids come from `encode_chat`.

        The template sees bos_token only where the metadata ask for it.
        """
        if self.template is None:
            raise InputError("this tokenizer has no chat template; pass plain text instead")
        names: dict[int | None, str] = {i: name for name, i in self.vocabulary.control.items()}
        return chats.render(
            self.template,
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=names.get(self.bos, "") if self.add_bos else "",
            eos_token=names.get(self.eos, ""),
            tools=None,
            documents=None,
        )

    def encode_chat(self, messages: list[dict], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the chat; only the template itself can write control tokens.

        One bos leads where the metadata ask for it; elsewhere a leading one is dropped, unless it
        comes again: then the template uses it to open turns.
        """
        shielded, mark = chats.shield(messages, self.vocabulary.control, self._pattern)
        text = self.chat(shielded, add_generation_prompt=add_generation_prompt)
        parts = [p.replace(mark, "") if isinstance(p, str) else p for p in self._split(text)]
        ids = self._ids(parts)
        if self.add_bos:
            return self._with_bos(ids, True)
        alone = bool(ids) and ids[0] == self.bos and ids.count(ids[0]) == 1
        return ids[1:] if alone else ids


class Stream:
    """An incremental decoder: `push` returns the characters that an id completes."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._pieces = tokenizer.vocabulary.pieces
        self._skipped = tokenizer._control_ids if skip_special else frozenset()
        self._strip = tokenizer.vocabulary.prefix.first
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        token = int(token)
        if not 0 <= token < len(self._pieces):
            raise InputError(f"token id {token} is outside the vocabulary of {len(self._pieces)}")
        piece = b"" if token in self._skipped else self._pieces[token]
        if piece and self._strip:
            piece, self._strip = piece.removeprefix(b" "), False
        return self._bytes.decode(piece)

    def finish(self) -> str:
        """What is left: U+FFFD where the bytes end inside a character."""
        return self._bytes.decode(b"", True)


def _stops(words: Vocabulary, ids) -> frozenset[int]:
    named = [words.control[name] for name in STOPS if name in words.control]
    given = [i for i in ids if isinstance(i, int) and 0 <= i < len(words.pieces)]
    return frozenset([*named, *given])


def _read(path: pathlib.Path):
    """The object in a JSON file, or None where there is no such file."""
    if not path.is_file():
        return None
    if path.stat().st_size > FILE_BYTES:
        raise InputError(f"{path} has {path.stat().st_size} bytes; at most {FILE_BYTES} are read")
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path} is no JSON text: {e!s:.100}; fetch it again") from None
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}, not an object; fetch it again")
    return data


def _text(token) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _first_special(step) -> str | None:
    """The special token that a post-processor puts first, if any."""
    for part in (step or {}).get("processors", [step or {}]):
        first = (part.get("single") or [{}])[0]
        if "SpecialToken" in first:
            return first["SpecialToken"]["id"]
    return None


def _template(folder: pathlib.Path, config: dict) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeError:
            raise InputError(f"{file} is not UTF-8 text; fetch it again") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = [t for t in found if isinstance(t, dict) and t.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None
