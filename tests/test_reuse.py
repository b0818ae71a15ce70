"""join and edit: several caches as one text, and a text changed in the middle."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.config import LayerKind, ModelConfig
from kvjax.params import init_params

FULL = LayerKind()


def model(layers=2, kinds=(FULL,), pattern=None, seed=0):
    pattern = (0,) * layers if pattern is None else pattern
    config = ModelConfig("llama", 60, 32, 48, 4, 2, 8, kinds, pattern, 256)
    return kvjax.Model(init_params(config, jax.random.key(seed), std=0.3), config, None)


def ids(seed, t, b=2):
    return np.asarray(jax.random.randint(jax.random.key(seed), (b, t), 0, 60))


def after(m, cache, question):
    """Logits for `question`, after a copy of the cache."""
    return np.asarray(kvjax.extend(m, question, kvjax.fork(cache), logits="all")[0])


def read(m, tokens, room=80, **options):
    return kvjax.prefill(m, tokens, max_length=room, **options)[1]


QUESTION = ids(9, 4)


def test_join_of_one_is_the_identity():
    m = model()
    cache = read(m, ids(1, 20))
    np.testing.assert_array_equal(
        after(m, kvjax.join(m, [cache]), QUESTION), after(m, cache, QUESTION)
    )


@pytest.mark.parametrize("turned", [True, False])
def test_joined_pieces_are_attended_to_at_their_positions(turned):
    """With one layer, keys and values depend on a token and its position alone: so a join that
    follows is the whole text, and one that reuses equals attention over pieces that each begin at
    0, with the question after the longest, worked out here in float64 numpy."""
    m = model(layers=1)
    a, b = ids(1, 20), ids(2, 13)
    pieces = [read(m, a), read(m, b)]
    joined = kvjax.join(m, pieces, positions="follow" if turned else "reuse")
    assert joined.seen.tolist() == [33, 33]
    assert joined.clock.tolist() == ([33, 33] if turned else [20, 20])
    got = after(m, joined, QUESTION)
    if turned:
        want = after(m, read(m, np.concatenate([a, b], 1)), QUESTION)
    else:
        positions = np.concatenate([np.arange(20), np.arange(13), 20 + np.arange(4)])
        want = _one_layer(m, np.concatenate([a, b, QUESTION], 1), positions)[:, -4:]
    np.testing.assert_allclose(got, want, atol=2e-4)  # logits of order 10 in float32


def _one_layer(m, tokens, positions):
    """Logits of a one-layer model in float64, every token at its given rotary position."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), m.params)
    w, c = p.blocks, m.config
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + c.eps) * g  # noqa: E731
    angle = positions[:, None] * 10_000.0 ** -(np.arange(0, 8, 2) / 8)  # [t d/2]
    cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]

    def rope(x):
        a, b = x[..., :4], x[..., 4:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = p.embed[tokens]
    y = norm(x, w.attn_norm[0])
    q, k, v = (np.einsum("btm,hdm->bthd", y, z[0]) for z in (w.q, w.k, w.v))
    k, v = (np.repeat(z, 2, axis=2) for z in (rope(k), v))
    s = np.einsum("bthd,bshd->bhts", rope(q), k) * 8**-0.5
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    weights = np.exp(s - s.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    x = x + np.einsum("bhts,bshd,mhd->btm", weights, v, w.o[0])
    y = norm(x, w.mlp_norm[0])
    gate = y @ w.gate[0].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w.up[0].T)) @ w.down[0].T
    return norm(x, p.norm) @ p.embed.T


def test_temperature_and_scale_change_only_the_joined_pieces():
    """Scale near 0 takes log-sum-exp of the pieces to 0: they weigh as one slot of logit 0; a large
    temperature flattens. Both change the answer; 1 and 1 do not."""
    m = model()
    pieces = [read(m, ids(1, 20)), read(m, ids(2, 13))]
    plain = after(m, kvjax.join(m, pieces), QUESTION)
    same = after(m, kvjax.join(m, pieces, temperature=1.0, scale=1.0), QUESTION)
    np.testing.assert_array_equal(plain, same)
    for change in (dict(temperature=0.5), dict(scale=0.5)):
        assert np.abs(after(m, kvjax.join(m, pieces, **change), QUESTION) - plain).max() > 0.1


def test_a_joined_window_layer_sees_the_end_of_the_text():
    """One sliding layer of window 6: the question sees the last tokens of the whole text."""
    m = model(kinds=(LayerKind(6),), pattern=(0,))
    a, b = ids(1, 20), ids(2, 3)
    joined = kvjax.join(m, [read(m, a), read(m, b)])
    whole = read(m, np.concatenate([a, b], 1))
    np.testing.assert_allclose(after(m, joined, QUESTION), after(m, whole, QUESTION), atol=2e-4)


def test_an_edit_with_nothing_changed_is_the_identity():
    m, tokens = model(), ids(1, 20)
    cache = read(m, tokens)
    edited = kvjax.edit(m, cache, (5, 11), tokens[:, 5:11])
    np.testing.assert_allclose(after(m, edited, QUESTION), after(m, cache, QUESTION), atol=2e-4)
    assert edited.seen.tolist() == cache.seen.tolist()


@pytest.mark.parametrize("new", [0, 2, 9])
@pytest.mark.parametrize("span", [(0, 3), (7, 7), (12, 20)])
def test_an_edit_is_the_edited_text(span, new):
    """Exact with one layer, where what follows does not depend on what came before it."""
    m, tokens, fresh = model(layers=1), ids(1, 20), ids(3, 9)[:, :new]
    edited = kvjax.edit(m, read(m, tokens), span, fresh)
    text = np.concatenate([tokens[:, : span[0]], fresh, tokens[:, span[1] :]], 1)
    assert edited.seen.tolist() == [text.shape[1]] * 2
    want = after(m, read(m, text), QUESTION)
    np.testing.assert_allclose(after(m, edited, QUESTION), want, atol=2e-4)


def test_rows_of_other_lengths_keep_their_ends():
    m, tokens = model(layers=1), ids(1, 20)
    cache = read(m, tokens, lengths=[20, 9])
    edited = kvjax.edit(m, cache, (4, 6), ids(3, 5))
    assert edited.seen.tolist() == [23, 12]
    text = np.concatenate([tokens[1:, :4], ids(3, 5)[1:], tokens[1:, 6:9]], 1)
    want = after(m, read(m, text), QUESTION[1:])
    np.testing.assert_allclose(after(m, edited, QUESTION)[1:], want, atol=2e-4)


def test_what_cannot_be_exact_is_refused():
    m = model()
    cache = read(m, ids(1, 20))
    small = kvjax.condense(m, cache, kvjax.recipe("key_norm", keep=0.5, window=4))
    for call, said in (
        (lambda: kvjax.join(m, []), "at least one"),
        (lambda: kvjax.join(m, [cache, small]), "compressed"),
        (lambda: kvjax.join(m, [cache], positions="folow"), "follow"),
        (lambda: kvjax.join(m, [cache], temperature=0.0), "temperature must be"),
        (lambda: kvjax.join(m, [cache, read(m, ids(1, 5, 1))]), "1 rows, the first 2"),
        (lambda: kvjax.edit(m, small, (1, 2), ids(3, 1)), "compressed"),
        (lambda: kvjax.edit(m, cache, (5, 25), ids(3, 1)), "within the 20"),
        (lambda: kvjax.edit(m, cache, (0, 0), ids(3, 70)), "90 tokens and max_length is 80"),
    ):
        with pytest.raises(kvjax.InputError, match=said):
            call()
    windowed = model(kinds=(LayerKind(6),), pattern=(0,))
    with pytest.raises(kvjax.InputError, match="forgotten"):
        kvjax.edit(windowed, read(windowed, ids(1, 60)), (5, 6), ids(3, 1))
