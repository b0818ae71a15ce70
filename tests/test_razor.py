"""RazorAttention and KVzip's head level: whole heads by label, and one mean token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HYBRID, PLAIN, TWICE, look, model, random_ids, random_tokens, row_of
from float64 import dense
from holding import assert_same

import kvjax
from kvjax import budgets, calibrate, reducers
from kvjax.budgets import Ask
from kvjax.cache import slots
from kvjax.cache.cache import TRIMMED
from kvjax.config import Spec
from kvjax.shapes import EMPTY

MAX, LENGTH = 64, 40
IDS = random_ids(LENGTH, "razor")
ONE = np.array([[0, 0], [0, 1]], np.float32)  # layer 1, kv head 1


def labelled(label=ONE, name="razor", config=PLAIN):
    return calibrate.HeadLabels(np.asarray(label, np.float32), {}).on(model(config), name)


def razor(keep=0.5, **options):
    return kvjax.recipe("razor", keep=keep, **(dict(page=4, stride=4) | options))


@functools.cache
def exact(lengths=(40, 40), config=PLAIN):
    args = dict(max_length=MAX, lengths=lengths, logits="none")
    return kvjax.prefill(model(config), IDS, kvjax.recipe("exact"), **args)[1]


def logits(cache, config=PLAIN):
    """Of three tokens that read the cache."""
    return np.asarray(look(model(config).params, config, cache, IDS[:, :3])[0])


def close(got, want, size=1e-5):
    """Logits pass two layers, whose sums are ordered otherwise: 1e-5 of the largest."""
    np.testing.assert_allclose(got, want, rtol=0, atol=size * np.abs(want).max())


def extra(cache, group=0):
    """What the reducer filled: (body, arrivals [l b n])."""
    (body,) = [b for b in cache.groups[group].bodies if b.plain]
    return body, np.asarray(slots.unpack_pos(body.pos))[..., 0, 0]


def held(cache):
    """{(layer that sees everything, row, head): sorted arrivals in the pool}."""
    pool, out = cache.pool, {}
    first, count = np.asarray(pool.first), np.asarray(pool.count)
    pos, owner = np.asarray(slots.unpack_pos(pool.pos))[0, :, 0], np.asarray(pool.owner)[0, :, 0]
    for layer, row in np.ndindex(first.shape):
        pages = slice(first[layer, row], first[layer, row] + count[layer, row])
        for head in range(cache.groups[0].tail.k.shape[2]):
            mine = pos[row, pages][owner[row, pages] == head]
            out[layer, row, head] = sorted(mine[mine >= 0].tolist())
    return out


@pytest.mark.parametrize("label", [np.ones((2, 2)), ONE], ids=["all labelled", "one"])
def test_nothing_dropped_is_exact(label):
    """With every head whole, or room for all, logits are exact and no token stands for any."""
    cache = kvjax.condense(labelled(label), exact(), razor(keep=1.0))
    assert not np.asarray(cache.flags).any() and (extra(cache)[1] == -1).all()
    close(logits(cache), logits(exact()))


@pytest.mark.parametrize("lengths", [(40, 40), (40, 23)])
def test_who_keeps_what(lengths):
    """Labelled heads keep all; the others sinks, newest and one that arrives with the last dropped.

    By hand, 40 tokens of 4 heads: round(0.5 * 160) = 80; 40 are the labelled head's, so that the
    others have 40 // 3 = 13 each: 4 sinks and 9 newest. Of 23: 46 less 23 is 7 each: 4 and 3.
    """
    cache = kvjax.condense(labelled(), exact(lengths), razor())
    body, last = extra(cache)
    for (layer, row, head), pos in held(cache).items():
        n = lengths[row]
        newest = {40: 9, 23: 3}[n]
        full = (layer, head) == (1, 1)
        part = [*range(4), *range(n - newest, n)]
        assert pos == (list(range(n)) if full else part), (layer, row, head)
        assert last[layer, row, head] == (-1 if full else n - newest - 1)
        bias = float(body.bias[layer, row, head, 0, 0])
        assert bias == (np.float32(EMPTY) if full else pytest.approx(np.log(n - newest - 4)))


def test_more_labels_than_room():
    """Labelled heads beyond what keep has room for are cut, the first numbers stay; a flag says so.

    Of 80 entries 16 are sinks; 36 of the rest make a head whole and 28 // 3 = 9 go to each other.
    """
    cache = kvjax.condense(labelled(np.ones((2, 2))), exact(), razor())
    assert (np.asarray(cache.flags) == TRIMMED).all()
    sizes = {at: len(x) for at, x in held(cache).items() if at[1] == 0}
    assert sizes == {(0, 0, 0): 40, (0, 0, 1): 13, (1, 0, 0): 13, (1, 0, 1): 13}


def test_the_buffer_of_the_card():
    """count="paper" keeps max(least, length / part) newest tokens, whatever keep says."""
    recipe = razor(count="paper", keep=0.01, least=6, part=4.0)
    cache = kvjax.condense(labelled(), exact(), recipe)
    assert held(cache)[0, 0, 0] == [*range(4), *range(30, 40)]
    assert held(cache)[1, 1, 1] == list(range(40)) and not np.asarray(cache.flags).any()
    card = budgets.build(Spec("labelled"))  # 90 heads: room for 14 + 1 whole ones
    ask = dict(paper=True, layers=30, heads=3, sinks=4)
    assert card.wants(Ask(length=4004, **ask)).tolist() == [90 * 4004, 4000]  # S0 + N0: all
    assert card.wants(Ask(length=10000, **ask)).tolist() == [15 * 10000 + 75 * 4004, 4000]
    assert card.wants(Ask(length=30000, **ask)).tolist() == [15 * 30000 + 75 * 6004, 6000]


def with_tail(cache, k, v=None):
    (group,) = cache.groups
    tail = group.tail.replace(k=k, v=group.tail.v if v is None else v)
    return cache.replace(groups=(group.replace(tail=tail),))


@pytest.mark.parametrize("codec", ["raw", pytest.param("int8", marks=pytest.mark.full)])
def test_equal_dropped_keys_are_exact(codec):
    """Where the dropped keys are equal one token with the log of their number loses nothing.

    With int8 the kept are coded, and the mean is not: what error there is is that of the codec.
    """
    k = exact().groups[0].tail.k.at[:, :, :, 4:31].set(jnp.linspace(-1, 1, 16))
    full = with_tail(exact(), k)
    cache, want = kvjax.condense(labelled(), full, razor(codec=codec)), logits(full)
    assert set(extra(cache)[1].reshape(-1).tolist()) == {30, -1}
    close(logits(cache), want, 1e-5 if codec == "raw" else 0.05)
    body, _ = extra(cache)
    hidden = body.replace(bias=jnp.full_like(body.bias, EMPTY))
    bodies = tuple(hidden if b.plain else b for b in cache.groups[0].bodies)
    bare = logits(cache.replace(groups=(cache.groups[0].replace(bodies=bodies),)))
    assert np.abs(bare - want).max() > 0.1 * np.abs(want).max()  # it does matter


def test_dropped_tokens_have_no_order():
    """Exchanging what is dropped changes no output beyond the order of a sum."""
    order = np.arange(MAX)
    order[5:20] = np.random.default_rng(0).permutation(order[5:20])
    some = (ONE == 0)[:, None, :, None, None]  # not in the labelled head
    tail = exact().groups[0].tail
    k, v = (jnp.where(some, x[:, :, :, order], x) for x in (tail.k, tail.v))
    both = exact(), with_tail(exact(), k, v)
    one, two = (logits(kvjax.condense(labelled(), cache, razor())) for cache in both)
    close(one, two, 1e-6)


def test_mean_against_float64():
    """Equal keys: attention to kept and mean is dense float64 attention to all. Other keys: their
    mass is above the mean's (Jensen). Nothing dropped: no arrival, and a bias that hides."""
    rng = np.random.default_rng(3)
    k, v = rng.normal(size=(2, 1, 2, 12, 8)).astype(np.float32)
    dropped = np.zeros((1, 2, 12), bool)
    dropped[0, 0, 3:9] = True
    pos = np.broadcast_to(np.arange(12), dropped.shape)
    q = rng.normal(size=(5, 8)) * 0.7
    for equal in (False, True):
        if equal:
            k[0, 0, 3:9] = k[0, 0, 3]
        made = reducers.build(Spec("mean"))(*map(jnp.asarray, (k, v, pos, dropped)))
        mk, mv, at, bias = map(np.asarray, made)
        assert at[..., 0].tolist() == [[8, -1]] and bias[0, 1, 0] == np.float32(EMPTY)
        kept = ~dropped[0, 0]
        p = np.exp(np.concatenate([q @ k[0, 0][kept].T, q @ mk[0, 0].T + bias[0, 0]], axis=1))
        mass = np.exp(q @ k[0, 0, 3:9].T).sum(1)
        assert (p[:, -1] <= mass * (1 + 1e-5)).all()
        assert (p[:, -1] > 0.95 * mass).all() == equal
        if equal:
            got = p @ np.concatenate([v[0, 0][kept], mv[0, 0]]) / p.sum(1, keepdims=True)
            want, _ = dense(q, k[0, 0], v[0, 0], np.ones((5, 12), bool), 1.0)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_later_tokens_leave_the_mean_alone():
    """What the reducer made is never coded, moved or lost, while later tokens are."""
    whole = labelled()
    cache = kvjax.condense(whole, exact((40, 23)), razor(codec="int8"))
    before, edge = jax.tree.map(np.array, (extra(cache)[0], cache.edge))
    assert before.codes[0].dtype == np.float32
    _, cache = kvjax.extend(whole, IDS[:, :9], cache)
    assert (np.asarray(cache.edge) > edge).all()
    assert_same(extra(cache)[0], before)


@pytest.mark.full
@pytest.mark.parametrize("codec,config", [("int8", TWICE), ("raw", HYBRID)], ids=["int8", "raw"])
def test_row_alone(codec, config):
    """A row is as it is alone beside a longer one, also after more tokens, on models with windows
    and with what sees everything in two groups."""
    label = np.zeros((config.layers, 2), np.float32)
    label[-1, 0] = 1.0
    whole, recipe = labelled(label, config=config), razor(codec=codec)
    cache = kvjax.condense(whole, exact((40, 23), config), recipe)
    assert all((extra(cache, i)[1] >= 0).any() for i, g in enumerate(cache.groups) if not g.window)
    alone = kvjax.condense(whole, row_of(exact((40, 23), config), 1), recipe)
    mine, theirs = (
        kvjax.extend(whole, ids, c)[0] for ids, c in ((IDS[1:, :9], alone), (IDS[:, :9], cache))
    )
    close(np.asarray(mine)[0], np.asarray(theirs)[1])


def test_forgotten_counted_saved(tmp_path):
    """Rollback ends at the edge; the mean's bytes are counted; a file gives the same cache."""
    whole = labelled()
    cache = kvjax.condense(whole, exact(), razor())
    heads = 2 * 2 * 2  # layers, rows, kv heads: a key and a value of 16, arrival, bias; and base
    assert kvjax.nbytes(extra(cache)[0]) == heads * (2 * 16 * 4 + 2 + 4) + 2 * 2 * 4
    want = logits(cache)
    longer = kvjax.append(cache, random_tokens(3, "longer"))
    np.testing.assert_array_equal(logits(kvjax.truncate(longer, 40)), want)
    with pytest.raises(kvjax.InputError):
        kvjax.truncate(cache, 39)
    kvjax.save_cache(tmp_path / "razor", cache, whole)
    back = kvjax.load_cache(tmp_path / "razor", whole)
    np.testing.assert_array_equal(logits(back), want)
    last = extra(kvjax.reset(cache, 0))[1]
    assert (last[:, 0] == -1).all() and (last[:, 1] >= 0).any()


def test_kvzip_heads_are_whole_or_sinks():
    """0.6 of the entries of four heads is two whole ones: those of the highest labels."""
    whole = labelled([[0.2, 0.9], [0.4, 0.1]], "kvzip_heads")
    cache = kvjax.condense(whole, exact(), kvjax.recipe("kvzip_heads", page=4, stride=4))
    for (layer, _, head), pos in held(cache).items():
        best = (layer, head) in ((0, 1), (1, 0))
        assert pos == list(range(40 if best else 4))


def test_what_is_refused():
    """One sentence for what cannot work."""
    whole, bare = labelled(), dataclasses.replace(model(), tables={})
    streamed = kvjax.recipe("key_norm", when="during", reducer="mean")
    for text, ask in (
        ("positions='keep'", lambda: kvjax.condense(whole, exact(), razor(positions="rerot"))),
        ("when='after'", lambda: kvjax.prefill(whole, IDS, streamed, max_length=MAX)),
        ("reducer", lambda: razor(reducer="median")),
        ("share", lambda: razor(share=1.5)),
        ("calibrate", lambda: kvjax.condense(bare, exact(), razor())),
    ):
        with pytest.raises(kvjax.InputError, match=text):
            ask()
