"""DuoAttention: a gate for each kv head, learned; heads with low gates need no old tokens."""

import dataclasses
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
from kvjax.train.loop import TrainConfig, Trained, train  # pyright: ignore[reportMissingImports]
from kvjax.train.passkeys import Passkeys  # pyright: ignore[reportMissingImports]


@struct.dataclass
class Gated(struct.Record):
    """Attention of each kv head as gate * full + (1 - gate) * streaming, while training.

    Streaming sees the first `sink` tokens and the `recent` newest, the query itself included. The
    gates [n] of a layer come as its tables {"gate": ...}. Layers with a window of their own attend
    as they always do.
    """

    sink: int = struct.static(128)
    recent: int = struct.static(256)

    def mix(self, query: Query, k, v, pos, tables, use, hidden=None):
        if query.window is not None:
            return attend_rows(query, k, v, pos), ()
        return self.both(query, k, v, pos, tables["gate"]), ()

    def both(self, query: Query, k, v, pos, gate):
        """What both give, weighed; scores are made again for the gradient, not kept."""

        @jax.checkpoint
        def run(q, k, v, gate):
            asked = query.replace(q=q)
            (full, lse), (part, _) = attend_rows(asked, k, v, pos), self.streaming(asked, k, v, pos)
            share = jnp.repeat(gate, q.shape[2] // gate.shape[0])[:, None]  # [h 1]
            return share * full + (1 - share) * part, lse

        return run(query.q, k, v, gate)

    def streaming(self, query: Query, k, v, pos):
        """Attention to the sinks and the recent tokens: two pieces that share no token."""
        near = attend_rows(query.replace(window=self.recent), k, v, pos)
        size = min(self.sink, k.shape[2])
        if not size:
            return near
        before = query.replace(pos=jnp.maximum(query.pos - self.recent, -1))
        return merge(near, attend_rows(before, k[:, :, :size], v[:, :, :size], pos[:, :size]))


@jax.custom_vjp
def held(gate):
    """The gates clamped to [0, 1]. At a bound, gradients that lead further out are dropped.

    The authors clamp the parameters after each update; here they may lie past a bound by what
    Adam's momentum carries them, and come back at once when the gradient turns.
    """
    return jnp.clip(gate, 0.0, 1.0)


def _held(gate):
    return held(gate), gate


def _pull(gate, g):
    out = ((gate >= 1) & (g < 0)) | ((gate <= 0) & (g > 0))
    return (jnp.where(out, 0.0, g),)


held.defvjp(_held, _pull)


def hidden(params, config: ModelConfig, tokens, count, gate=None, mixer: Gated | None = None):
    """The final hidden states [b t m], of the full model or with gates [l n]."""
    tables = None if gate is None else {"gate": gate}
    return observe(params, config, None, tokens, mixer, count=count, tables=tables,
                   logits="hidden")[0]  # fmt: skip


def loss_of(config: ModelConfig, mixer: Gated, weight: float = 0.05) -> Callable:
    """The loss of {"gate": [l n], "model": Params} on a batch of `Passkeys`.

    The mean squared difference of the final hidden states at the answers, and weight * mean|gate|
    over the layers that see everything.
    """
    full = np.array([config.kinds[i].window is None for i in config.pattern])

    def loss(params, batch, key):
        gate = held(params["gate"])
        args = params["model"], config, batch["tokens"], batch["count"]
        want, got = hidden(*args), hidden(*args, gate, mixer)
        error = jnp.mean((got - want).astype(jnp.float32) ** 2, axis=-1)
        answer = batch["answer"]
        apart = jnp.sum(jnp.where(answer, error, 0.0)) / jnp.maximum(answer.sum(), 1)
        size = jnp.mean(jnp.abs(gate[full]))
        return apart + weight * size, {"difference": apart, "gates": size}

    return loss


def gates(
    model: Any, batches: Callable[[int], dict] | None = None, *, sink: int = 128,
    recent: int = 256, weight: float = 0.05, config: TrainConfig | None = None,
    out: str | os.PathLike[str] | None = None, progress: bool = True,
) -> Trained:  # fmt: skip
    """Trains the gates of a model, which stays as it is; `labels` makes tables of the result.

    batches: such as `Passkeys`; default: ten passkeys in 1,024 tokens of Moby Dick. config: default
    2,000 steps at 0.02 with Adam, whose choice and constant rate are ours. `params["gate"]` [l n]
    of what is returned may lie a little outside 0 to 1; `labels` clamps.
    The paper trains with texts of 1K to 32K tokens, ten passkeys of 32, eight texts a step;
    smaller runs give rougher gates. Not a reproduction: texts, wording and optimizer differ. Recipe
    "duo" condenses after an exact prefill and keeps all later tokens; the authors' streaming heads
    forget in the prompt's chunks already, and go on forgetting.
    Source: Xiao et al. 2024, arXiv:2410.10819 (DuoAttention), section 2, and its code.
    """
    if sink < 0 or recent < 1:
        raise InputError(f"sink must be from 0 and recent from 1, got {sink} and {recent}")
    numbers = model.config
    if all(kind.window is not None for kind in (numbers.kinds[i] for i in numbers.pattern)):
        raise InputError("every layer of this model has a window: there is no head to gate")
    if batches is None:
        batches = Passkeys(model.tokenizer, moby_dick(), words=8)
    config = TrainConfig(2000, learning_rate=0.02) if config is None else config
    params = {"gate": jnp.ones((numbers.layers, numbers.kv_heads)), "model": model.params}
    return train(loss_of(numbers, Gated(sink, recent), weight), params, batches, config,
                 frozen=lambda name: name != "gate", out=out, progress=progress)  # fmt: skip


def labels(trained: Trained) -> dict[str, Any]:
    """The tables of recipe "duo" from trained gates: {"scorer": {"label": [l n]}}."""
    return {"scorer": {"label": jnp.clip(trained.params["gate"], 0.0, 1.0)}}


def put(model: Any, tables: dict[str, Any], name: str = "duo") -> Any:
    """The model with the tables of a recipe."""
    return dataclasses.replace(model, tables=model.tables | {name: tables})


def keep_for(model: Any, sparsity: float, length: int, sinks: int = 64, window: int = 256) -> float:
    """The `keep` of recipe "duo" at which this fraction of heads streams, for texts of a length.

    The heads that stream are those below the quantile `sparsity` of the gates; ties go to the
    lower layer and head, as whole heads, where the authors break them with noise.
    """
    if not 0 <= sparsity <= 1:
        raise InputError(f"sparsity is a fraction from 0 to 1, got {sparsity}")
    numbers = model.config
    full = sum(numbers.kinds[i].window is None for i in numbers.pattern)
    heads = full * numbers.kv_heads
    streams, held = round(sparsity * heads), min(sinks + window, length)
    return ((heads - streams) * length + streams * held) / (heads * length)
