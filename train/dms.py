"""DMS: gates that mark tokens to be dropped once they leave a window, trained on the model."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import struct
from kvjax.attention import Query, attend_rows, merge
from kvjax.config import ModelConfig
from kvjax.data import moby_dick
from kvjax.errors import InputError
from kvjax.model import observe
from kvjax.scorers.gate import logits
from kvjax.shapes import EMPTY
from kvjax.train.less import sequences  # pyright: ignore[reportMissingImports]
from kvjax.train.loop import TrainConfig, Trained, train  # pyright: ignore[reportMissingImports]

BLOCK = 128
"""Tokens whose distributions are made at once."""


@struct.dataclass
class Masked(struct.Record):
    """Attention that sees the newest `window` tokens and itself whole, and older ones by their bit.

    The bit of a token is what the next one says of it: logits (kvjax/scorers/gate.py), with
    logistic noise if there is a key, divided by the temperature; an older token's score gains log
    sigmoid of minus that. temperature 0 hides it where the logit is above 0: what a cache with
    chunk=1 and stride=1 gives. A layer's tables are {"gate": {"norm" [m], "weight" [m n], "bias"
    [n]}, "key": optional}. Layers with a window of their own attend as they always do.
    """

    window: int = struct.static(256)
    temperature: float = struct.static(0.1)

    def mix(self, query: Query, k, v, pos, tables, use, hidden=None):
        """Also {"closed", "tokens"}: the sum of how closed gates are, and their number."""
        if query.window is not None:
            none = {"closed": jnp.zeros(()), "tokens": jnp.zeros(())}
            return attend_rows(query, k, v, pos), none
        assert hidden is not None
        said = self.said(tables, hidden)  # [b n t]: token j says it of token j - 1
        said = jnp.pad(said[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-1e4)
        real = jnp.pad(pos[:, 1:] >= 0, ((0, 0), (0, 1)))[:, None]  # the last has no bit yet
        shut = jax.nn.sigmoid(said) if self.temperature else (said > 0).astype(jnp.float32)
        tokens = real.sum() * said.shape[1]
        seen = {"closed": jnp.where(real, shut, 0.0).sum(), "tokens": tokens.astype(jnp.float32)}
        if self.temperature:
            return self.attend(query, k, v, pos, jax.nn.log_sigmoid(-said)), seen
        return self.attend(query, k, v, pos, jnp.where(said > 0, EMPTY, 0.0)), seen

    def said(self, tables, hidden):
        """Logits [b n t], noisy and divided by the temperature."""
        said = jnp.swapaxes(logits(tables["gate"], hidden), 1, 2)
        if not self.temperature:
            return said
        if "key" in tables:
            said = said + jax.random.logistic(tables["key"], said.shape)
        return said / self.temperature

    def attend(self, query: Query, k, v, pos, bias):
        """The window, and what is older with bias [b n t]; scores are made again for the gradient,
        not kept."""

        @jax.checkpoint
        def run(q, k, v, bias):
            asked = query.replace(q=q)
            near = attend_rows(asked.replace(window=self.window + 1), k, v, pos)
            old = asked.replace(pos=jnp.maximum(query.pos - (self.window + 1), -1))
            return merge(near, attend_rows(old, k, v, pos, bias))

        return run(query.q, k, v, bias)


def masked(params, config: ModelConfig, tokens, gate, mixer: Masked, key=None, *, count=None,
           logits: str = "all"):  # fmt: skip
    """(what `look` gives of a model with gates [l ...], the fraction of gates that are closed)."""
    tables = {"gate": gate}
    if key is not None:
        tables["key"] = jax.random.split(key, config.layers)
    out, new = observe(params, config, None, tokens, mixer, count=count, tables=tables,
                       logits=logits)  # fmt: skip
    total = {x: sum(e[x].sum() for e in new.evidence) for x in ("closed", "tokens")}
    return out, total["closed"] / jnp.maximum(total["tokens"], 1.0)


def divergence(params, student, teacher):
    """The mean over tokens of sum p_student * (log p_student - log p_teacher), from final hidden
    states [b t m], a block of tokens at a time."""
    head = params.embed if params.head is None else params.head
    m = student.shape[-1]
    one, two = (x.reshape(-1, m) for x in (student, teacher))
    size = min(BLOCK, len(one))
    pad = -len(one) % size
    one, two = (jnp.pad(x, ((0, pad), (0, 0))).reshape(-1, size, m) for x in (one, two))

    @jax.checkpoint
    def block(x):  # padding is alike in both: 0
        of = lambda y: jax.nn.log_softmax(  # noqa: E731
            jnp.einsum("tm,wm->tw", y, head, preferred_element_type=jnp.float32)
        )
        own, want = of(x[0]), of(x[1])
        return jnp.sum(jnp.exp(own) * (own - want))

    return jnp.sum(jax.lax.map(block, (one, two))) / (len(student) * student.shape[1])


def target(step: int, ramp: int, ratio: float) -> float:
    """The least fraction of closed gates at a step: 1 - 1 / CR, CR from 1 to `ratio` on a line."""
    return 1.0 - 1.0 / (1.0 + (ratio - 1.0) * min(step / max(ramp, 1), 1.0))


def loss_of(config: ModelConfig, mixer: Masked) -> Callable:
    """The loss of {"gate": ..., "model": Params} on {"tokens": [b t], "target": []}.

    The divergence from the model without gates, and by how much the fraction of closed gates falls
    short of the target.
    """

    def loss(params, batch, key):
        model, tokens = params["model"], batch["tokens"]
        want = observe(model, config, None, tokens, None, logits="hidden")[0]
        got, closed = masked(model, config, tokens, params["gate"], mixer, key, logits="hidden")
        apart = divergence(model, got, jax.lax.stop_gradient(want))
        short = jnp.maximum(batch["target"] - closed, 0.0)
        return apart + short, {"divergence": apart, "closed": closed, "target": batch["target"]}

    return loss


def start(config: ModelConfig) -> dict[str, jax.Array]:
    """Gates that are almost all open: every logit is -5, and closes in 1 of 150 draws of noise."""
    l, m, n = config.layers, config.width, config.kv_heads  # noqa: E741
    return {"norm": jnp.ones((l, m)), "weight": jnp.zeros((l, m, n)), "bias": jnp.zeros((l, n))}


def gates(
    model: Any, texts: Any = None, *, window: int = 256, ratio: float = 8.0, steps: int = 500,
    ramp: int | None = None, length: int = 1024, batch: int = 1, config: TrainConfig | None = None,
    out: str | os.PathLike[str] | None = None, progress: bool = True,
) -> Trained:  # fmt: skip
    """Trains the gates of a model, which stays as it is; `tables` makes tables of the result.

    texts: strings, or token ids [c t]; default Moby Dick, cut into stretches of `length` tokens,
    which must exceed the window. The compression ratio aimed at rises to `ratio` in `ramp` updates
    (default steps - 1). config: default Adam at 3e-5, gradients no longer than 1, in place of
    `steps`. History tells the divergence and the fraction of closed gates.

    The authors' text calls the divergence a forward KL; their code sums p_student * (log p_student
    - log p_teacher), and so does this. Not a reproduction: they train on 8 texts of 32,768 tokens a
    step for some 500 steps, with a window of 512 and Adam's second rate at 0.95 (here the trainer's
    0.999); that bits of all layers that see everything count alike, by their sigmoids, and weights
    that begin at zero are fill-ins.
    Source: Lancucki et al. 2025, arXiv:2506.05345 (DMS), and NVIDIA's Model-Optimizer.
    """
    numbers = model.config
    if all(numbers.kinds[i].window is not None for i in numbers.pattern):
        raise InputError("every layer of this model has a window: there is nothing to drop")
    if window < 1 or not 1 <= ratio < math.inf:
        raise InputError(f"window and ratio must be from 1, got {window} and {ratio}")
    how = TrainConfig(steps, 3e-5, clip=1.0) if config is None else config
    texts = [moby_dick()[: 8 * length * batch * how.steps]] if texts is None else texts
    if isinstance(texts[0], str):
        texts = sequences(model, texts, length, count=1 << 30)
    tokens = np.asarray(texts)
    if tokens.shape[1] <= window + 1:
        raise InputError(
            f"texts of {tokens.shape[1]} tokens never leave the window of {window}; raise length"
        )
    if not 1 <= batch <= len(tokens):
        raise InputError(f"batch is {batch} of {len(tokens)} texts; give from 1 to that")
    rise = how.steps - 1 if ramp is None else ramp
    each, seed = len(tokens) // batch, how.seed

    def batches(step):
        order = np.random.default_rng([seed, step // each]).permutation(len(tokens))
        rows = np.sort(order[step % each * batch :][:batch])
        return {"tokens": tokens[rows], "target": np.float32(target(step, rise, ratio))}

    params = {"gate": start(numbers), "model": model.params}
    return train(loss_of(numbers, Masked(window)), params, batches, how,
                 frozen=lambda name: name.startswith("model"), out=out,
                 progress=progress)  # fmt: skip


def tables(trained: Trained) -> dict[str, Any]:
    """The tables of recipe "dms" from trained gates: {"scorer": {"norm", "weight", "bias"}}."""
    return {"scorer": trained.params["gate"]}


def put(model: Any, made: dict[str, Any], name: str = "dms") -> Any:
    """The model with the tables of a recipe."""
    return dataclasses.replace(model, tables=model.tables | {name: made})
