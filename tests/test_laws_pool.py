"""Laws of the pool: who keeps how much changes no shape, and rows do not share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import DRAFT, MAX, PLAIN, generator, look, model, random_ids, row_of, small
from holding import by_head

import kvjax
from kvjax import observing
from kvjax.cache import condense as condensing
from kvjax.cache.condense import compact
from kvjax.cache.sizes import bucket
from kvjax.model import look as read


def test_prompts_of_a_bucket_share_their_compilations():
    """20 prompts of 61 to 64 tokens: each step of condensing and decoding is compiled once."""
    rng, whole = generator("bucket"), model(PLAIN)
    lengths = [61, 64, *rng.integers(61, 65, 18).tolist()]
    assert {bucket(n) for n in lengths} == {64}
    steps = (condensing.chosen, condensing.packed, observing._observe)
    before = [step._cache_size() for step in steps]
    traced = []

    @jax.jit
    def next_tokens(cache, tokens):
        traced.append(cache)
        return read(whole.params, PLAIN, cache, tokens)[0]

    for n in lengths:
        ids = rng.integers(0, PLAIN.vocab, (1, n)).astype(np.int32)
        _, exact = kvjax.prefill(whole, ids, max_length=80, logits="none")
        cache = kvjax.condense(whole, exact, kvjax.recipe("kvzip", page=4, sinks=1), tokens=ids)
        kept = {at: len(x) for at, x in by_head(cache).items()}
        assert sum(kept.values()) == round(0.5 * 4 * n)
        assert np.isfinite(next_tokens(cache, ids[:, :1])).all()
    assert [step._cache_size() - n for step, n in zip(steps, before, strict=True)] == [1, 1, 1]
    assert len(traced) == 1


PROFILES = {  # scores are multiplied by these, [l n] of each row
    "heads": ([[1, 100], [1, 100]], [[100, 1], [100, 1]]),
    "layers": ([[1, 1], [100, 100]], [[100, 100], [1, 1]]),
}


@pytest.mark.parametrize("name", PROFILES)
def test_rows_of_opposite_profiles(name):
    """Rows that keep different heads, or layers, keep what they keep alone, and answer the same.

    Logits: 1e-6 of the largest, for other block sizes in the matrix products of one row.
    """
    lengths, whole, recipe = (25, 18), model(PLAIN), small("kvzip", window=0)
    ids = random_ids(25, "profiles")
    args = dict(max_length=MAX, lengths=lengths, logits="none")
    exact = kvjax.prefill(whole, ids, **args)[1]
    scores = generator("profiles").random((2, 2, 2, MAX))  # [l b n s]
    scores = scores * np.stack(PROFILES[name], 1)[..., None]

    def made(cache, rows):
        evidence = ({"maxima": jnp.asarray(scores[:, rows], jnp.float32)},)
        later = MAX - min(np.asarray(lengths)[rows])
        return compact(cache, evidence, np.asarray(lengths)[rows], PLAIN, recipe, int(later))

    both = made(exact, [0, 1])
    held, ask = by_head(both), random_ids(DRAFT, "profiles")
    logits = look(whole.params, PLAIN, both, ask)[0]
    for row, n in enumerate(lengths):
        favoured = np.argwhere(np.asarray(PROFILES[name][row]) == 100).tolist()
        for layer, head in np.ndindex(2, 2):  # half of all: the favoured keep everything
            wanted = range(n) if [layer, head] in favoured else range(4)  # or the sinks
            got = held[layer, row, head]
            assert {*range(4)} <= {*got} <= {*range(n)}
            assert len(got) >= len(wanted) - 8  # eight sinks of the others take room
        alone = made(row_of(exact, row), [row])
        mine = {(a, c): x for (a, b, c), x in held.items() if b == row}
        assert {(a, c): x for (a, _, c), x in by_head(alone).items()} == mine
        got = look(whole.params, PLAIN, alone, ask[row : row + 1])[0]
        scale = np.abs(logits[row]).max()
        np.testing.assert_allclose(got[0], logits[row], rtol=0, atol=1e-6 * scale)
