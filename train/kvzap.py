"""KVzap: small functions of hidden states, trained to predict KVzip's scores of a model's texts."""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.api import Model
from kvjax.cache import init, ops, sizes
from kvjax.config import CacheRecipe, Choice, Spec, Store
from kvjax.data import moby_dick
from kvjax.errors import InputError, unknown
from kvjax.evidence import Looked
from kvjax.model import observe
from kvjax.observing import gather
from kvjax.scorers.surrogate import predict
from kvjax.train import loop  # pyright: ignore
from kvjax.train.loop import TrainConfig, train  # pyright: ignore

FLOOR = 1e-8  # scores below have its logarithm
BATCH, LEARNING_RATE, DECAY, VALIDATION = 512, 5e-3, 0.01, 0.05
MARK = "############"


def surrogate(
    model: Model, texts: Sequence[Any] | None = None, *, kind: str = "mlp", hidden: int = 512,
    count: int = 16, length: tuple[int, int] = (750, 1250), tokens: int = 500, plus: bool = True,
    epochs: int = 15, alpha: float = 1.0, seed: int = 0,
    out: str | os.PathLike[str] | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The tables of the recipe "kvzap" for this model: put them into `model.tables["kvzap"]`.

    texts: strings, or lists of ids, of what the model will read; default is Moby Dick, which
    `kvjax.data.moby_dick()` adds to others. They are cut into pieces of length[0] to length[1]
    tokens, `count` of which are read and repeated, and `tokens` of each are learned from. kind:
    "mlp" with `hidden` units and as many epochs, or "linear" (ridge with penalty alpha). plus=False
    learns plain KVzip scores. out: the folder of the training run of an mlp.

    Source: KVzap 2026, arXiv:2601.07891, and kvpress's kvzap. No reproduction: it trains on 4,500
    texts of nine kinds. Fill-ins: inputs and targets are standardized for training and the weights
    folded back; layers are clipped together at sqrt(layers); FLOOR; the instruction's queries count
    for the targets as in KVzip; weight decay 0.01.
    """
    if kind not in ("mlp", "linear"):
        raise unknown("kind", kind, ("mlp", "linear"))
    named = {"hidden": hidden, "count": count, "tokens": tokens, "epochs": epochs}
    for name, value in named.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} is {value!r}; give a whole number, 1 or more")
    if not 0 <= alpha < math.inf:
        raise InputError(f"alpha is {alpha}; give a finite number, 0 or more")
    found = list(pieces(model, texts, count, length, seed))
    x, y = collect(model, found, tokens=tokens, plus=plus, seed=seed, progress=progress)
    if kind == "linear":
        fitted = [ridge(a, b, alpha) for a, b in zip(x, y, strict=True)]
        weights = {name: np.stack([one[name] for one in fitted]) for name in fitted[0]}
    else:
        weights = mlp(x, y, hidden, epochs=epochs, seed=seed, out=out, progress=progress)
    return {"scorer": {"weights": jax.tree.map(jnp.asarray, _every_layer(model.config, weights))}}


def before(tokenizer) -> list[int]:
    """What precedes a text: a chat template's words before a user's, or the token that begins."""
    if tokenizer is None:
        return []
    if tokenizer.template is None:
        return tokenizer.encode("")
    text = tokenizer.chat([{"role": "user", "content": MARK}])
    return tokenizer.encode(text.partition(MARK)[0], special=True, add_bos=False)


def pieces(model: Model, texts, count: int, length: tuple[int, int], seed: int) -> list[list[int]]:
    """At most `count` pieces of the texts, as ids, evenly spread over them.

    A text shorter than length[0] is a piece; of longer ones a rest that short is left out. A piece
    and its repetition must fit the model's context.
    """
    if texts is None:
        texts = [moby_dick()]
    if isinstance(texts, str):
        raise InputError("texts is a string; give a list of strings")
    low, high = length
    high = min(high, (model.config.context - 2 * len(before(model.tokenizer)) - 64) // 2)
    low = min(low, high)
    if low < 2:
        raise InputError(
            f"length is {length} and the context {model.config.context}; give longer pieces, at "
            "least 2 tokens, that fit it twice"
        )
    rng, found = np.random.default_rng([seed, 1]), []
    for text in texts:
        ids, start = _ids(model, text), 0
        while start < len(ids):
            stop = start + int(rng.integers(low, high + 1))
            if start == 0 or len(ids) - start >= low:
                found.append(ids[start:stop])
            start = stop
    found = [x for x in found if len(x) > 1]
    if not found:
        raise InputError(f"the {len(texts)} texts have no piece of two tokens; give longer ones")
    at = np.linspace(0, len(found) - 1, min(count, len(found))).round().astype(int)
    return [found[i] for i in at]


def _ids(model, text) -> list[int]:
    if not isinstance(text, str):
        return [int(i) for i in text]
    if model.tokenizer is None:
        raise InputError("this model has no tokenizer: give texts as lists of ids")
    return model.tokenizer.encode(text, add_bos=False)


@struct.dataclass
class Entering:
    """What enters the attention of each layer, {"hidden": [b t m]}."""

    def __call__(self, looked: Looked):
        return {"hidden": looked.hidden}


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _read(params, config, cache, tokens, count):
    _, new = observe(params, config, cache, tokens, Entering(), count=count, logits="none")
    return ops.absorb_long(cache, new, count), [seen["hidden"] for seen in new.evidence]


def scored(model: Model, found: Sequence[Any], *, plus: bool = True):
    """For each piece: hidden states [l t m] and log scores [l n t] of the layers that see all.

    One prefill and one scoring pass for each; all have one width, and share a compilation.
    """
    first, config = before(model.tokenizer), model.config
    width = len(first) + max(len(x) for x in found)
    options = (("first", len(first)), ("plus", plus))
    recipe = CacheRecipe(
        "kvzip", "after", store=Store(),
        choice=Choice(Spec("reconstruction", options), sinks=len(first)),
    )  # fmt: skip
    full = sizes.full_layers(config)
    for piece in found:
        whole = [*first, *piece]
        ids = np.zeros((1, width), np.int32)
        ids[0, : len(whole)] = whole
        count = jnp.asarray([len(whole)], jnp.int32)
        cache = init.init_cache(config, CacheRecipe(), 1, width)
        cache, hidden = _read(model.params, config, cache, ids, count)
        seen = gather(model, cache, recipe, count, ids, None)
        score = np.concatenate(
            [np.asarray(s["maxima"][:, 0])
             for s, g in zip(seen, cache.groups, strict=True) if g.window is None]
        )  # fmt: skip
        hidden = np.concatenate([np.asarray(h[:, 0]) for h in hidden])[full]
        real = slice(len(first), len(whole))
        yield hidden[:, real], np.log(np.maximum(score[:, :, real], FLOOR))


def collect(model: Model, found, *, tokens: int, plus: bool, seed: int, progress: bool = True):
    """Hidden states [l N m] and log scores [l N n] of at most `tokens` random tokens a piece."""
    x, y, rng = [], [], np.random.default_rng([seed, 2])
    with loop._bar(0, len(found), progress) as tick:
        for done, (hidden, score) in enumerate(scored(model, found, plus=plus)):
            t = hidden.shape[1]
            at = np.sort(rng.choice(t, min(tokens, t), replace=False))
            x.append(hidden[:, at])
            y.append(score[:, :, at].swapaxes(1, 2))
            tick(done + 1, "texts repeated")
    return np.concatenate(x, axis=1), np.concatenate(y, axis=1)


def ridge(x, y, alpha: float = 1.0) -> dict[str, np.ndarray]:
    """The linear map from x [N m] to y [N n] of least squares plus alpha times its own, with an
    offset that is free; float64 inside."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    x_mean, y_mean = x.mean(axis=0), y.mean(axis=0)
    a = x - x_mean
    square = a.T @ a + alpha * np.eye(a.shape[1])
    if alpha > 0:
        out = np.linalg.solve(square, a.T @ (y - y_mean))
    else:  # fewer tokens than widths have many solutions: the smallest
        out = np.linalg.lstsq(a, y - y_mean, rcond=None)[0]
    return {"out": out.astype(np.float32), "out_bias": (y_mean - x_mean @ out).astype(np.float32)}


def mlp(x, y, hidden: int, *, epochs: int, seed: int, out=None, progress: bool = True):
    """Weights [l ...] of an MLP for each layer, from x [l N m] to y [l N n], by mean square."""
    layers, many, width = x.shape
    rng = np.random.default_rng([seed, 3])
    order = rng.permutation(many)
    aside = order[: int(VALIDATION * many)]
    rest = np.sort(order[len(aside) :])
    batch = min(BATCH, len(rest))
    per = len(rest) // batch  # a smaller last batch is left out, another one each epoch
    x_mean, x_size = _moments(x[:, rest])
    y_mean, y_size = _moments(y[:, rest])
    scale = lambda x, y: (  # noqa: E731
        ((x.astype(np.float32) - x_mean) / x_size).astype(np.float32),
        ((y - y_mean) / y_size).astype(np.float32),
    )

    def batches(step):
        epoch, i = divmod(step, per)
        turn = np.random.default_rng([seed, 4, epoch]).permutation(rest)
        at = turn[i * batch : (i + 1) * batch]
        return scale(x[:, at], y[:, at])

    config = TrainConfig(
        per * epochs, LEARNING_RATE, schedule="cosine", optimizer="adamw", weight_decay=DECAY,
        clip=math.sqrt(layers), seed=seed, log_every=per, save_every=per,
    )  # fmt: skip
    spread = [width**-0.5, hidden**-0.5]
    start = {
        "inner": rng.normal(size=(layers, width, hidden)).astype(np.float32)
        * np.float32(spread[0]),
        "inner_bias": np.zeros((layers, hidden), np.float32),
        "out": rng.normal(size=(layers, hidden, y.shape[2])).astype(np.float32)
        * np.float32(spread[1]),
        "out_bias": np.zeros((layers, y.shape[2]), np.float32),
    }
    evaluate = None
    if len(aside):
        test, value = scale(x[:, aside], y[:, aside]), jax.jit(_loss)
        evaluate = lambda params: value(params, test) / layers  # noqa: E731
    done = train(_loss, start, batches, config, out=out, evaluate=evaluate, progress=progress)
    return _unscaled(done.params, x_mean, x_size, y_mean, y_size)


def _loss(params, batch, key=None):
    """The sum over layers of the mean square error."""
    x, y = batch
    return jnp.square(jax.vmap(predict)(params, x) - y).mean(axis=(1, 2)).sum()


def _moments(x):
    """Mean and standard deviation over tokens, [l 1 m], float64; a constant has deviation 1."""
    mean = x.mean(axis=1, keepdims=True, dtype=np.float64)
    size = np.stack([layer.astype(np.float64).std(axis=0, keepdims=True) for layer in x])
    return mean, np.where(size > 1e-12, size, 1.0)


def _unscaled(weights, x_mean, x_size, y_mean, y_size):
    """The same functions of what was not standardized."""
    w = {name: np.asarray(leaf, np.float64) for name, leaf in weights.items()}
    inner = w["inner"] / x_size.swapaxes(1, 2)
    shift = np.einsum("lxm,lmf->lf", x_mean, inner)
    made = {
        "inner": inner, "inner_bias": w["inner_bias"] - shift, "out": w["out"] * y_size,
        "out_bias": w["out_bias"] * y_size[:, 0] + y_mean[:, 0],
    }  # fmt: skip
    return {name: leaf.astype(np.float32) for name, leaf in made.items()}


def _every_layer(config, weights):
    """Weights of the layers that see all at their places among all layers; zeros elsewhere."""
    full = sizes.full_layers(config)

    def spread(leaf):
        made = np.zeros((config.layers, *leaf.shape[1:]), leaf.dtype)
        made[full] = leaf
        return made

    return {name: spread(leaf) for name, leaf in weights.items()}


def agreement(model: Model, tables, found: Sequence[Any], *, plus: bool = True):
    """Spearman's rank correlation of predicted and true scores, [l n], mean over pieces of ids."""
    weights = jax.tree.map(np.asarray, tables["scorer"]["weights"])
    full, total = sizes.full_layers(model.config), 0.0
    guess = jax.jit(jax.vmap(predict))
    for hidden, score in scored(model, found, plus=plus):
        made = np.asarray(guess({k: w[full] for k, w in weights.items()}, hidden)).swapaxes(1, 2)
        total = total + _spearman(made, score)
    return total / len(found)


def _spearman(a, b):
    """Rank correlation along the last axis; equal values are ranked as they come."""
    a, b = (x.argsort(-1).argsort(-1).astype(float) for x in (a, b))
    a, b = (x - x.mean(-1, keepdims=True) for x in (a, b))
    return (a * b).sum(-1) / np.maximum(np.sqrt((a * a).sum(-1) * (b * b).sum(-1)), 1e-30)
