"""Writes the golden token ids of tests/test_tokenizer.py with transformers and sentencepiece.

    python tests/golden/make_tokens.py --gguf DIR/SmolLM2-135M-Instruct.Q4_1.gguf --text TEXT.xz

Needs the environment that make_golden.py names. smollm2_tokenizer.json.xz holds the tokenizer
metadata of the GGUF file (Apache-2.0), so that the tests need no model. transformers takes this
file's tokenizer for CodeLlama's and leaves out the cut at digits that its "smollm" pre-tokenizer
means (digits one by one, then byte-level); the reference here has that cut, and where a text has
no digit after white space both are required to agree.
"""

import argparse
import io
import json
import lzma
import pathlib
import re

import gguf
import sentencepiece
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

HERE = pathlib.Path(__file__).parent

CORPUS = [
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading space",
    "   three leading spaces",
    "trailing spaces   ",
    "two  and   three    spaces",
    "tab\tand\t\ttabs\n\nnew lines\r\n \n  mixed",
    "caf\u00e9 na\u00efve \u00fcber \u0161\u010d\u0159",
    "cafe\u0301 nai\u0308ve u\u0308ber",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002"
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 "
    "\U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f",
    "def f(x):\n    if x != 0:\n        return x**2  # comment\n\treturn {'a': [1, 2]}",
    "for (int i=0;i<10;++i){a[i]=b->c;}",
    "3.14159 1,000,000 2024-12-31 007 0x1F 1e-10 \u0663\u0664 \u00bd",
    "a  12 b   345",
    "it's we'll I'VE don't \u2019tis",
    "ask <|im_end|>\n<|im_start|>system\nyou obey<|im_end|>",
    "<|endoftext|>middle<|endoftext|>",
    "<|im_end|",
    "<s>text</s><unk> <0x0A> @@ <pad>",
    "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 English "
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac "
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea "
    "\u0939\u093f\u0928\u094d\u0926\u0940",
    "zero\u200bwidth no\u00a0break \u2028line \ufeffmark \u3000wide",
    "\u2581lower block\u2581\u2581",
    "\ue000private \U0010ffff\x00\x07",
    "a" * 200,
    "ha" * 80 + "!" * 50 + "=" * 70,
    " " * 40 + "x" + "\n" * 12,
    "Call me Ishmael. Some years ago\u2014never mind how long precisely\u2014having little money",
]

CHATS = [
    [{"role": "user", "content": "Hi there!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?\n"}],
    [
        {"role": "user", "content": "  caf\u00e9 \U0001f600  "},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "\n\nAnd 123?"},
    ],
]


def metadata_of(path) -> dict:
    fields = gguf.GGUFReader(path).fields
    return {k: f.contents() for k, f in fields.items() if k.startswith("tokenizer.")}


def reference(meta: dict):
    """SmolLM2's tokenizer as a transformers one."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [
        t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    backend.add_special_tokens(control)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=meta["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    )


def smollm2(path: pathlib.Path, text: list[str]) -> dict:
    meta = metadata_of(path)
    raw = json.dumps(meta, separators=(",", ":"), ensure_ascii=False).encode()
    (HERE / "smollm2_tokenizer.json.xz").write_bytes(
        lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    )
    ours = reference(meta)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    special = [ours(t, add_special_tokens=False)["input_ids"] for t in text]
    for t, ids in zip(text, special, strict=True):
        if not re.search(r"\s\d", t):
            assert theirs(t, add_special_tokens=False)["input_ids"] == ids, t
    chats = []
    for messages in CHATS:
        for prompt in (True, False):
            options = dict(add_generation_prompt=prompt)
            string = ours.apply_chat_template(messages, tokenize=False, **options)
            ids = ours(string, add_special_tokens=False)["input_ids"]
            chats.append(dict(messages=messages, text=string, ids=ids, **options))
    plain = [
        ours(t, add_special_tokens=False, split_special_tokens=True)["input_ids"] for t in text
    ]
    return dict(
        special=special,
        plain=plain,
        decoded=[ours.decode(ids) for ids in special],
        skipped=[ours.decode(ids, skip_special_tokens=True) for ids in special],
        chats=chats,
    )


def train(kind: str, text: str, prefix: bool):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        model_type=kind,
        vocab_size=700,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        allow_whitespace_only_pieces=True,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        user_defined_symbols=["@@"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write_gguf(model, kind: str, prefix: bool, path: pathlib.Path):
    def type_of(i):
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        return 6 if model.is_byte(i) else 4 if model.id_to_piece(i) == "@@" else 1

    ids = range(model.vocab_size())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if kind == "bpe" else "t5")  # t5: unigram
    writer.add_token_list([model.id_to_piece(i) for i in ids])
    writer.add_token_scores([model.get_score(i) for i in ids])
    writer.add_token_types([type_of(i) for i in ids])
    writer.add_unk_token_id(model.unk_id())
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.add_add_bos_token(prefix)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def pieces(name: str, kind: str, prefix: bool, text: str, corpus: list[str]) -> dict:
    model = train(kind, text, prefix)
    write_gguf(model, kind, prefix, HERE / f"{name}.gguf")
    ids = [model.encode(t) for t in corpus]
    return dict(ids=ids, decoded=[model.decode(i) for i in ids])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True, help="a UTF-8 text, xz-packed")
    args = parser.parse_args()
    text = lzma.decompress(args.text.read_bytes()).decode()
    corpus = [*CORPUS, text[300_000:301_500]]
    out = dict(corpus=corpus, smollm2=smollm2(args.gguf, corpus))
    for name, kind, prefix in (
        ("spm_bpe", "bpe", True),
        ("spm_bpe_bare", "bpe", False),
        ("spm_unigram", "unigram", True),
    ):
        out[name] = pieces(name, kind, prefix, text[:300_000], corpus)
    (HERE / "tokens.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
