"""Laws of what a cache holds: shapes, buffers, arrivals, flags, bytes, rows of a batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CASES,
    DRAFT,
    LENGTHS,
    LONGEST,
    MAX,
    PIECE,
    PLAIN,
    ROWS,
    Case,
    compiled,
    every,
    feed,
    filled,
    look,
    model,
    names,
    random_ids,
    random_tokens,
    row_of,
    run,
    small,
    zeros,
)
from holding import arrivals, assert_same, by_head, entries

import kvjax
from kvjax.cache.recipes import REST


@every
def test_shape_and_donation(case):
    """Operations keep tree, shapes and dtypes, and write into the memory they are given."""
    cache = filled(case)
    spec = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    new = random_tokens(DRAFT, "new", config=case.config)
    logits, seen = look(model(case.config).params, case.config, cache, random_ids(DRAFT))
    assert logits.shape == (ROWS, DRAFT, PLAIN.vocab)
    only = seen.replace(evidence=())  # a scorer that streams has its own
    assert jax.tree.map(lambda x: (x.shape, x.dtype), only) == jax.tree.map(
        lambda x: (x.shape, x.dtype), new
    )
    long = random_tokens(PIECE, "new", config=case.config)
    ops = dict(append=(new, zeros()), absorb=(long, zeros()), compress=(), truncate=(zeros(),))
    for op, args in ops.items():
        made = run(op, cache, *args)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == spec, op
        memory = compiled(op, cache, *args).memory_analysis()
        held = sum(x.nbytes for x in jax.tree.leaves(cache))
        assert memory.alias_size_in_bytes == held, op


@every
def test_arrivals(case):
    """Slots know their tokens: unique in a head, ascending once condensed, as many as declared."""
    cache = filled(case)
    edge = case.edges
    if case.recipe.window == REST:  # 24 entries, 4 of them sinks, whatever the length
        edge = [max(n - 20, 0) for n in LENGTHS]
    assert np.asarray(cache.edge).tolist() == edge
    assert np.asarray(cache.seen).tolist() == list(LENGTHS)
    for group in cache.groups:
        tail = arrivals(cache, group)[0]
        for row, n in enumerate(LENGTHS):
            low = 0 if group.keeps_all else edge[row]
            low = max(0, n - group.window + 1) if group.window else low
            held = tail[row][tail[row] >= 0]
            assert sorted(held) == list(range(low, n))
            assert all(p % len(tail[row]) == s for s, p in enumerate(tail[row]) if p >= 0)
    total = {}
    for (layer, row, head), kept in _stored(cache).items():
        assert len(set(kept)) == len(kept) and all(p < edge[row] for p in kept)
        assert not case.after or kept == sorted(kept)
        if case.recipe.choice:
            assert {*range(min(case.recipe.choice.sinks, edge[row]))} <= {*kept}
        total[row, layer, head] = len(kept)
    layers = sorted({layer for _, layer, _ in total})
    for row, n in enumerate(LENGTHS):
        if total:
            got = np.array([[total[row, layer, head] for head in range(2)] for layer in layers])
            _as_declared(case, got, n, edge[row])


def _stored(cache):
    """{(layer, row, head): arrivals in bodies and pool, in order of their slots}."""
    made, full = {}, [i for g in cache.groups if not g.window for i in range(g.start, g.stop)]
    for group in cache.groups:
        for body, pos in zip(group.bodies, arrivals(cache, group)[1], strict=True):
            if pos is None or body.plain:  # what stands for tokens that were dropped
                continue
            for layer, row, head in np.ndindex(pos.shape[:3]):
                mine = pos[layer, row, head].ravel()
                at = (group.start + layer, row, head)
                made[at] = made.get(at, []) + mine[mine >= 0].tolist()
    for (layer, row, head), mine in by_head(cache).items():
        at = (full[layer], row, head)
        made[at] = mine + made.get(at, [])
    return made


def _as_declared(case, got, n, edge):
    """Entries got [l heads] of a row of n tokens are what the budget gives."""
    choice, window, keep = case.recipe.choice, n - edge, case.recipe.keep
    per = n if choice is None else round(keep * (n if case.after else MAX))
    each = min(edge, per - min(window, per))
    budget = choice.budget.name if choice else "uniform"
    if budget == "model":
        assert got.sum() == round(keep * n * got.size) - window * got.size
    elif budget == "pooled":
        assert got.sum(axis=1).tolist() == [2 * each] * len(got)
    elif budget == "pyramid":  # from a twentieth of 8 or 5 to what the mean leaves: 15.6 or 9.75
        assert got.tolist() == {8: [[16, 16], [0, 0]], 5: [[10, 10], [0, 0]]}[each]
    elif budget in ("heads", "labelled"):  # some whole, the others alike
        rest = {*got.ravel().tolist()} - {edge}
        assert len(rest) == 1 and got.sum() <= round(keep * n * got.size) - window * got.size
    else:
        assert got.tolist() == [[each, each]] * len(got)


@every
def test_no_leaf_shares_a_buffer(case):
    """Leaves may be donated together; a condensed cache and a fork leave the original alone."""
    cache = filled(case)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache) if x.size]
    assert len(set(pointers)) == len(pointers)
    before = jax.tree.map(np.array, cache)
    copy = kvjax.fork(cache)
    again = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(copy) if x.size}
    assert not again & set(pointers)
    new = random_tokens(DRAFT, "new", config=case.config)
    changed = compiled("append", copy, new, zeros() + DRAFT)(copy, new, zeros() + DRAFT)
    assert np.asarray(changed.seen).tolist() == [28, 21]
    assert_same(cache, before)


@names([CASES["key_norm"], CASES["hybrid snapkv rerot"], CASES["int8 after"]])
def test_condense_leaves_the_exact_cache_alone(case):
    """The exact cache can be read and consumed after what was condensed from it is consumed."""
    ids = random_ids(LONGEST, 0)
    whole = model(case.config)
    exact = small("exact")
    cache = kvjax.prefill(whole, ids, exact, max_length=MAX, lengths=LENGTHS, logits="none")[1]
    before = jax.tree.map(np.array, cache)
    made = kvjax.condense(whole, cache, case.recipe, tokens=ids)
    shared = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(made) if x.size}
    assert not shared & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)}
    new = random_tokens(DRAFT, "new", config=case.config)
    compiled("append", made, new, zeros() + 1)(made, new, zeros() + 1)
    assert_same(cache, before)


def test_flags():
    """OVERFLOW, UNDERFLOW and NAN mark exactly the rows they concern, which stay as they were."""
    case = Case("during", small("int8"))
    cache = filled(case)  # 4 of 11 tail slots are taken
    new = random_tokens(PIECE, "long")
    full = run("append", cache, new, np.array([8, 7], np.int32))  # row 0 lacks one slot
    assert np.asarray(full.flags).tolist() == [kvjax.OVERFLOW, 0]
    assert np.asarray(full.seen).tolist() == [LENGTHS[0], LENGTHS[1] + 7]
    assert_same(row_of(full, 0), row_of(cache, 0), but=("flags",))

    exact = filled(CASES["exact"])  # 25 and 18 of 48
    for op, length in (("absorb", 24), ("append", 24)):
        long = random_tokens(length, "long")
        got = run(op, exact, long, np.array([24, 24], np.int32))
        assert np.asarray(got.flags).tolist() == [kvjax.OVERFLOW, 0]
        assert_same(row_of(got, 0), row_of(exact, 0), but=("flags",))

    scored = filled(CASES["key_norm during"])  # edges 21 and 14
    got = run("truncate", scored, np.array([20, 14], np.int32))
    assert np.asarray(got.flags).tolist() == [kvjax.UNDERFLOW, 0]
    assert_same(row_of(got, 0), row_of(scored, 0), but=("flags",))
    assert np.asarray(got.seen).tolist() == [25, 14]
    below = run("truncate", cache, np.array([9, 18], np.int32))  # kept in order: cuts anywhere
    assert np.asarray(below.flags).tolist() == [0, 0]
    assert entries(below)[0] == tuple(range(9))

    for head in range(PLAIN.kv_heads):
        bad = new.replace(v=new.v.at[1, 1, 2, head, 3].set(jnp.nan))
        for count, flag in ((3, kvjax.NAN), (2, 0)):  # the third token, once counted
            got = run("append", exact, bad, np.array([0, count], np.int32))
            assert np.asarray(got.flags).tolist() == [0, flag]


def test_body_overflow_is_flagged():
    """A cache that keeps all flags a text longer than it was made for."""
    case = Case("during", small("int8", page=8))
    cache = kvjax.init_cache(PLAIN, case.recipe, ROWS, 16)
    cache = feed(cache, random_tokens(24, "over"), [np.array([8, 8]), np.array([8, 8])])
    assert not np.asarray(cache.flags).any()
    cache = feed(cache, random_tokens(8, "over"), [np.array([8, 4])])  # edges 20 and 16
    assert np.asarray(cache.flags).tolist() == [kvjax.OVERFLOW, 0]


@pytest.mark.parametrize("name", ["int8", "key_norm during int8,raw", "ada_snapkv", "kvzip int8"])
def test_serving(name):
    """insert, select and reset move whole conversations and touch no other row."""
    case = CASES[name]
    cache, other = filled(case), filled(case, 1)
    assert_same(kvjax.select(cache, jnp.array([1])), row_of(cache, 1))
    both = kvjax.insert(cache, 1, row_of(other, 0))
    assert_same(row_of(both, 0), row_of(cache, 0))
    assert_same(row_of(both, 1), row_of(other, 0))
    gone = kvjax.reset(cache, 0)
    assert_same(row_of(gone, 1), row_of(cache, 1))
    assert np.asarray(gone.seen).tolist() == [0, LENGTHS[1]]
    assert all(not kept for kept in entries(row_of(gone, 0)))


BYTES = {  # per layer and row, by hand: floats of 4 bytes, d = 16, 2 kv heads, max_length 48
    # a tail of 48 slots of 2 * 16 floats
    "exact": 2 * 48 * 2 * 64,
    # tail: window 4 + stride 4 + lookahead 3; body: 48 slots of 2 * (16 codes + a scale); base
    "int8": 2 * 11 * 128 + 2 * 48 * 2 * (16 + 4) + 4,
    # tail as above; body: 48 slots of 2 * (16 numbers of 4 bits + a scale of 2 bytes); base
    "int4": 2 * 11 * 128 + 2 * 48 * 2 * (8 + 2) + 4,
    # tail: 3 more for a group not whole, in fours; body: 48 slots of keys, 16 numbers of 2 bits and
    # a quarter of 16 scales and minima, and of values, with 4 scales and minima
    "kivi": 2 * 16 * 128 + 2 * 48 * (4 + 16 + 4 + 16) + 4,
    # body: half of 48, less the window of 4, in pages of 4: 20 slots, with 2 bytes of position each
    "key_norm during": 2 * 11 * 128 + 2 * 20 * (128 + 2) + 4,
    "key_norm during int8,raw": 2 * 11 * 128 + 2 * 20 * (20 + 64 + 2) + 4,
    # tail: 20 + 4 + 3 for the newest; body: 4 sinks in a page of 4
    "streaming_llm": 2 * 27 * 128 + 2 * 4 * (128 + 2) + 4,
    # of 25, rounded up to 26: 13 less 4, in pages of 4: 12 slots; tail: window 4, lookahead 3, and
    # the 30 later tokens of the shorter row, in eights: 40
    "key_norm": 2 * 40 * 128 + 2 * 12 * (128 + 2) + 4,
    # half of the pool of two layers: 9 slots a head, 36 in all, and 4 heads that may each leave 3
    # unfilled: 12 pages of 4, each with an owner of 2 bytes; first page and pages of each layer
    "ada_snapkv": 2 * 40 * 128 + 6 * (4 * (128 + 2) + 2) + 2 * 4,
    # 22 and 4 a head, less the window of 4: 18 in the lower layer, 36 in all, as above
    "pyramidkv": 2 * 40 * 128 + 6 * (4 * (128 + 2) + 2) + 2 * 4,
    # of 26 * 4 entries half, less 4 windows of 4: 36, as above
    "kvzip": 2 * 40 * 128 + 6 * (4 * (128 + 2) + 2) + 2 * 4,
    # and a body for the 30 later tokens and the window, in pages of 4: 36 slots; a tail of 11
    "kvzip int8": 2 * 11 * 128 + 6 * (4 * (40 + 2) + 2) + 2 * 4 + 2 * 36 * 2 * (16 + 4) + 4,
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name):
    """`nbytes` is what the recipe's arithmetic says, and six int32 per row."""
    assert kvjax.nbytes(filled(CASES[name])) == ROWS * (2 * BYTES[name] + 6 * 4)


@pytest.mark.parametrize("name", sorted({c.recipe.name for c in CASES.values()}))
def test_metadata_does_not_eat_the_saving(name):
    """At real sizes (head dim 64, 8,192 tokens, default pages) metadata are at most 15% more."""
    config = dataclasses.replace(PLAIN, head_dim=64, dtype="bfloat16")
    cache = kvjax.abstract_cache(config, kvjax.recipe(name), 1, 8192)
    bodies = [b for g in cache.groups for b in g.bodies] + [cache.pool]
    for body in (b for b in bodies if hasattr(b, "codes")):  # not a state
        codes, whole = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(t))
                        for t in (body.codes, body))  # fmt: skip
        assert whole - codes <= 0.15 * codes
