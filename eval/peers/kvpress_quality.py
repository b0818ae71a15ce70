"""NVIDIA kvpress on items: `python kvpress_quality.py job.json`, by the Python that has kvpress.

quality.py says what is read and written. One exact reading of a context serves every press: what
each attention layer was called with is kept, and a press's own `forward_hook` is called with it and
with a copy of the cache. Presses change a cache after its layer has attended, so that what layers
say of a context is the exact model's with a press as without.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import kvpress
import quality
import torch
import transformers
from kvpress.presses import kvzip_press

# What kvjax's storage asks for, and how much is kept: no difference in which entries those are.
STORAGE = ("keep", "slots", "stride", "lookahead", "page", "chunk")


@dataclass(frozen=True)
class Press:
    """A press of kvpress as a recipe."""

    make: Callable  # (options, compression ratio) -> press
    options: dict  # what a recipe can say, by kvjax's names where it has them: kvpress's defaults
    fixed: dict = field(default_factory=dict)  # what kvpress does instead of having an option
    spread: str = "heads"  # the count is of each "heads", of a "layer", of "all", or about of all:
    # "near" where it rounds the count of each layer, "chunks" where it keeps whole ones
    renumbers: bool = False  # positions go on from the rows kept


def _snapkv(o, ratio):
    return kvpress.SnapKVPress(ratio, window_size=o["window"], kernel_size=o["kernel"])


def _streaming(o, ratio):
    return kvpress.KeyRerotationPress(kvpress.StreamingLLMPress(ratio, n_sink=o["sinks"]))


def _expected(o, ratio):
    return kvpress.ExpectedAttentionPress(
        ratio, n_future_positions=o["future"], n_sink=o["sinks"], use_covariance=o["covariance"],
        use_vnorm=o["value_norm"], epsilon=o["epsilon"],
    )  # fmt: skip


EXPECTED = {"sinks": 4, "future": 512, "covariance": True, "value_norm": True, "epsilon": 0.0}
SNAP = {"window": 64, "kernel": 5}
SCORED = {"window": 0, "sinks": 0}
SLACK = {"near": 0.5, "chunks": 1}  # entries of a head that a count may be off, by chunk
POOLED = {"pool": "avg", "reduce": "mean", "sinks": 0}
PRESSES = {
    "streaming_llm": Press(_streaming, {"sinks": 4}, {"window": -1}, renumbers=True),
    "key_norm": Press(lambda o, ratio: kvpress.KnormPress(ratio), {}, SCORED),
    "snapkv": Press(_snapkv, SNAP, POOLED),
    "ada_snapkv": Press(
        lambda o, ratio: kvpress.AdaKVPress(_snapkv(o, ratio), alpha_safeguard=o["alpha"]),
        SNAP | {"alpha": 0.2}, POOLED, spread="layer",
    ),
    "kvzip": Press(
        lambda o, ratio: kvpress.KVzipPress(
            ratio, n_sink=o["sinks"], chunk_size=o["part"], kvzip_plus_normalization=o["plus"]
        ),
        {"sinks": 4, "part": 2048, "plus": False}, {"window": 0, "first": 0}, spread="all",
    ),
    "expected_attention": Press(_expected, EXPECTED, {"window": 0, "first": 4}),
    "ada_expected": Press(
        lambda o, ratio: kvpress.AdaKVPress(_expected(o, ratio), alpha_safeguard=o["alpha"]),
        EXPECTED | {"epsilon": 0.01, "alpha": 0.2}, {"window": 0, "first": 4, "floor": "beyond"},
        spread="layer",
    ),
    "tova": Press(lambda o, ratio: kvpress.TOVAPress(ratio), {}, {"window": 1, "sinks": 0}),
    "keydiff": Press(lambda o, ratio: kvpress.KeyDiffPress(ratio), {}, SCORED),
    "pyramidkv": Press(
        lambda o, ratio: kvpress.PyramidKVPress(
            ratio, window_size=o["window"], kernel_size=o["kernel"], beta=o["beta"]
        ),
        SNAP | {"beta": 20}, POOLED | {"steps": "exact"}, spread="near",
    ),
    "chunkkv": Press(
        lambda o, ratio: kvpress.ChunkKVPress(_snapkv(o, ratio), chunk_length=o["size"]),
        SNAP | {"size": 20}, POOLED | {"reuse": 1}, spread="chunks",
    ),
    "random": Press(lambda o, ratio: kvpress.RandomPress(ratio), {"seed": 0}, SCORED),
}  # fmt: skip


class Peer:
    """kvpress with the context that was read last."""

    packages = ("kvpress",)
    ids: list
    exact: quality.State
    calls: list  # (module, args, kwargs, output) of each attention layer

    def notes(self, recipes):
        """What recipes ask for and kvpress has no option for."""
        out = []
        for recipe in recipes:
            name = recipe["name"]
            if name not in PRESSES:
                raise ValueError(f"kvpress has no recipe {name!r} here; it has {_names()}")
            for option, value in recipe.get("options", {}).items():
                press = PRESSES[name]
                if option in press.options or option in STORAGE:
                    continue
                if option not in press.fixed:
                    said = f"kvpress {name} has no option {option}; {option}={value} is left out"
                elif press.fixed[option] == value:
                    continue
                else:
                    said = f"kvpress {name} has {option}={press.fixed[option]}, not {value}"
                out.append({"note": said, "recipe": recipe["label"]})
        return out

    def read(self, model, ids):
        """The exact cache; keeps what every attention layer was called with."""
        self.ids, self.calls = ids, []
        hooks = []
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress does
            hooks.append(layer.self_attn.register_forward_hook(self._keep, with_kwargs=True))
        try:
            self.exact = quality.read(model, ids)
        finally:
            for hook in hooks:
                hook.remove()
        return self.exact

    def _keep(self, module, args, kwargs, output):
        self.calls.append((module, args, kwargs, (None, output[1])))

    def compress(self, model, recipe, kept):
        """The cache that a press leaves of the context, which holds `kept` entries per kv head."""
        heads = self.exact.cache.layers[0].keys.shape[1]
        row, options, press = pressed(recipe, kept, len(self.ids), len(self.calls) * heads)
        state = self.exact.fork()
        torch.manual_seed(options.get("seed", 0))
        if isinstance(press, kvpress.KVzipPress):
            reconstruct(model, press, self.ids, state.cache)
        else:
            press.post_init_from_model(model)
            for module, args, kwargs, output in self.calls:
                own = kwargs | {"past_key_values": state.cache}
                press.forward_hook(module, args, own, output)
        state.masked = taken(model)
        _check(state, row.spread, kept, heads, SLACK.get(row.spread, 0) * options.get("size", 1))
        if row.renumbers:
            state.seen = kept
        return state


def _names():
    return ", ".join(["exact", *PRESSES])


def _ratio(spread, kept, length, heads):
    """The compression ratio with which kvpress keeps so many; it rounds down what it computes."""
    if kept == length:
        return 0.0
    if spread in SLACK:
        return 1 - kept / length
    if spread == "all":  # rounds down the number that goes
        return ((length - kept) * heads + 0.5) / (length * heads)
    return 1 - (kept + 0.5) / length


def pressed(recipe, kept, length, heads):
    """(row, options, press) of a recipe that keeps `kept` of `length` tokens.

    heads: kv heads of all layers.
    """
    if kept is None or not 0 < kept <= length:
        raise ValueError(f"kept is from 1 to the {length} tokens of the context, got {kept}")
    row = PRESSES[recipe["name"]]
    given = {k: v for k, v in recipe.get("options", {}).items() if k in row.options}
    options = row.options | given
    return row, options, row.make(options, _ratio(row.spread, kept, length, heads))


def taken(model):
    """The masks that a press left on the layers, which it would else leave to the next one."""
    layers = [layer.self_attn for layer in model.model.layers]
    masked = [getattr(layer, "masked_key_indices", None) for layer in layers]
    for layer in layers:
        layer.masked_key_indices = None
    return None if all(rows is None for rows in masked) else masked


def _check(state, spread, kept, heads, slack):
    """Every count is the one asked for, within `slack` entries a head."""
    live = []
    for i, layer in enumerate(state.cache.layers):
        dead = 0 if state.masked is None else len(state.masked[i][0])
        live.append(layer.keys.shape[2] * heads - dead)
    mean = sum(live) / len(live)
    each = spread == "all" or spread in SLACK or set(live) == {kept * heads}
    if abs(mean - kept * heads) > slack * heads or not each:
        counts = sorted({count / heads for count in live})
        raise ValueError(f"it kept {counts} entries per kv head instead of {kept}")


def reconstruct(model, press, ids, cache):
    """KVzip on a cache of the context, which it reads again to score; it masks and removes nothing.

    It expects a context that begins with the chat template's beginning, which it does not score,
    and repeats it before the template's end. A context that begins otherwise is scored whole and
    repeated after a line break, as kvpress does for a model without a template.
    """
    tokenizer = lend_tokenizer(model)
    with press(model):
        if ids[: press.prefix_length] != _beginning(tokenizer):
            press.prefix_length = 0
            press._suffix_ids = tokenizer.encode(
                "\n", return_tensors="pt", add_special_tokens=False
            )
        press._context_ids, press._cache = torch.tensor([ids]), cache


def lend_tokenizer(model):
    """Gives KVzip the tokenizer of the model's file, which it looks for in a folder."""
    if not hasattr(model, "kvzip_tokenizer"):
        source = quality.source(model.read_from)
        model.kvzip_tokenizer = transformers.AutoTokenizer.from_pretrained(
            **source, local_files_only=True
        )
    kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: model.kvzip_tokenizer)
    return model.kvzip_tokenizer


def _beginning(tokenizer):
    """What the chat template puts before a user's text; nothing if there is no template."""
    if tokenizer.chat_template is None:
        return []
    chat = [{"role": "user", "content": "dummy context"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, enable_thinking=False)
    return tokenizer.encode(text.split("dummy context")[0], add_special_tokens=False)


if __name__ == "__main__":
    quality.main(sys.argv[1], Peer())
