"""ParallelComp: chunks read apart, ranked by the query, shrunk, joined at the same positions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HYBRID, PLAIN, generator, look, model
from holding import assert_same

import kvjax
from kvjax import observing, parallel
from kvjax.cache.slots import unpack_pos

BOS, CHUNK, LATER = 3, 12, 24
DOCUMENT = generator("parallel").integers(0, PLAIN.vocab, 3 * CHUNK + 5).astype(np.int32)
QUERY = generator("query").integers(0, PLAIN.vocab, 5).astype(np.int32)


def encode(document=DOCUMENT, **options):
    options = dict(chunk=CHUNK, keep_chunks=4, later=LATER, bos=BOS, together=2) | options
    return parallel.encode(model(), document, QUERY, **options)


@functools.cache
def whole():
    """Four chunks, the last one short, of which nothing is dropped."""
    return encode()


def answer(cache):
    """Logits [q w] of the query after the cache."""
    return np.asarray(look(model().params, PLAIN, cache, QUERY[None])[0][0])


def plain(tokens):
    """Logits [t w] of tokens alone, padded to one length for one compilation."""
    ids = np.zeros((1, 1 + CHUNK + len(QUERY)), np.int32)
    ids[0, : len(tokens)] = tokens
    return np.asarray(look(model().params, PLAIN, None, ids)[0][0])[: len(tokens)]


def chunks(document=DOCUMENT):
    return [[BOS, *document[i : i + CHUNK]] for i in range(0, len(document), CHUNK)]


def entries(cache):
    """Arrivals [l n k] of a cache whose heads keep equally many; -1 fills up short layers."""
    pos = np.asarray(unpack_pos(cache.groups[0].bodies[0].pos))[:, 0]
    made = [[sorted(h[h >= 0].tolist()) for h in layer.reshape(2, -1)] for layer in pos]
    for heads in made:
        assert len(heads[0]) == len(heads[1])
    return made


def of_chunk(cache, low, high):
    """Keys, values and arrivals of the entries that arrived from low up to high."""
    body = cache.groups[0].bodies[0]
    pos = np.asarray(unpack_pos(body.pos))
    mine = (pos >= low) & (pos < high)
    return [np.asarray(x)[mine] for x in (*body.codes, pos)]


def test_one_chunk_is_ordinary_attention():
    """Room for all and nothing biased: the logits of [bos; document; query] read as one text."""
    cache, stats = encode(DOCUMENT[:CHUNK])
    want = plain([BOS, *DOCUMENT[:CHUNK], *QUERY])
    np.testing.assert_allclose(answer(cache), want[-len(QUERY) :], atol=2e-4)  # order 10, float32
    assert stats.kept == (0,) and stats.lengths == (1 + CHUNK,)
    assert cache.seen.tolist() == cache.clock.tolist() == [1 + CHUNK]


def test_chunks_share_positions_and_the_query_follows_the_longest():
    cache, stats = whole()
    assert stats.lengths == (13, 13, 13, 6) and stats.kept == (0, 1, 2, 3)
    assert cache.seen.tolist() == [45] and cache.clock.tolist() == [13]
    first = [*range(13), *range(14, 26), *range(27, 39), *range(40, 45)]  # one bos is left
    assert entries(cache) == [[first] * 2] * 2
    np.testing.assert_array_equal(stats.entries, [42, 42])


def test_a_chunk_is_scored_by_the_likelihood_of_the_query():
    """In nats a token, from plain readings of [bos; chunk; query]; the lowest stay, in order."""
    nll = []
    for chunk in chunks():
        logits = plain([*chunk, *QUERY]).astype(np.float64)[len(chunk) - 1 : -1]
        said = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll.append(-said[np.arange(len(QUERY)), QUERY].mean())
    np.testing.assert_allclose(whole()[1].nll, nll, atol=1e-4)
    for keep in (1, 2):
        stats = encode(keep_chunks=keep)[1]
        assert stats.kept == tuple(sorted(np.argsort(nll)[:keep].tolist()))


def test_an_edited_chunk_changes_no_other():
    """Bit by bit; its own entries do change."""
    edited = DOCUMENT.copy()
    edited[2 * CHUNK + 3] = (edited[2 * CHUNK + 3] + 1) % PLAIN.vocab
    (one, _), (two, _) = whole(), encode(edited)
    for low, high in ((0, 26), (39, 45)):
        assert_same(of_chunk(one, low, high), of_chunk(two, low, high))
    changed = np.abs(of_chunk(one, 26, 39)[0] - of_chunk(two, 26, 39)[0]).max()
    assert changed > 0.1


def test_the_order_of_chunks_does_not_matter():
    """Their positions are the same wherever they stand: only sums run in another order."""
    parts = DOCUMENT[: 3 * CHUNK].reshape(3, CHUNK)
    turned = np.concatenate([parts[[2, 0, 1]].ravel(), DOCUMENT[3 * CHUNK :]])
    np.testing.assert_allclose(answer(encode(turned)[0]), answer(whole()[0]), atol=2e-4)


@pytest.mark.parametrize("recent", [8, 3])
def test_evidence_is_that_of_the_last_tokens_of_chunk_and_query(recent):
    """Eight are the query and three tokens of the chunk before it; three are its end. As if the
    whole were in a cache and its last tokens looked again."""
    plan = parallel._planned(model(), 8, recent, 7, 0.1, "all", None, 100, BOS)
    ids = np.asarray(chunks()[:2], np.int32)
    lengths = np.full(2, 1 + CHUNK, np.int32)
    _, _, evidence = parallel._read(model(), ids, lengths, QUERY, plan)
    both = np.concatenate([ids, np.tile(QUERY, (2, 1))], axis=1)
    _, exact = kvjax.prefill(model(), both, max_length=both.shape[1])
    for name, window in (("sums", recent), ("last", 1)):
        snap = kvjax.recipe("snapkv", window=window)
        counts = np.full(2, both.shape[1])
        want = observing.gather(model(), exact, snap, counts, both, None)[0]["sums"]
        got = np.asarray(evidence[0][name])
        np.testing.assert_allclose(got, np.asarray(want)[..., : 1 + CHUNK], atol=1e-5)


def test_each_chunk_keeps_what_snapkv_keeps():
    """With as many recent tokens as the query has: what `condense` keeps for it as a question. bos
    stays where it is first, and is one of the eight."""
    cache, _ = encode(capacity=8, recent=len(QUERY))
    assert kvjax.nbytes(cache) < kvjax.nbytes(whole()[0])
    snap = kvjax.recipe("snapkv", slots=8, window=0, sinks=1, kernel=7, pool="max")
    ids = np.asarray(chunks()[:2], np.int32)
    _, exact = kvjax.prefill(model(), ids, max_length=1 + CHUNK)
    asked = np.tile(QUERY, (2, 1))
    want = kvjax.condense(model(), exact, snap, question=asked).groups[0].bodies[0].pos
    want = np.sort(np.asarray(unpack_pos(want)).reshape(2, 2, 2, -1), axis=-1)[..., -8:]
    for layer, heads in enumerate(entries(cache)):
        for head, held in enumerate(heads):
            assert held[:8] == want[layer, 0, head].tolist()
            assert held[8:15] == (13 + want[layer, 1, head, 1:]).tolist()


ZONE = {"sink": (0, 4), "recent": (8, 12), "middle": (4, 8), "all": (0, 12)}


@pytest.mark.parametrize("zone", parallel.ZONES)
def test_biased_tokens_go_and_heads_stay_equal(zone):
    """Twelve tokens behind none, ends of four: no weight above 0.1 is left in the zone, all heads
    lose as many as the one that loses most, and the others lose their least."""
    plan = parallel._planned(model(), 12, 8, 7, 0.1, zone, None, 4, None)
    last = generator("bias").dirichlet(np.full(12, 0.7), (2, 3, 4)).astype(np.float32)  # l b h s
    keep = np.ones((2, 3, 2, 12), bool)
    keep[..., 5] = False  # evicted before
    length = jnp.full((3,), 12)
    got = np.asarray(parallel._less(jnp.asarray(keep), jnp.asarray(last), length, plan))
    weight = last.reshape(2, 3, 2, 2, 12).mean(3)
    inside = np.zeros(12, bool)
    inside[slice(*ZONE[zone])] = True
    biased = keep & inside & (weight > 0.1)
    assert biased.any() and not (got & biased).any() and (got <= keep).all()
    most = biased.sum(-1).max(2, keepdims=True)
    np.testing.assert_array_equal(got.sum(-1), np.broadcast_to(11 - most, (2, 3, 2)))
    for at in np.ndindex(2, 3, 2):
        also, stays = keep[at] & ~biased[at] & ~got[at], got[at]
        assert not also.any() or weight[at][also].max() <= weight[at][stays].min()


def test_biased_tokens_go_from_the_chosen_layers():
    """Layer 1 of two: layer 0 keeps all; in layer 1 no weight of the query's last token above 0.1
    is left, bos apart from the rest and alike in all heads."""
    cache, stats = encode(zone="all", layers=(1, 2), threshold=0.1)
    before, after = entries(whole()[0]), entries(cache)
    assert after[0] == before[0] and len(after[1][0]) < len(before[1][0])
    assert stats.entries.tolist() == [len(after[0][0]), len(after[1][0])]
    both = np.asarray([[*c, *QUERY] for c in chunks()[:2]], np.int32)
    _, exact = kvjax.prefill(model(), both, max_length=both.shape[1])
    snap, counts = kvjax.recipe("snapkv", window=1), np.full(2, both.shape[1])
    sums = observing.gather(model(), exact, snap, counts, both, None)[0]["sums"]
    weight = np.asarray(sums).reshape(2, 2, 2, 2, -1).mean(3)[1]  # layer 1: [chunk head slot]
    for head, held in enumerate(after[1]):
        for chunk in (0, 1):
            slots = [p - 13 * chunk for p in held if 0 <= p - 13 * chunk < 13]
            assert slots and weight[chunk, head, slots].max() <= 0.1


def test_the_cache_is_like_any_other(tmp_path):
    cache, _ = encode(capacity=8, recent=len(QUERY))
    kvjax.save_cache(tmp_path / "c", cache, model())
    assert_same(kvjax.load_cache(tmp_path / "c", model()), cache)
    made = kvjax.generate(
        model(), QUERY.tolist(), cache=kvjax.fork(cache), max_new_tokens=3, stop=()
    )
    assert made.tokens[0] == answer(cache)[-1].argmax()


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(chunk=0), "chunk must be a whole number"),
        (dict(zone="sinks"), "did you mean 'sink'"),
        (dict(layers=(1, 3)), "layers 1 up to 3 do not lie within the 2"),
        (dict(threshold=-1.0), "threshold must be"),
        (dict(chunk=5000), "lower chunk"),
        (dict(document=DOCUMENT[None].repeat(2, 0)), "one row"),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(kvjax.InputError, match=said):
        encode(**options)


def test_sliding_windows_are_refused():
    with pytest.raises(kvjax.InputError, match="see everything"):
        parallel.encode(model(HYBRID), DOCUMENT, QUERY, chunk=CHUNK)


@pytest.mark.full
def test_smollm2_finds_the_chunk_that_answers():
    """Six chunks of 400 tokens with a needle in the fourth: its chunk is among the three that stay,
    and its answer is likelier than from a cache without it."""
    found, without, stats = needle()
    assert 3 in stats.kept
    assert found > without + 1.0


def needle(keep_chunks=3):
    """Log-probability of the answer with and without the needle, and what was kept."""
    m = kvjax.load("smollm2-135m")
    encode = functools.partial(m.tokenizer.encode, add_bos=False)
    filler = (
        "The hills were green, the river ran slowly, and nobody in the village was in a hurry. "
    )
    filler += (
        "On market days people came down the road with bread, apples and news from the coast. "
    )
    text = np.asarray(encode(filler * 80)[: 6 * 400])
    start = "The secret word of the lighthouse keeper is"
    fact = encode(f" {start} marigold.")
    query = encode(
        f"\nQuestion: What is the secret word of the lighthouse keeper?\nAnswer: {start}"
    )
    reply = np.asarray(encode(" marigold"))
    hidden = text.copy()
    hidden[3 * 400 + 150 : 3 * 400 + 150 + len(fact)] = fact
    out = []
    for document in (hidden, text):
        cache, stats = parallel.encode(m, document, query, chunk=400, keep_chunks=keep_chunks,
                                       capacity=128, later=64)  # fmt: skip
        ids = np.asarray([[*query, *reply[:-1]]])
        logits, _ = kvjax.extend(m, ids, cache, logits="all")
        said = jax.nn.log_softmax(logits[0, len(query) - 1 :])
        out.append((float(said[np.arange(len(reply)), reply].sum()), stats))
    return out[0][0], out[1][0], out[0][1]
