"""Laws of the cache, over the matrix of `cases.py`: what holds whatever the recipe."""

import jax
import jax.numpy as jnp
import numpy as np
from cases import (
    CASES,
    DRAFT,
    HYBRID,
    LENGTHS,
    LONGEST,
    LOSSLESS,
    MAX,
    ROWS,
    cuts,
    every,
    feed,
    filled,
    generator,
    look,
    model,
    names,
    pieces,
    probe,
    random_ids,
    random_tokens,
    row_of,
    run,
    small,
)
from holding import assert_same, entries, overwrite

import kvjax

UNSCORED = [c for c in CASES.values() if not c.after and c.recipe.choice is None]
STREAMED = [c for c in CASES.values() if not c.after and c.recipe.choice is not None]
KEY_ONLY = [c for c in STREAMED if c.recipe.store.k.name == "raw"]


@names(LOSSLESS.values())
def test_lossless(case):
    """Read in any chunks through a cache with room for all, a text has the logits it has at once.

    The float64 attention oracle is in test_laws_parts.py. Logits pass two layers and a product of
    32 terms, whose sums are reordered: 2e-6 of their size in each, hence 1e-5 of the largest.
    """
    params, config, ids = model(case.config).params, case.config, random_ids(LONGEST, "lossless")
    first, rest = np.array(LENGTHS) - 6, random_ids(6, "rest")
    rows = [np.concatenate([ids[i, :n], rest[i]]) for i, n in enumerate(first)]
    ids = np.stack([np.pad(r, (0, LONGEST - len(r))) for r in rows])
    want = np.asarray(look(params, config, None, ids, jnp.asarray(LENGTHS))[0])
    counts, cache = cuts(generator("lossless", case.name), first), None
    if case.after:
        args = dict(max_length=MAX, lengths=first, logits="none")
        cache = kvjax.prefill(model(config), ids, case.recipe, **args)[1]
    else:
        cache = kvjax.init_cache(config, case.recipe, ROWS, MAX)
        for part, count in zip(pieces(ids, counts, axis=1), counts, strict=True):
            new = look(params, config, cache, part, jnp.asarray(count))[1]
            cache = run("absorb", cache, new, count)
    scale, start = np.abs(want).max(), 0
    for part in pieces(ids, [np.full(ROWS, DRAFT)] * 2, DRAFT, axis=1, start=first):
        logits, new = look(params, config, cache, part)
        cache = run("append", cache, new, np.full(ROWS, DRAFT, np.int32))
        cache = run("compress", cache)
        for row, n in enumerate(first):
            right = want[row, n + start : n + start + DRAFT]
            np.testing.assert_allclose(logits[row], right, rtol=0, atol=1e-5 * scale)
        start += DRAFT
    assert not np.asarray(cache.flags).any()


@names(UNSCORED)
def test_chunking_without_scorer(case):
    """Without a scorer the cache is the same, bit by bit, however the same K and V are cut."""
    tokens = random_tokens(LONGEST, "cut", config=case.config)
    empty = kvjax.init_cache(case.config, case.recipe, ROWS, MAX)
    ways = [cuts(generator("cut", case.name, i)) for i in range(3)]
    want = overwrite(feed(empty, tokens, ways[0]))
    assert entries(want) == [tuple(range(e)) for e in _edges(case, want)]
    assert_same(overwrite(feed(empty, tokens, ways[1])), want)
    short = cuts(generator("short", case.name), piece=DRAFT)
    assert_same(overwrite(feed(empty, tokens, short, op="append", piece=DRAFT)), want)


def _edges(case, cache):
    """How many tokens each (layer, row, head) body of `entries` must hold: all but the window."""
    if case.recipe.store is None:
        return []
    shapes = [jax.tree.leaves(b.codes)[0].shape for g in cache.groups for b in g.bodies]
    return [case.edges[row] for s in shapes for _, row, _ in np.ndindex(s[:3])]


@names(KEY_ONLY)
def test_chunking_with_a_scorer_of_keys(case):
    """With a scorer of raw keys the same tokens are kept, however they are cut."""
    tokens = random_tokens(LONGEST, "cut", config=case.config)
    empty = kvjax.init_cache(case.config, case.recipe, ROWS, MAX)
    one, two = (
        entries(feed(empty, tokens, cuts(generator("cut", case.name, i)))) for i in range(2)
    )
    three = entries(
        feed(empty, tokens, cuts(generator("short"), piece=DRAFT), op="append", piece=DRAFT)
    )
    assert one == two == three
    assert {len(kept) for kept in one} != {0}


@every
def test_padding(case):
    """What lies in a slot without a token, and what follows a row's last token, changes nothing."""
    cache = filled(case)
    junk = overwrite(cache, generator("junk", case.name))
    assert any(
        not np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(junk), jax.tree.leaves(cache), strict=True)
    )
    assert probe(case, junk).tobytes() == probe(case, cache).tobytes()
    counts = np.array([2, 0], np.int32)
    new = random_tokens(DRAFT, "new", config=case.config)
    past = np.arange(DRAFT) >= counts[:, None]
    noise = np.random.default_rng(0).normal(size=new.k.shape) * 50
    other = jax.tree.map(
        lambda x: jnp.where(past[None, :, :, None, None], noise.astype(x.dtype), x), new
    )
    for op in ("append", "absorb"):
        want = overwrite(run(op, cache, new, counts))
        assert_same(overwrite(run(op, cache, other, counts)), want)
        assert_same(overwrite(run(op, junk, other, counts)), want)


@every
def test_rows_do_not_see_each_other(case):
    """A row gives the same logits and the same memory, bit by bit, beside any other row."""
    cache, other = filled(case), filled(case, 1)
    row = jnp.arange(ROWS) == 0
    mixed = jax.tree.map(
        lambda x, y: jnp.where(row.reshape((-1,) + (1,) * max(x.ndim - 2, 0)), x, y), cache, other
    )
    assert probe(case, mixed)[0].tobytes() == probe(case, cache)[0].tobytes()
    assert probe(case, mixed)[1].tobytes() != probe(case, cache)[1].tobytes()
    new, noise = (random_tokens(DRAFT, w, config=case.config) for w in ("new", "noise"))
    swapped = jax.tree.map(lambda x, y: jnp.stack([x[:, 0], y[:, 1]], 1), new, noise)
    one, two = (run("append", c, t, np.array(n, np.int32))
                for c, t, n in ((cache, new, [3, 3]), (mixed, swapped, [3, 1])))  # fmt: skip
    one, two = run("compress", one), run("compress", two)
    assert_same(row_of(one, 0), row_of(two, 0))


@names([CASES[n] for n in ("hybrid int8", "key_norm during", "ada_snapkv", "snapkv int8")])
def test_row_alone(case):
    """A row alone has the logits it has in a batch: 1e-6 of the largest, for other block sizes in
    the matrix products of one row."""
    cache = filled(case)
    ids = random_ids(DRAFT, "probe")
    want = probe(case, cache)
    for row in range(ROWS):
        alone = row_of(cache, row)
        got = look(model(case.config).params, case.config, alone, ids[row : row + 1])[0]
        np.testing.assert_allclose(got[0], want[row], rtol=0, atol=1e-6 * np.abs(want).max())


@every
def test_rollback(case):
    """Appending with a count is appending only those, and so is appending all and forgetting."""
    cache = filled(case)
    new = random_tokens(DRAFT, "draft", config=case.config)
    short = np.array([1, 2], np.int32)
    alone = [kvjax.Tokens(new.k[:, :, :n], new.v[:, :, :n]) for n in short]
    want = [row_of(kvjax.append(cache, x), row) for row, x in enumerate(alone)]
    counted = run("append", cache, new, short)
    whole = run("append", cache, new, np.full(ROWS, DRAFT, np.int32))
    cut = run("truncate", whole, np.array(LENGTHS, np.int32) + short)
    assert not np.asarray(cut.flags).any() and np.asarray(whole.seen).tolist() == [28, 21]
    for row, right in enumerate(want):
        assert_same(overwrite(row_of(counted, row)), overwrite(right))
        back = overwrite(row_of(cut, row))
        assert_same(back, overwrite(right), but=("high",))  # rings remember what they have lost
    assert probe(case, cut).tobytes() == probe(case, counted).tobytes()


def test_rollback_in_a_sliding_window():
    """A ring answers for a rollback until what the window needs has been written over.

    Window 6, stride 4, lookahead 3: a ring of 16 slots. From 25 tokens on, one that goes back to n
    needs arrivals n - 5 and later, and the ring still has 9 and later: n = 14 is the last.
    """
    cache = filled(CASES["hybrid exact"])
    assert cache.groups[0].tail.capacity == 16
    for n, flag in ((14, 0), (13, kvjax.UNDERFLOW)):
        got = run("truncate", cache, np.array([n, 18], np.int32))
        assert np.asarray(got.flags).tolist() == [flag, 0]
    ids = random_ids(LONGEST, 0)
    whole = model(HYBRID)
    args = dict(max_length=MAX, logits="none")
    long = kvjax.prefill(whole, ids, small("exact"), lengths=LENGTHS, **args)[1]
    short = kvjax.prefill(whole, ids[:, :14], small("exact"), lengths=[14, 14], **args)[1]
    got = probe(CASES["hybrid exact"], run("truncate", long, np.array([14, 14], np.int32)))
    want = probe(CASES["hybrid exact"], short)
    # Other chunks were read, so sums were ordered otherwise: as in `test_lossless`.
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
