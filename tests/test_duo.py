"""DuoAttention: passkeys, gated attention against a dense one, training, the condensed cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HYBRID, PLAIN, generator, random_ids
from float64 import dense

import kvjax
from kvjax.attention import Query
from kvjax.data import moby_dick
from kvjax.params import Block, init_params
from kvjax.train import TrainConfig, duo, loop  # pyright: ignore[reportMissingImports]
from kvjax.train.passkeys import WORDS, Passkeys  # pyright: ignore[reportMissingImports]

RUN = jax.jit(duo.hidden, static_argnums=1)
ONE = dataclasses.replace(PLAIN, pattern=(0,))  # keys and values do not depend on attention


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    """Drawing the loss takes seconds, and has its own test."""
    monkeypatch.setattr(loop.record, "plot", lambda *args: None)


class Words:
    """Each word is a token, numbered as it comes."""

    def __init__(self):
        self.known = {}

    def encode(self, text, add_bos=None):
        return [self.known.setdefault(w, len(self.known)) for w in text.split()]

    def decode(self, ids):
        back = {i: w for w, i in self.known.items()}
        return [back[int(i)] for i in ids]


def params_of(config, seed=0):
    return init_params(config, jax.random.key(seed), std=0.3)


def test_passkeys_are_hidden_in_order_and_asked_at_the_end():
    words = Words()
    make = Passkeys(words, moby_dick(), length=200, shortest=190, count=4, words=5, batch=2)
    batch = make(3)
    for tokens, count, answer in zip(
        *(batch[x] for x in ("tokens", "count", "answer")), strict=True
    ):
        text = words.decode(tokens[:count])
        assert 190 <= count <= 200 and answer.sum() == 4 * 5 and not answer[count:].any()
        starts = [i for i in range(count) if text[i : i + 2] == ["passkey", "is"]]
        assert (
            len(starts) == 4
            and [text[i - 1] for i in starts] == "first second third fourth".split()
        )
        hidden = [w.rstrip(".") for i in starts for w in text[i + 2 : i + 7]]
        asked = words.decode(tokens[answer])
        assert asked == hidden and set(asked) <= set(WORDS)
        # the story is 190 to 200 less 4 * (5 + 5) words of hiding and 4 * (7 + 5) of asking
        assert 0.04 * (count - 88) <= starts[0] - 4 and starts[-1] <= 0.95 * (count - 88) + 40
    again = make(3)
    assert all((batch[x] == again[x]).all() for x in batch)
    assert (make(4)["tokens"] != batch["tokens"]).any()
    with pytest.raises(kvjax.InputError, match="take 88 tokens of 80"):
        dataclasses.replace(make, length=80, shortest=None)(0)


def test_gated_attention_is_the_dense_one():
    """Gates 1, 0 and 0.25 of three kv heads; sinks 3 and recent 5 of 14 tokens; and all of few."""
    rng = generator("gated")
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((1, 14, 6, 8), *[(1, 3, 14, 8)] * 2))
    pos, gate = np.arange(14), np.array([1.0, 0.0, 0.25], np.float32)
    query = Query(jnp.asarray(q), jnp.asarray(pos)[None], 8**-0.5)
    args = query, jnp.asarray(k), jnp.asarray(v), jnp.asarray(pos)[None]
    mix = jax.jit(lambda mixer, gate: mixer.mix(*args, {"gate": gate}, None)[0][0])
    out = mix(duo.Gated(3, 5), gate)
    causal = pos <= pos[:, None]
    near = causal & ((pos < 3) | (pos > pos[:, None] - 5))
    for h in range(6):
        n, g = h // 2, gate[h // 2]
        one, two = (dense(q[0, :, h], k[0, n], v[0, n], see, 8**-0.5)[0] for see in (causal, near))
        np.testing.assert_allclose(out[0, :, h], g * one + (1 - g) * two, atol=2e-6)
    full, want = (mix(duo.Gated(6, 8), jnp.full(3, gate)) for gate in (0.0, 1.0))
    np.testing.assert_allclose(full, want, atol=2e-6)  # 14 tokens are sinks or recent


@pytest.mark.parametrize("config", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_gates_of_one_change_nothing_nor_do_those_of_window_layers(config):
    params, ids = params_of(config), random_ids(20, "duo")
    full = np.array([config.kinds[i].window is None for i in config.pattern])
    gate = jnp.broadcast_to(jnp.where(full[:, None], 1.0, 0.0), (2, 2))
    count = jnp.array([20, 13])
    want = RUN(params, config, ids, count)
    got = RUN(params, config, ids, count, gate, duo.Gated(2, 3))
    real = np.arange(20) < count[:, None]
    np.testing.assert_allclose(
        got[real], want[real], atol=1e-5
    )  # states of order 1, another fusion
    moved = RUN(params, config, ids, count, gate * 0, duo.Gated(2, 3))
    assert abs(moved - want)[0, -1].max() > 1e-2


@pytest.mark.full
def test_recipe_is_what_the_gates_were_trained_for():
    """One layer: the next token after condensing sees sinks, window and itself, as in training."""
    params, ids = params_of(ONE), random_ids(40, "deploy", rows=1)
    recipe = kvjax.recipe("duo", sinks=3, window=5, page=4)
    for gate, sparsity in (([[0.3, 0.1]], 0.5), ([[0.2, 0.9]], 1.0)):
        tables = {"scorer": {"label": jnp.asarray(gate)}}
        model = duo.put(kvjax.Model(params, ONE, None), tables)
        keep = duo.keep_for(model, sparsity, 39, sinks=3, window=5)
        made = dataclasses.replace(recipe, keep=keep)
        _, cache = kvjax.prefill(model, ids[:, :39], made, max_length=44)
        got, _ = kvjax.extend(model, ids[:, 39:], cache, logits="last")
        streams = {0.5: [[1.0, 0.0]], 1.0: [[0.0, 0.0]]}[sparsity]
        y = RUN(params, ONE, ids, jnp.array([40]), jnp.asarray(streams), duo.Gated(3, 6))
        np.testing.assert_allclose(got, y[:, -1] @ params.embed.T, atol=2e-5)  # logits of order 5
    assert duo.keep_for(model, 1.0, 8, 3, 5) == duo.keep_for(model, 0.0, 39, 3, 5) == 1.0


def made_model():
    """The first kv head writes nothing: its queries may as well stream. The second one matters."""
    params = params_of(PLAIN)
    assert isinstance(params.blocks, Block)
    v = params.blocks.v.at[:, 0].set(0.0)
    return kvjax.Model(params.replace(blocks=params.blocks.replace(v=v)), PLAIN, None)


def batches(step):
    tokens = random_ids(24, "train", step)
    return {"tokens": tokens, "count": np.array([24, 20]), "answer": np.arange(24) >= [[16], [14]]}


def train(out=None, source=batches):
    config = TrainConfig(12, learning_rate=0.1, log_every=1, save_every=4)
    return duo.gates(made_model(), source, sink=1, recent=3, config=config, out=out, progress=False)


def test_training_lets_go_of_the_head_that_writes_nothing_and_goes_on_to_the_same_bits(tmp_path):
    def until(step):
        if step == 6:
            raise OSError("no more")
        return batches(step)

    with pytest.raises(OSError, match="no more"):
        train(tmp_path / "run", until)
    done, whole = train(tmp_path / "run"), train()
    assert (done.params["gate"] == whole.params["gate"]).all()
    gate = duo.labels(done)["scorer"]["label"]
    assert gate.shape == (2, 2) and (gate[:, 0] < 0.1).all() and (gate[:, 1] > 0.7).all()
    first, last = done.history[0], done.history[-1]
    assert first["metrics"]["difference"] < 1e-9 and first["loss"] == pytest.approx(0.05, abs=1e-6)
    assert last["loss"] < 0.8 * first["loss"]
    assert done.params["model"].embed is not None


def test_gates_stay_near_the_bounds_and_come_back():
    pull = jax.grad(lambda gate, to: jnp.sum(duo.held(gate) * to))
    gate = jnp.array([1.2, 1.2, -0.1, -0.1, 0.5])
    got = pull(gate, jnp.array([1.0, -1.0, 1.0, -1.0, 2.0]))
    assert got.tolist() == [1.0, 0.0, 0.0, -1.0, 2.0]
    assert duo.held(gate).tolist() == [1.0, 1.0, 0.0, 0.0, 0.5]


def test_bad_numbers_are_refused():
    with pytest.raises(kvjax.InputError, match="recent from 1"):
        duo.gates(made_model(), batches, recent=0)
    with pytest.raises(kvjax.InputError, match="sparsity"):
        duo.keep_for(made_model(), 1.5, 100)
    with pytest.raises(kvjax.InputError, match="labels of heads"):
        kvjax.prefill(made_model(), random_ids(20, 0), kvjax.recipe("duo", sinks=1, window=2),
                      max_length=24)  # fmt: skip


@pytest.mark.full
def test_a_real_model_gates_its_heads():
    """Its first four layers, twenty steps of 256 tokens: the loss falls below that of full
    attention, 0.05."""
    model = kvjax.load()
    assert isinstance(model.params.blocks, tuple)
    params = model.params.replace(blocks=model.params.blocks[:4])
    config = dataclasses.replace(model.config, pattern=model.config.pattern[:4])
    model = dataclasses.replace(model, params=params, config=config)
    make = Passkeys(model.tokenizer, moby_dick(), length=256, count=2, words=4)
    config = TrainConfig(20, learning_rate=0.02, log_every=1)
    done = duo.gates(model, make, sink=16, recent=32, config=config, progress=False)
    assert done.history[-1]["loss"] < 0.05
    assert (done.params["gate"] < 1).any()
