"""LESS: features of the state that takes what eviction drops, learned layer by layer."""

import os
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from kvjax import struct
from kvjax.attention import Query, attend_rows, merge
from kvjax.cache.learned import LearnedFeatures
from kvjax.cache.recipes import resolve
from kvjax.cache.sizes import kept
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.data import moby_dick
from kvjax.errors import InputError
from kvjax.model import observe
from kvjax.train import record  # pyright: ignore[reportMissingImports]
from kvjax.train.loop import TrainConfig, train  # pyright: ignore[reportMissingImports]

BLOCK = 128
"""Queries at once: [heads, BLOCK, t] weights are the most that is ever held."""


@struct.dataclass
class Lambda(struct.Record):
    """Who is evicted at each query: all but the first `initial` and the `recent` newest tokens,
    the query itself included."""

    initial: int = struct.static(4)
    recent: int = struct.static(252)

    def kept(self, query: Query, k, v, pos):
        """Exact attention to what is kept: (out, lse)."""
        near = attend_rows(query.replace(window=self.recent), k, v, pos)
        size = min(self.initial, k.shape[2])
        if not size:
            return near
        old = attend_rows(self.before(query), k[:, :, :size], v[:, :, :size], pos[:, :size])
        return merge(near, old)

    def before(self, query: Query) -> Query:
        """The same queries, blind to what is recent."""
        return query.replace(pos=jnp.maximum(query.pos - self.recent, -1))

    def dropped(self, at, pos):
        """Mask [b q t] of the tokens that the state has at queries of arrival `at` [b q]."""
        return (pos[:, None] >= self.initial) & (pos[:, None] <= at[..., None] - self.recent)


def policy(recipe: CacheRecipe, length: int) -> Lambda:
    """What a recipe evicts from texts of `length` tokens if it compresses after each of them.

    A cache keeps up to `stride` tokens more between two compressions, and a prompt's chunk sees
    itself whole: with chunk at least the prompt, the prompt is read exactly, as in the paper.
    """
    recipe = resolve(recipe, length)
    if recipe.fold is None or recipe.fold.name != "less" or recipe.choice is None:
        raise InputError(f"{recipe.name} folds nothing into learned features; use recipe 'less'")
    if recipe.choice.scorer.name != "oldest":
        raise InputError(
            f"{recipe.name} evicts by {recipe.choice.scorer.name!r}; features are trained for "
            "'oldest' (sinks and recent tokens) alone"
        )
    return Lambda(kept(recipe, length) - recipe.window, recipe.window + 1)


def parallel(query: Query, k, v, pos, rule: Lambda, features: Any, drops=None):
    """What attention over a cache with a state gives at every token, [b t h e] float32.

    Low-rank weights phi(q).psi(k) on the dropped tokens share the normalizer of the exact ones.
    features: as of a state body; None forgets them. drops: what is done to the inner units of phi
    and of psi.
    """
    out, lse = rule.kept(query, k, v, pos)
    if features is None:
        return out
    n, t = k.shape[1:3]
    q = rearrange(query.q.astype(jnp.float32), "b t (n g) d -> b n (g t) d", n=n)
    inner = ((), ()) if drops is None else tuple((drop,) for drop in drops)
    phi = rearrange(features.queries(q, query.scale, *inner[0]), "b n (g t) r -> b n g t r", t=t)
    psi = features.keys(k.astype(jnp.float32), query.scale, *inner[1])
    values = jnp.concatenate([v.astype(jnp.float32), jnp.ones((*v.shape[:3], 1))], axis=-1)
    pad = -t % min(BLOCK, t)
    phi = jnp.pad(phi, [(0, 0)] * 3 + [(0, pad), (0, 0)])
    at = jnp.pad(query.pos, ((0, 0), (0, pad)), constant_values=-1)
    phi = rearrange(phi, "b n g (c q) r -> c b n g q r", q=min(BLOCK, t))
    at = rearrange(at, "b (c q) -> c b q", q=min(BLOCK, t))

    @jax.checkpoint
    def block(x):
        phi, at = x
        w = jnp.einsum("bngqr,bnsr->bngqs", phi, psi)
        w = jnp.where(rule.dropped(at, pos)[:, None, None], w, 0.0)
        return jnp.einsum("bngqs,bnse->bngqe", w, values)

    both = jax.lax.map(block, (phi, at))
    both = rearrange(both, "c b n g q e -> b (c q) (n g) e")[:, :t]
    both = both * jnp.exp(-jnp.maximum(lse, -60.0))[..., None]  # the exact part's mass is then 1
    return (out + both[..., :-1]) / (1.0 + both[..., -1:])


@struct.dataclass
class Errors(struct.Record):
    """Each layer's mean squared error, after the output matrix, of attention through a state.

    The model itself goes on with exact attention: layers do not see each other's errors. Tokens
    from `first` on count. The weights come as a layer's tables {"features": ..., "key": ...}.
    """

    rule: Lambda = struct.static(Lambda())
    first: int = struct.static(0)
    count: int = struct.static(8)
    dropout: float = struct.static(0.0)

    def mix(self, query: Query, k, v, pos, tables, use, hidden=None):
        whole = attend_rows(query, k, v, pos)
        if query.window is not None:
            return whole, {"error": jnp.zeros(()), "size": jnp.zeros(())}
        frozen = jax.lax.stop_gradient((query.q, k, v, whole[0]))
        features = None
        if tables and "features" in tables:
            features = LearnedFeatures(**tables["features"], count=self.count)
        drops = self.drops(tables)
        query = query.replace(q=frozen[0])
        made = parallel(query, *frozen[1:3], pos, self.rule, features, drops)
        dtype, real = query.q.dtype, query.pos >= self.first
        project = lambda block, y: jnp.einsum("bthe,mhe->btm", y.astype(dtype), block.o)  # noqa: E731
        want = use(project, frozen[3]).astype(jnp.float32)
        mean = lambda x: (  # noqa: E731
            jnp.sum(jnp.where(real, jnp.mean(x**2, axis=-1), 0.0)) / jnp.maximum(real.sum(), 1)
        )
        return whole, {"error": mean(use(project, made) - want), "size": mean(want)}

    def drops(self, tables):
        """Dropout of inner units, for phi and for psi, or None."""
        if not self.dropout or not tables or "key" not in tables:
            return None

        def drop(key):
            def run(y):
                keep = jax.random.bernoulli(key, 1 - self.dropout, y.shape)
                return jnp.where(keep, y / (1 - self.dropout), 0.0)

            return run

        return tuple(map(drop, jax.random.split(tables["key"])))


def layer_errors(params, config: ModelConfig, tokens, errors: Errors, weights=None, key=None):
    """{"error": [l], "size": [l]}: mean squared errors, and squares of the exact outputs.

    weights: those of `LearnedFeatures`, each [l n ...]; None forgets what is dropped.
    """
    tables = {} if weights is None else {"features": weights}
    if key is not None:
        tables["key"] = jax.random.split(key, config.layers)
    _, new = observe(params, config, None, tokens, errors, tables=tables or None, logits="none")
    return {x: jnp.concatenate([e[x] for e in new.evidence]) for x in ("error", "size")}


def start(config: ModelConfig, key, count: int = 8, inner: int = 512) -> dict[str, jax.Array]:
    """Weights to begin with: uniform within sqrt(6 / (in + out)), size and change 1e-4."""
    l, n, d = config.layers, config.kv_heads, config.head_dim  # noqa: E741
    shapes = {"q_in": (d, inner), "q_out": (inner, count), "k_in": (d, inner),
              "k_out": (inner, count), "mix": (count, count)}  # fmt: skip
    made = {}
    for name, one in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        bound = (6 / sum(shapes[name])) ** 0.5
        made[name] = jax.random.uniform(one, (l, n, *shapes[name]), jnp.float32, -bound, bound)
    return made | {x: jnp.full((l, n, count), 1e-4) for x in ("size", "change")}


def sequences(model: Any, texts, length: int, count: int = 64) -> np.ndarray:
    """Token ids [count, length] from texts, one stretch after the other."""
    ids = [x for text in texts for x in model.tokenizer.encode(text, add_bos=False)]
    if len(ids) < 2 * length:
        raise InputError(f"the texts have {len(ids)} tokens; give at least two of {length}")
    count = min(count, len(ids) // length)
    return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def features(
    model: Any, recipe: CacheRecipe, texts: Any = None, *, length: int = 512, inner: int = 512,
    dropout: float = 0.3, epochs: int = 40, batch: int = 2, learning_rate: float = 1e-3,
    seed: int = 0, out: str | os.PathLike[str] | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Trains the features of `recipe`, of fold "less", for a model: the tables of the recipe.

    texts: strings, or token ids [c t]; default 64 stretches of Moby Dick of `length` tokens; a
    tenth validates. Every epoch is validated, and the best is kept by the mean over layers of the
    error relative to eviction alone. All layers train at once, with losses of their own: the model
    runs exactly, and a layer's loss is the squared error of its attention's output, at tokens that
    come after the cache is full. Adam, whose rate halves in each quarter of the run.
    The paper trains on 512 texts of C4 of the model's full length. Moby Dick, weights shared by the
    heads of a kv head, where dropout acts, and one best epoch for all layers are our choice: not a
    reproduction. Features do not carry over to another policy or budget.
    Source: Dong et al. 2024, arXiv:2402.09398 (LESS), section 3.2, and its code.
    """
    if not 0 <= dropout < 1:
        raise InputError(f"dropout is a fraction from 0 to below 1, got {dropout}")
    texts = [moby_dick()[: 64 * length * 8]] if texts is None else texts
    tokens = sequences(model, texts, length) if isinstance(texts[0], str) else np.asarray(texts)
    rule = policy(recipe, tokens.shape[1])
    count = int(dict(recipe.fold.options).get("count") or 8) if recipe.fold else 8
    held = max(len(tokens) // 10, 1)
    each = (len(tokens) - held) // batch
    if not each:
        raise InputError(f"{len(tokens)} texts leave no batch; give {batch + held} or more")
    errors = Errors(rule, rule.initial + rule.recent, count)

    def batches(step):
        order = np.random.default_rng([seed, step // each]).permutation(len(tokens) - held)
        return tokens[order[step % each * batch :][:batch]]

    params = {"features": start(model.config, jax.random.key(seed), count, inner),
              "model": model.params}  # fmt: skip
    config = TrainConfig(epochs * each, learning_rate, schedule="halving", seed=seed,
                         save_every=each)  # fmt: skip
    with tempfile.TemporaryDirectory() as other:
        out = out or os.path.join(other, "run")
        train(loss_of(model.config, errors.replace(dropout=dropout)), params, batches, config,
              evaluate=validation(model, tokens[-held:], errors), out=out, progress=progress,
              frozen=lambda name: name.startswith("model"))  # fmt: skip
        return {"features": record.restore(out, params, "best")["features"]}


def validation(model, tokens, errors: Errors):
    """Parameters to the mean over layers of the error relative to that of eviction alone."""
    tell = jax.jit(lambda params, x, w: layer_errors(params, model.config, x, errors, w)["error"])

    def all_of(params, weights):
        each = [tell(params, tokens[i : i + 1], weights) for i in range(len(tokens))]
        return np.sum(np.asarray(each), axis=0)  # [l]

    alone = all_of(model.params, None)
    seen = alone > 0  # not of layers with windows of their own

    def evaluate(params):
        found = all_of(params["model"], params["features"])
        return float(np.mean(found[seen] / alone[seen])) if seen.any() else 0.0

    return evaluate


def loss_of(config: ModelConfig, errors: Errors):
    """The loss of {"features": ..., "model": Params} on token ids [b t]: the sum over layers."""

    def loss(params, tokens, key):
        found = layer_errors(params["model"], config, tokens, errors, params["features"], key)
        return jnp.sum(found["error"])

    return loss
