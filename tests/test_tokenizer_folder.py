"""Tokenizers of Hugging Face folders give the ids of the files they were read from."""

import json

import pytest
import tokenizers
from test_tokenizer import SENTENCE

from kvjax.errors import InputError
from kvjax.models import vocabulary
from kvjax.models.tokenizer import Tokenizer


def write_folder(folder, prefix_scheme="first"):
    """A folder with a small BPE: letters and bytes, controls inside and beyond the vocabulary."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    letters += [vocabulary.SPACE, *"abchi<>|", "ab", vocabulary.SPACE + "a"]
    vocab = {t: i for i, t in enumerate(letters)}
    model = tokenizers.models.BPE(
        vocab, [("a", "b"), (vocabulary.SPACE, "a")], unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prefix_scheme)
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|end|>"])
    backend.add_tokens(["<tool>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}<|end|>")
    return backend


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_folder_equals_the_file_it_was_read_from(tmp_path, scheme):
    backend = write_folder(tmp_path, scheme)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ("ab", " ab", "a b  c", "hi <tool> ab", "ab<|end|>ab</s> ab", "\u00e9", ""):
        assert tokenizer.encode(text, special=True) == backend.encode(text).ids, text
    end = backend.token_to_id("<|end|>")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.stop_ids == {2, 4, end}
    ids = tokenizer.encode_chat([{"role": "user", "content": "ab<|end|></s><s>"}])
    assert (ids.count(1), ids.count(2), ids.count(end)) == (1, 0, 1) and ids[-1] == end
    assert tokenizer.decode(tokenizer.encode("ab c <tool>\u00e9")) == "ab c <tool>\u00e9"
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_unigram_folder(tmp_path):
    backend = SENTENCE["spm_unigram"].vocabulary.backend
    data = json.loads(backend.to_str())
    data["model"]["vocab"] = [[name.strip() or name, s] for name, s in data["model"]["vocab"]]
    steps = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    data |= {"pre_tokenizer": steps | {"split": False}, "normalizer": None}
    control = [{"id": i, "content": t, "special": True} for i, t in enumerate(("<unk>", "<s>"))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data["added_tokens"] += [c | flags for c in control]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text in ("plain words", "<s> <0x0A> \u4f60 @@"):
        assert tokenizer.encode(text) == SENTENCE["spm_unigram"].encode(text, add_bos=False)
    assert tokenizer.encode("<s>", special=True) == [1]


def test_folder_flags_and_faults(tmp_path):
    with pytest.raises(InputError, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path)
    config = {"bos_token": "<s>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(tmp_path).encode("ab", special=True).count(1) == 0
    for text in ("[]", "{", '{"model": {"type": "WordPiece"}}', '{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(InputError):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("value", [None, 1, "x", [], [["x"]], {"content": 1}, [{"name": 1}]])
def test_config_of_wrong_types(tmp_path, value):
    write_folder(tmp_path)
    keys = ("bos_token", "eos_token", "chat_template", "add_bos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict.fromkeys(keys, value)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert Tokenizer.from_folder(tmp_path).encode("ab", add_bos=False)


def test_mutated_tokenizer_json(tmp_path):
    """Each entry of the file replaced in turn: a tokenizer or an InputError."""
    write_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = json.loads(file.read_text())
    paths = [(key,) for key in whole] + [("model", key) for key in whole["model"]]
    paths += [("added_tokens", 0), ("added_tokens", 0, "id"), ("added_tokens", 0, "content")]
    for path in paths:
        for junk in (None, -1, 10**12, "x", [], [None], {}, {"type": "BPE"}):
            data = json.loads(json.dumps(whole))
            place = data
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = junk
            file.write_text(json.dumps(data))
            try:
                Tokenizer.from_folder(tmp_path).encode("ab <s>", special=True)
            except InputError:
                pass
