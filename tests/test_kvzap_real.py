"""KVzap with SmolLM2 itself. Long: `pytest -m full`."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax.data import moby_dick
from kvjax.train import kvzap


@pytest.mark.full
def test_smollm2_learns_what_kvzip_would_keep():
    """Ten texts of 400 tokens: ranks of tokens agree in a part of the book that was not learned
    from (measured: mean 0.74, least layer 0.56), and a planted answer stays, as exact memory."""
    one, book = kvjax.load("smollm2-135m"), moby_dick()
    cut = len(book) * 4 // 5
    tables = kvzap.surrogate(
        one, [book[:cut]], kind="linear", count=10, length=(380, 420), tokens=300, progress=False
    )
    found = kvzap.agreement(one, tables, kvzap.pieces(one, [book[cut:]], 2, (380, 420), 1))
    assert found.mean() > 0.65 and found.mean(axis=1).min() > 0.45
    ids = lambda text: one.tokenizer.encode(text, add_bos=False)  # noqa: E731
    text = ids(book[cut + 20_000 : cut + 26_000])[:680]
    text[200:200] = ids(" The secret number of the harbour is 48213.")
    asked, answer = ids("\n\nThe secret number of the harbour is"), ids(" 48213.")
    one = dataclasses.replace(one, tables={"kvzap": tables})

    def surprise(recipe):
        cache = kvjax.prefill(one, [text], recipe, max_length=len(text) + 64, logits="none")[1]
        logits = kvjax.extend(one, [asked + answer], cache, logits="all")[0]
        p = np.asarray(jax.nn.log_softmax(logits[0]))
        return -sum(p[len(asked) - 1 + i, token] for i, token in enumerate(answer))

    exact, mine, snap = (surprise(kvjax.recipe(name)) for name in ("exact", "kvzap", "snapkv"))
    assert mine < exact + 0.5 < snap
