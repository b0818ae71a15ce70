"""Items asked of a model of transformers under the caches of a peer: what its children share.

The job is {"model": file, "cores": [...], "items": file of JSON lines, "recipes": [{"label": ...,
"name": ..., "options": {...}}, ...]}; the exact cache, named "exact", is always first. An item is
{"id": ..., "context": [ids], "kept": {label: entries per kv head}, "asks": [{"question": [ids],
"answer": [ids], "options": [[ids], ...], "max_new_tokens": n, "before": [ids], "stop": [ids]}]}.

It says {"versions": ...}, a {"note": ..., "recipe": label} for what a peer has no way to do, and
for each item and recipe {"id", "recipe", "asks": [{"lp", "best", "kl", "top1", "options", "made"}],
"bytes": {"held", "live", "entries"}, "seconds": {"read", "compress", "score"}}; at last
{"result": {"rows": n}}. It runs in a Python with PyTorch; kvjax never imports it.
"""

import copy
import importlib.metadata
import json
import os
import time
from dataclasses import dataclass

import torch
import transformers
from turn import say


@dataclass
class State:
    """What has been read: a cache, and how many positions it stands for.

    Positions go on from the tokens seen, while the causal mask counts the rows stored: transformers
    derives the mask from `cache_position`, which is therefore left to it and never given.
    """

    cache: transformers.Cache
    seen: int  # position of the next token
    masked: list | None = None  # of each layer, (batch, head, row) of stored entries that are dead

    def fork(self) -> "State":
        """A copy that goes its own way: layers put new tensors in place of theirs."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        return State(cache, self.seen, self.masked)


def main(path, peer):
    """Runs the job in the file `path`.

    A peer has `packages`, `notes(recipes)`, which raises ValueError for what it does not have,
    `read(model, ids)`, the exact State after a context, and `compress(model, recipe, kept)`, the
    State that a recipe makes of the context that was read last.
    """
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    os.sched_setaffinity(0, job["cores"])
    torch.set_num_threads(len(job["cores"]))
    try:
        recipes = _exact_first(job["recipes"])
        notes = peer.notes(recipes[1:])
        say(doing="loading the model")
        model = load(job["model"])
        names = ("torch", "transformers", *peer.packages)
        say(versions={name: importlib.metadata.version(name) for name in names})
        for note in notes:
            say(**note)
        count = 0
        with torch.inference_mode(), open(job["items"], encoding="utf-8") as items:
            for item in map(json.loads, items):
                for row in rows(model, peer, recipes, item):
                    say(**row)
                    count += 1
        say(result={"rows": count})
    except Exception as error:
        say(error=str(error) or type(error).__name__)
        raise


def load(where):
    """A causal language model, float32, from a GGUF file or a Hugging Face folder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    made = transformers.AutoModelForCausalLM.from_pretrained(
        **source(where), dtype=torch.float32, local_files_only=True
    )
    made.read_from = where  # its own record names the folder only
    return made.eval()


def source(where) -> dict:
    """Arguments of from_pretrained for a GGUF file or a folder."""
    if os.path.isdir(where):
        return {"pretrained_model_name_or_path": where}
    folder, file = os.path.split(where)
    return {"pretrained_model_name_or_path": folder or ".", "gguf_file": file}


def _exact_first(recipes):
    exact = [r for r in recipes if r["name"] == "exact"]
    first = exact[0] if exact else {"label": "exact", "name": "exact"}
    return [first, *(r for r in recipes if r["name"] != "exact")]


def read(model, ids) -> State:
    """The exact cache of a context."""
    cache = transformers.DynamicCache(config=model.config)
    if any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        raise ValueError("a model with sliding windows cannot be compared: its cache has no rows")
    state = State(cache, 0)
    feed(model, state, ids)
    return state


def rows(model, peer, recipes, item):
    """A row for each recipe; the exact one comes first, and the others are held against it."""
    where = f"item {item['id']}"
    if not item["context"] or not all(ask["question"] for ask in item["asks"]):
        raise ValueError(f"{where}: a context and questions need at least one token")
    started = time.perf_counter()
    exact = peer.read(model, item["context"])
    seconds, truth = {"read": time.perf_counter() - started}, None
    for recipe in recipes:
        started = time.perf_counter()
        state = exact.fork()
        if recipe["name"] != "exact":
            kept = item.get("kept", {}).get(recipe["label"])
            try:
                state = peer.compress(model, recipe, kept)
            except Exception as error:
                said = str(error) or type(error).__name__
                raise ValueError(f"{where}, {recipe['label']}: {said}") from error
        seconds["compress"] = time.perf_counter() - started
        size = sizes(state)
        started = time.perf_counter()
        asks, tables = answers(model, state, item["asks"], truth)
        truth = truth or tables
        seconds["score"] = time.perf_counter() - started
        row = {"id": item["id"], "recipe": recipe["label"], "asks": asks, "bytes": size}
        yield row | {"seconds": {name: round(s, 4) for name, s in seconds.items()}}


def answers(model, state, asks, truth):
    """(what is said of each ask, log-probabilities of each); `state` reads the texts in between."""
    out, tables = [], []
    for i, ask in enumerate(asks):
        if ask.get("before"):
            feed(model, state, ask["before"])
        answer = ask["answer"]
        table = feed(model, state.fork(), [*ask["question"], *answer[:-1]], keep=len(answer))
        made = {"lp": [float(row[token]) for row, token in zip(table, answer, strict=True)]}
        best = table.argmax(-1).tolist()
        made["best"] = [a == b for a, b in zip(best, answer, strict=True)]
        if truth is not None:
            exact = truth[i].double()
            made["kl"] = (exact.exp() * (exact - table.double())).sum(-1).clamp(min=0).tolist()
            made["top1"] = (truth[i].argmax(-1) == table.argmax(-1)).tolist()
        made["options"] = [float(table[0, option[0]]) for option in ask.get("options", ())]
        made["made"] = generated(model, state.fork(), ask)
        out.append(made)
        tables.append(table)
    return out, tables


def generated(model, state, ask):
    """Greedy tokens after the question, without the stop token."""
    made, ids = [], ask["question"]
    for _ in range(ask.get("max_new_tokens", 0)):
        token = int(feed(model, state, ids).argmax(-1))
        if token in ask.get("stop", ()):
            break
        made.append(token)
        ids = [token]
    return made


def feed(model, state, ids, keep=1):
    """Log-probabilities [keep, w] after each of the last `keep` of the ids, which `state` takes."""
    layers = [layer.self_attn for layer in model.model.layers]
    hooks = _masks(layers, state.cache, len(ids))
    for layer, dead in zip(layers, state.masked or [None] * len(layers), strict=True):
        layer.masked_key_indices = dead  # kvpress reads it as it attends, and drops these keys
    try:
        out = model(
            torch.tensor([ids]),
            past_key_values=state.cache,
            position_ids=torch.arange(state.seen, state.seen + len(ids))[None],
            use_cache=True,
            logits_to_keep=keep,
        )
    finally:
        for layer in layers:
            layer.masked_key_indices = None
        for hook in hooks:
            hook.remove()
    state.seen += len(ids)
    return torch.log_softmax(out.logits[0].float(), -1)


def _masks(layers, cache, count):
    """Hooks with a mask of its own for each layer, if layers store different numbers of rows.

    transformers makes one mask, for the rows of layer 0; cut to fewer rows it would let new tokens
    see the ones that follow them.
    """
    stored = [layer.get_seq_length() for layer in cache.layers]
    if len(set(stored)) < 2:
        return []

    def hook(module, args, kwargs):
        every = torch.ones(count, stored[module.layer_idx] + count, dtype=torch.bool)
        mask = every.tril(stored[module.layer_idx])[None, None]
        return args, kwargs | {"attention_mask": mask}

    return [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]


def sizes(state) -> dict:
    """Bytes held, bytes of live entries, and live entries per layer and kv head, on average."""
    held = sum(_bytes(x) for layer in state.cache.layers for x in vars(layer).values())
    stored = sum(layer.get_seq_length() for layer in state.cache.layers)
    count, dead = len(state.cache.layers), 0.0
    if state.masked is not None:
        heads = state.cache.layers[0].keys.shape[1]
        dead = sum(len(rows[0]) for rows in state.masked if rows is not None) / heads
    live = held if not dead else round(held * (stored - dead) / stored)
    return {"held": held, "live": live, "entries": (stored - dead) / count}


def _bytes(x) -> int:
    """Bytes of the tensors in x, with the parts that quantised tensors are made of."""
    if isinstance(x, torch.Tensor):
        if hasattr(x, "__tensor_flatten__"):
            return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
        return x.numel() * x.element_size()
    if isinstance(x, dict):
        return sum(map(_bytes, x.values()))
    return sum(map(_bytes, x)) if isinstance(x, (list, tuple)) else 0
