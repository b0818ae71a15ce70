"""Writes the golden logits of tests/test_parity.py with Hugging Face transformers.

    python tests/golden/make_golden.py --gguf DIR/SmolLM2-135M-Instruct.Q4_1.gguf --text TEXT.xz

Needs: torch==2.13.0 transformers==5.2.0 gguf==0.19.0 sentencepiece==0.2.3 safetensors==0.8.0
(an environment of its own; neither the library nor its tests import them). Without --gguf it writes
the tiny models only. The token goldens are written by make_tokens.py beside this file.
"""

import argparse
import json
import lzma
import pathlib

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
LENGTH, VOCAB = 96, 64  # three times the original length of the scaled models, 12 windows
DEVIATION = 0.3

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    rope_theta=100.0,  # so small that each of few frequencies turns within 96 positions
    tie_word_embeddings=False,
)


def configs() -> dict[str, dict]:
    """config.json of each tiny model, spelled as checkpoints of the family are published."""
    llama3 = dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=100.0)
    newer = {k: v for k, v in SIZES.items() if k != "rope_theta"}  # rope_parameters hold the base
    plain = dict(rope_type="default", rope_theta=100.0)
    gemma = dict(
        num_hidden_layers=6,
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=8,
        sliding_window_pattern=3,
        rope_theta=1000.0,
        rope_local_base_freq=100.0,
        rope_scaling=dict(rope_type="linear", factor=8.0),
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
    )
    return {
        "llama": dict(SIZES, model_type="llama", rope_scaling=llama3),
        "llama-yarn": dict(
            newer, model_type="llama", rope_parameters=yarn, max_position_embeddings=128
        ),
        "llama-linear": dict(
            SIZES, model_type="llama", rope_scaling=dict(type="linear", factor=4.0)
        ),
        "mistral": dict(SIZES, model_type="mistral", sliding_window=8),
        "qwen2": dict(SIZES, model_type="qwen2", use_sliding_window=False, sliding_window=8),
        "qwen3": dict(
            newer, model_type="qwen3", head_dim=16, rope_parameters=plain, tie_word_embeddings=True
        ),
        "gemma3": dict(SIZES, model_type="gemma3_text", **gemma),
    }


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def randomize(model, seed: int):
    """Normal weights and biases of DEVIATION; norms vary by it around one."""
    rng = np.random.default_rng(seed)
    for name, value in sorted(model.named_parameters()):
        draw = DEVIATION * rng.standard_normal(value.shape)
        plain_norm = "norm" in name and model.config.model_type != "gemma3_text"  # 1 + w there
        value.data.copy_(torch.from_numpy(draw + (1.0 if plain_norm else 0.0)))


def save_weights(model, folder: pathlib.Path, sharded: bool):
    """model.safetensors, or two files with an index."""
    tensors = {k: v.detach().contiguous() for k, v in model.named_parameters()}
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, where = sorted(tensors), {}
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({k: tensors[k] for k in chosen}, folder / file, metadata={"format": "pt"})
        where |= {k: file for k in chosen}
    size = sum(v.nbytes for v in tensors.values())
    index = dict(metadata=dict(total_size=size), weight_map=where)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def run(folder: pathlib.Path, ids: np.ndarray) -> np.ndarray:
    """Logits of the model that transformers reads back from `folder`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids), use_cache=False).logits.numpy()


def make_tiny(name: str, config: dict, seed: int):
    folder = HERE / "tiny" / name
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(
        config, architectures=[ARCHITECTURES[config["model_type"]]], torch_dtype="float32"
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    parsed = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(parsed, attn_implementation="eager")
    randomize(model, seed)
    save_weights(model, folder, sharded=name == "llama")
    ids = np.random.default_rng(seed).integers(0, VOCAB, (2, LENGTH))
    logits = run(folder, ids)
    np.savez_compressed(folder / "logits.npz", ids=ids.astype(np.int32), logits=logits)
    print(f"{name}: logits of deviation {logits.std():.3f}, largest {np.abs(logits).max():.2f}")


def make_smollm2(gguf: pathlib.Path, text: str):
    """512 tokens: logsumexp and the 20 best everywhere, whole logits at four positions."""
    name = dict(gguf_file=gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **name)
    ids = tokenizer(text[200_000:204_000], add_special_tokens=False)["input_ids"][:512]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, **name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids]), use_cache=False).logits[0]
    values, best = logits.topk(20, dim=-1)
    positions = np.array([0, 1, 255, 511])
    np.savez_compressed(
        HERE / "smollm2.npz",
        ids=np.array(ids, np.int32),
        logsumexp=logits.logsumexp(-1).numpy(),
        best=best.numpy().astype(np.int32),
        best_logits=values.numpy(),
        positions=positions,
        logits=logits[positions].numpy(),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path, help="a UTF-8 text, xz-packed")
    args = parser.parse_args()
    for seed, (name, config) in enumerate(configs().items(), 1):
        make_tiny(name, config, seed)
    if args.gguf:
        make_smollm2(args.gguf, lzma.decompress(args.text.read_bytes()).decode())


if __name__ == "__main__":
    main()
