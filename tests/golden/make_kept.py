"""Writes kept.npz, what NVIDIA kvpress scores and keeps of SmolLM2, with kvpress itself.

    python tests/golden/make_kept.py --gguf DIR/SmolLM2-135M-Instruct.Q4_1.gguf --text TEXT.xz

TEXT.xz is kvjax/data/moby_dick.txt.xz. Needs: torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
gguf==0.19.0 (an environment of its own, which tests do not need). Float32, on the CPU, in minutes.

The texts are "long", T = 640 tokens, and "short", T = 333; l = 30 layers, n = 3 kv heads. The
kvzip methods read the chat template's beginning first, p tokens, so their T is p more. METHODS and
KVZIP below say what each method is. In kept.npz, with TEXT and METHOD for the names:

    keeps                    float64 [2]        shares of the entries to keep, 0.5 and 0.25
    layers                   int32 [3]          layers whose scores are stored
    stride                   int32              scores are stored of every stride-th position
    prefix                   int32              p
    TEXT.ids                 int32 [T]          tokens read
    TEXT.kvzip.ids           int32 [p + T]      tokens read by the kvzip methods
    TEXT.kvzip.repeat0       int32 [q]          tokens read after them to score the one chunk
    TEXT.kvzip_256.repeatN   int32 [q]          the same for chunk N, which ends these
    TEXT.METHOD.kept         uint8 [2, bytes]   for each of keeps the mask [l, n, T] of entries kept
    TEXT.METHOD.near         uint8 [2, bytes]   the same of entries near the threshold
    long.METHOD.scores       float32 [3, n, T'] scores of layers at positions 0, stride, ...

A mask is np.packbits of its bool array: np.unpackbits(row, count=l * n * T).reshape(l, n, T). It is
read off the cache that kvpress leaves, or the entries it marks as dead. Entries compete in a pool:
those of a kv head; for adakv and kvzip_layerwise of a layer, for the other kvzip of the model; for
chunkkv the chunks of a layer do. The threshold is half way from the worst score kept to the best
dropped; near is within 1e-5 of its size, or 1e-12. Where adakv leaves a head no more than its
safeguard, the head's own threshold counts too. A scorer's own protection (a larger score) is in its
scores, kvzip's of the sinks is not.
"""

import argparse
import copy
import lzma
import pathlib
from types import SimpleNamespace

import kvpress
import numpy as np
import torch
import transformers
from kvpress.presses import kvzip_press
from kvpress.utils import compute_n_kept

PATH = pathlib.Path(__file__).parent / "kept.npz"
TEXTS = {"long": (300_000, 640), "short": (700_000, 333)}  # first character, tokens
KEEPS = (0.5, 0.25)
LAYERS, STRIDE = (0, 13, 29), 3  # of the scores that are stored
NEAR, FLOOR = 1e-5, 1e-12


def finch(ratio):
    """The last 64 tokens are the question, as its delimiter would say, which is never met here."""
    press = kvpress.FinchPress(ratio, rerotate_keys=False)
    press.window_size, press.delimiter_token_id = 64, -1
    return press


def snap(ratio, window=64):
    return kvpress.SnapKVPress(ratio, window_size=window, kernel_size=5)


METHODS = {  # compression ratio -> press; adakv's alpha and expected attention's are defaults
    "snapkv": snap,
    "pyramidkv": lambda r: kvpress.PyramidKVPress(r, window_size=64, kernel_size=5, beta=20),
    # A window of 64 falls back to even layers at keep 0.25 of these lengths; this does not.
    "pyramidkv_16": lambda r: kvpress.PyramidKVPress(r, window_size=16, kernel_size=5, beta=5),
    "tova": kvpress.TOVAPress,
    "knorm": kvpress.KnormPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "keydiff": kvpress.KeyDiffPress,
    "streaming_llm": lambda r: kvpress.StreamingLLMPress(r, n_sink=4),
    "finch": finch,
    "chunkkv_knorm": lambda r: kvpress.ChunkKVPress(kvpress.KnormPress(r), chunk_length=20),
    "chunkkv_snapkv": lambda r: kvpress.ChunkKVPress(snap(r, window=60), chunk_length=20),
    "adakv_snapkv": lambda r: kvpress.AdaKVPress(snap(r)),
    "adakv_expected_attention": lambda r: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(r)),
}
# Of eager attention. Beside it "column_sums", which kvpress has not: the same attention summed over
# queries, averaged over a group's heads, the best of each kv head.
OBSERVED = {"observed_attention": kvpress.ObservedAttentionPress}
KVZIP = {  # sinks 4, chunks of 2048 tokens unless said; "kvzip_layerwise" is "kvzip", layerwise
    "kvzip": lambda: kvpress.KVzipPress(0.5),
    "kvzip_256": lambda: kvpress.KVzipPress(0.5, chunk_size=256),
    "kvzip_plus": lambda: kvpress.KVzipPress(0.5, kvzip_plus_normalization=True),
}
SCORED = "snapkv tova knorm expected_attention keydiff finch observed_attention column_sums".split()
SCORED += KVZIP  # the scores of the others are scores of these, or follow from positions


def near(scores, kept):
    """Which scores [pool, entry] are too near to the pool's threshold to say if they are kept."""
    scores = scores.astype(np.float64)
    worst = np.where(kept, scores, np.inf).min(-1, keepdims=True)
    top = np.where(kept, -np.inf, scores).max(-1, keepdims=True)
    assert (worst >= top).all(), "an entry is dropped that scores more than one kept"
    threshold = (worst + top) / 2  # infinite, and nothing near, if all or none are kept
    return abs(scores - threshold) < np.maximum(NEAR * abs(threshold), FLOOR)


def near_adakv(scores, kept, n_safe):
    """[l n t]: of the layer's pool without what heads are sure to keep, and of heads left that."""
    safe = best(scores, n_safe)
    pool = np.where(safe, np.finfo(np.float32).max, scores).reshape(len(scores), -1)
    flags = near(pool, kept.reshape(pool.shape)).reshape(scores.shape)
    bound = (kept == safe).all(-1)
    flags[bound] |= near(scores[bound], kept[bound])
    return flags


def near_chunks(scores, kept, size=20):
    """[l n t]: of chunks, by the sum over heads of their mean."""
    starts, total = range(0, scores.shape[2], size), scores.sum(1)
    means = np.stack([total[:, i : i + size].mean(-1) for i in starts], 1)
    whole = kept[:, 0, ::size]
    spread = np.stack([near(means, whole), whole]).repeat(size, -1)[..., None, : scores.shape[2]]
    assert (kept == spread[1]).all(), "a chunk is kept in part"
    return np.broadcast_to(spread[0], kept.shape)


def best(scores, count):
    kept = np.zeros(scores.shape, bool)
    np.put_along_axis(kept, np.argsort(-scores, -1, kind="stable")[..., :count], True, -1)
    return kept


def left(full, cache):
    """Mask [l n t] of the keys of a full cache that a cache still holds, found by their bytes."""
    mask = np.zeros((len(full.layers), *full.layers[0].keys.shape[1:3]), bool)
    for layer, n in np.ndindex(mask.shape[:2]):
        where = {row.tobytes(): t for t, row in enumerate(full.layers[layer].keys[0, n].numpy())}
        held = [where[row.tobytes()] for row in cache.layers[layer].keys[0, n].numpy()]
        mask[layer, n, held] = True
        assert len(where) == mask.shape[2] and mask[layer, n].sum() == len(held)
    return mask


def alive(model, shape):
    """Mask [l n t] of the entries that a press did not mark as dead."""
    mask = np.ones(shape, bool)
    for layer, row in zip(model.model.layers, mask, strict=True):
        _, heads, positions = layer.self_attn.masked_key_indices
        row[heads.numpy(), positions.numpy()] = False
        assert (~row).sum() == len(heads)
        layer.self_attn.masked_key_indices = None
    return mask


def read(model, ids):
    """The cache of a text, and what each attention layer was called with and gave."""
    calls, hooks = [], []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress does
        hook = layer.self_attn.register_forward_hook
        hooks.append(hook(lambda *call: calls.append(call), with_kwargs=True))
    cache = transformers.DynamicCache()
    model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return cache, calls


def run(model, reading, press):
    """(scores, kept, near), all [l n t]. Presses act after attention: one reading serves them."""
    full, calls = reading
    cache = transformers.DynamicCache()
    cache.layers = [copy.copy(layer) for layer in full.layers]
    scorer = getattr(press, "press", press)
    score, scores = scorer.score, []

    def spy(*args):
        scores.append(score(*args))
        return scores[-1].clone()  # AdaKV writes into it

    scorer.score = spy
    press.post_init_from_model(model)
    for module, args, kwargs, output in calls:
        press.forward_hook(module, args, kwargs | {"past_key_values": cache}, output)
    scores = torch.cat(scores).numpy()
    if isinstance(press, kvpress.AdaKVPress):
        kept = alive(model, scores.shape)
        n_kept = compute_n_kept(scores.shape[2], press.compression_ratio)
        return scores, kept, near_adakv(scores, kept, max(1, int(n_kept * press.alpha_safeguard)))
    kept = left(full, cache)
    chunks = isinstance(press, kvpress.ChunkKVPress)
    return scores, kept, near_chunks(scores, kept) if chunks else near(scores, kept)


def check_whole(model, ids, full, kept):
    """SnapKV around a model that reads the text, as kvpress is used, keeps the same."""
    cache = transformers.DynamicCache()
    with snap(1 - KEEPS[0])(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
    assert np.array_equal(left(full, cache), kept)


def run_kvzip(model, tokenizer, ids, press):
    """({layerwise: (scores, kept, near) of each of KEEPS}, ids of each pass); it scores once."""
    kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: tokenizer)
    prepare, finish, repeats, runs = press.prepare, press.compress_post, [], {False: [], True: []}

    def spy_prepare(*args):
        assert press.prefix_length == len(beginning(tokenizer)) >= press.n_sink
        repeats.extend(prepare(*args))
        return repeats

    def spy_finish(model):
        scores = press.score_val.clone()
        for layerwise in runs:
            for keep in KEEPS:
                press.layerwise, press.compression_ratio = layerwise, 1 - keep
                press.score_val = scores.clone()
                finish(model)
                ranked = press.score_val[:, 0].numpy()
                kept = alive(model, ranked.shape)
                pools = (len(ranked) if layerwise else 1, -1)
                flags = near(ranked.reshape(pools), kept.reshape(pools)).reshape(kept.shape)
                runs[layerwise].append((scores[:, 0].numpy(), kept, flags))

    press.prepare, press.compress_post = spy_prepare, spy_finish
    with press(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=transformers.DynamicCache())
    return runs, [repeat[0].numpy() for _, repeat in repeats]


def beginning(tokenizer):
    """Ids of what the chat template puts before a user's text."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "dummy"}], tokenize=False)
    return tokenizer.encode(text.split("dummy")[0], add_special_tokens=False)


def add(arrays, text, method, runs):
    """Stores and prints runs, which are (scores [l n t], kept, near) of each of KEEPS."""
    for name, index in (("kept", 1), ("near", 2)):
        arrays[f"{text}.{method}.{name}"] = np.stack([np.packbits(one[index]) for one in runs])
    if text == "long" and method in SCORED:
        scores = runs[0][0]
        assert np.isfinite(scores).all() and np.array_equal(scores, runs[1][0])
        arrays[f"{text}.{method}.scores"] = scores[list(LAYERS), :, ::STRIDE]
    for keep, (_, kept, flags) in zip(KEEPS, runs, strict=True):
        heads = kept.sum(-1)
        row = f"{text:6}{method:25}{keep:5}{kept.shape[-1]:5}{heads.min():5}{heads.max():5}"
        print(f"{row}{kept.sum():8}{flags.sum():6}", flush=True)


def add_text(arrays, model, tokenizer, text, ids):
    """Everything of one text."""
    arrays[f"{text}.ids"] = np.array(ids)
    for attention, methods in (("eager", OBSERVED), ("sdpa", METHODS)):
        model.set_attn_implementation(attention)
        reading = read(model, ids)
        for name, make in methods.items():
            runs = [run(model, reading, make(1 - keep)) for keep in KEEPS]
            if name == "snapkv":
                check_whole(model, ids, reading[0], runs[0][1])
            add(arrays, text, name, runs)
        if methods is OBSERVED:
            sums = torch.cat([output[1].sum(2) for *_, output in reading[1]])
            sums = sums.view(*runs[0][0].shape[:2], -1, len(ids)).mean(2).numpy()
            sets = [best(sums, compute_n_kept(len(ids), 1 - keep)) for keep in KEEPS]
            add(arrays, text, "column_sums", [(sums, kept, near(sums, kept)) for kept in sets])
    context = beginning(tokenizer) + ids
    arrays[f"{text}.kvzip.ids"] = np.array(context)
    for name, make in KVZIP.items():
        runs, repeats = run_kvzip(model, tokenizer, context, make())
        add(arrays, text, name, runs[False])
        if name == "kvzip":
            add(arrays, text, "kvzip_layerwise", runs[True])
        if name != "kvzip_plus":  # its ids are those of "kvzip"
            arrays |= {f"{text}.{name}.repeat{i}": ids for i, ids in enumerate(repeats)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True, help="UTF-8, xz-packed")
    args = parser.parse_args()
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    source = dict(pretrained_model_name_or_path=args.gguf.parent, gguf_file=args.gguf.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    whole = lzma.decompress(args.text.read_bytes()).decode()
    arrays = dict(keeps=np.array(KEEPS), layers=np.array(LAYERS), stride=np.array(STRIDE))
    arrays["prefix"] = np.array(len(beginning(tokenizer)))
    print("text, method, keep, T, least and most kept per kv head, all that is kept, all near")
    for text, (start, length) in TEXTS.items():
        ids = tokenizer(whole[start : start + 8 * length], add_special_tokens=False)["input_ids"]
        assert len(ids) > length
        with torch.inference_mode():
            add_text(arrays, model, tokenizer, text, ids[:length])
    arrays = {k: v.astype(np.int32) if v.dtype == int else v for k, v in arrays.items()}
    np.savez_compressed(PATH, **arrays)
    print(f"{PATH.name}: {len(arrays)} arrays, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
