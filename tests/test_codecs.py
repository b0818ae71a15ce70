"""Codecs: their error, their bytes, how they are packed, and that they do not depend on cuts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, ROWS, feed, generator, random_tokens
from holding import assert_same, overwrite

import kvjax
from kvjax import codecs
from kvjax.cache.spelling import parse, spelled
from kvjax.codecs import CODECS, packing
from kvjax.codecs.scales import whole
from kvjax.codecs.turned import Turned
from kvjax.config import Spec
from kvjax.errors import InputError

every = pytest.mark.parametrize("name", CODECS)


def both(name, **options):
    """The codecs of keys and of values."""
    spec = Spec(name, tuple(options.items()))
    return [codecs.build(spec, side) for side in "kv"]


def random(*shape):
    return jnp.asarray(generator("codecs", shape).normal(size=shape), jnp.float32)


def back(codec, x):
    return jax.jit(lambda x: codec.decode(codec.encode(x), jnp.float32))(x)


def test_where_the_bits_of_a_token_lie():
    """16 tokens of 4 bits: two rows of words; token 2 j + w in bits 4 j .. 4 j + 3 of row w. 32
    tokens of 3 bits: two rows of their high bits, of token 2 j + w in bits 2 j and 2 j + 1, and one
    of the low bits, of token j in bit j."""
    codes = np.zeros((16, 3), np.uint8)
    codes[5, 1], codes[15, 2] = 13, 15  # 5 is 2 * 2 + 1, 15 is 2 * 7 + 1
    words = _words(codes, 4)
    assert words[0] == [[0, 0, 0], [0, 13 << 8, 15 << 28]]
    codes = np.zeros((32, 1), np.uint8)
    codes[17], codes[31] = 0b110, 0b101
    words = _words(codes, 3)
    assert words == [[[0], [0b11 << 16 | 0b10 << 30]], [[1 << 31]]]


def _words(codes, bits):
    planes = packing.pack(jnp.asarray(codes), bits)
    return [np.asarray(x).view(np.uint32).tolist() for x in planes]


@pytest.mark.parametrize("channels", [5, 64])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packing(bits, channels):
    """What was packed comes back, and takes `bits` bits a number; rows of 64 fill rows of 128."""
    slots = 4 * packing.unit(bits)
    codes = generator("pack").integers(0, 2**bits, (2, slots, channels)).astype(np.uint8)
    words = jax.jit(packing.pack, static_argnums=1)(codes, bits)
    assert {x.dtype for x in words} == {np.dtype(np.int32)}
    assert sum(x.nbytes for x in words) * 8 == codes.size * bits
    assert channels == 5 or {x.shape[-1] for x in words} == {128}
    unpack = jax.jit(packing.unpack, static_argnums=(1, 2))
    assert np.array_equal(unpack(words, bits, slots), codes)


HOSTILE = {
    "normal": lambda x: x,
    "tiny values": lambda x: 0.01 * x,
    "below what float32 holds": lambda x: 1e-38 * x,
    "large values": lambda x: 1e30 * x,
    "a channel with a bias": lambda x: x.at[..., 3].add(300.0),
    "constants": lambda x: 0 * x + 300.7,
    "a constant channel": lambda x: x.at[..., 3].set(-7.3),
    "zeros": lambda x: 0 * x,
    "one entry": lambda x: (0 * x).at[..., 1, 1].set(5.0),
}


@every
def test_bound(name):
    """No entry is further off than its codec says, whatever the numbers: none is NaN."""
    x = jnp.stack([make(random(64, 80)) for make in HOSTILE.values()])  # 80 is no multiple of 32
    other = {"fp8": {"form": "e5m2"}, "turboquant": {"form": "prod", "bits": 2}}
    other |= dict.fromkeys(("int4", "kivi", "grouped", "rotated"), {"bits": 3})
    for options in ({}, other.get(name, {})):
        for codec in both(name, **options):
            error = np.abs(np.float64(back(codec, x)) - np.float64(x)).max(axis=-1)
            bound = np.float64(codec.bound(x))
            assert (error <= bound).all(), dict(zip(HOSTILE, (error - bound).max(1), strict=True))


@every
def test_what_is_not_valid_and_other_rows_count_for_nothing(name):
    """The codes of a token, its group's scale among them, are the same bit by bit."""
    x, valid = random(3, 96, 16), np.ones((3, 96), bool)
    valid[:, 20:40] = valid[1, 64:] = False
    for codec in both(name):
        noise = jnp.where(valid[..., None], x, 1e6)
        made, other, alone = (
            jax.jit(lambda *a, c=codec: c.decode(c.encode(*a), jnp.float32))(*a)
            for a in ((x, valid), (noise, valid), (noise[1:2], valid[1:2]))
        )
        assert np.array_equal(made[valid], other[valid]) and np.isfinite(other).all()
        assert np.array_equal(alone[0], other[1])


@pytest.mark.parametrize(
    "name",
    [x if x == "kivi" else pytest.param(x, marks=pytest.mark.full) for x in CODECS],
)
def test_one_shot_equals_streaming(name):
    """96 and 61 tokens at once, in 32 and then one by one, and in pieces of 7, leave the same
    codes: those of whole groups encoded by themselves."""
    recipe = kvjax.recipe("int8", codec=name, window=0, page=128, stride=32)
    tokens, lengths = random_tokens(96, "stream"), np.array([96, 61])
    empty = kvjax.init_cache(PLAIN, recipe, ROWS, 128)
    split = lambda *sizes: [np.clip(lengths - at, 0, n) for at, n in _starts(sizes)]  # noqa: E731
    once = overwrite(feed(empty, tokens, split(96), piece=96))
    singles = split(*[32] + [1] * 64)
    for counts in (split(*[7] * 14), singles):
        assert_same(overwrite(feed(empty, tokens, counts, piece=32)), once)
    pair, body = codecs.pair(recipe.store), once.groups[0].bodies[0]
    k, v = (jnp.swapaxes(x, 2, 3) for x in (tokens.k, tokens.v))
    held = jax.tree.leaves(pair.unpack(body.codes))
    for row, n in enumerate(lengths // pair.group * pair.group):
        want = jax.tree.leaves(jax.jit(pair.encode)(k[:, row, :, :n], v[:, row, :, :n]))
        for x, y in zip(held, want, strict=True):
            x = x[:, row].reshape(*x[:, row].shape[:2], -1, *x.shape[5:])[:, :, : y.shape[2]]
            assert np.array_equal(x, y) and x.dtype == y.dtype


def _starts(sizes):
    return zip(np.cumsum(sizes) - np.array(sizes), sizes, strict=True)


BYTES = {  # of a key and a value of 64 channels, per token and head, by the formulas of each method
    "raw": 2 * 64 * 2,  # bfloat16
    "int8": 2 * (64 + 4),  # 136
    "fp8": 2 * (64 + 4),
    "int4": 2 * (32 + 2),  # 68
    "int4,bits=3": 2 * (24 + 2),
    "kivi": 2 * (16 + 4 * 64 // 32),  # 48: scale and minimum of a channel, for 32 tokens
    "kivi,bits=4": 2 * (32 + 8),  # 80
    "kivi,bits=4/2": 64,
    "grouped": 2 * (32 + 4),  # 72
    "grouped,bits=2": 2 * (16 + 4),  # 40
    "grouped,bits=1": 2 * (8 + 4),
    "rotated": 2 * (32 + 4),  # 72
    "rotated,bits=2": 2 * (16 + 4),
    "turboquant": 2 * (32 + 2),  # 68
    "turboquant,bits=3": 2 * (24 + 2),
    "turboquant,bits=1": 2 * (8 + 2),
    "turboquant,form=prod,bits=2": 2 * (16 + 4),  # 40: one bit of levels, one of signs
}


@pytest.mark.parametrize("word", BYTES)
def test_bytes(word):
    """All leaves that grow with the text, as they lie in a cache, take what the method's paper or
    code says: bits are packed, and nothing is beside them."""
    recipe = kvjax.recipe("int8", codec="raw") if word == "raw" else parse(word)
    config = dataclasses.replace(PLAIN, head_dim=64, dtype="bfloat16")
    short, long = (kvjax.abstract_cache(config, recipe, 1, n) for n in (1024, 2048))
    grown = kvjax.nbytes(long) - kvjax.nbytes(short)
    assert grown == BYTES[word] * 1024 * config.layers * config.kv_heads


RELMSE = {(2, 32): 0.153, (4, 32): 0.0061, (2, 64): 0.201, (4, 64): 0.0081}


@pytest.mark.parametrize("bits,size", RELMSE)
def test_error_on_normal_numbers(bits, size):
    """Minimum and maximum of 32 or 64 normal numbers give the known mean square errors, within 3%:
    bfloat16 scales are up to 0.8% wide, and these are 260,000 numbers."""
    x = random(64, 64, 64)
    for codec in (
        *both("kivi", bits=bits, group_size=size),
        both("grouped", bits=bits, group_size=size)[0],
    ):
        error = float(((back(codec, x) - x) ** 2).sum() / (x**2).sum())
        assert error == pytest.approx(RELMSE[bits, size], rel=0.03)


def test_minimum_and_maximum_of_a_group():
    """They come back: exactly where bfloat16 holds minimum and scale, else within 2 of its
    roundings, of 1/128."""
    x = jnp.asarray([[-4.0, 3.0], [8.0, -1.0], [1.0, -6.0], [0.0, 6.0]])
    keys, values = both("kivi", group_size=4)
    assert back(keys, x).tolist() == [[-4, 2], [8, -2], [0, -6], [0, 6]]  # levels of 4
    assert back(values, x.T).T.tolist() == back(keys, x).tolist()
    x = random(64, 64, 32)
    low, high = (
        [f(y, axis=-1) for y in (x, back(both("grouped")[0], x))] for f in (jnp.min, jnp.max)
    )
    most = (high[0] - low[0] + abs(low[0])) / 128
    assert (abs(low[1] - low[0]) <= most).all() and (abs(high[1] - high[0]) <= most).all()


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if not issubclass(c, Turned)])
def test_channels_in_another_order(name):
    """Where a scale is of a whole vector, or of a channel, the order of channels is nothing."""
    x, order = random(64, 16), generator("order").permutation(16)
    for codec in both(name):
        assert np.array_equal(back(codec, x[:, order]), back(codec, x)[:, order])


def test_a_channel_of_outliers_costs_other_channels_nothing():
    x = random(64, 16)
    keys, values = both("kivi")
    wild = x.at[:, 5].multiply(50)
    rest = [i for i in range(16) if i != 5]
    assert np.array_equal(back(keys, wild)[:, rest], back(keys, x)[:, rest])
    assert not np.array_equal(back(values, wild)[:, rest], back(values, x)[:, rest])


def test_by_hand():
    """int4 has levels of 14 / 7 = 2; fp8 of 448 / 448 = 1 with 3 bits after the first: 17.5 lies
    between 16 and 18, 250 between 240 and 256. 2 bits of two channels: between 0 and 6 levels of 2;
    of a constant 301.5, above which bfloat16 has 302 and below it 300, levels of 0.5."""
    assert back(both("int4")[0], jnp.array([[14.0, 5.0, -3.5, 0.5]])).tolist() == [[14, 4, -4, 0]]
    eight = jnp.array([[448.0, -17.5, 250.0, 3.0]])
    assert back(both("fp8")[0], eight).tolist() == [[448, -18, 256, 3]]
    small = jax.jit(both("grouped", bits=2, group_size=2)[0].encode)
    made = small(jnp.array([[6.0, 0.0, 301.5, 301.5]]))
    assert made["codes"].tolist() == [[3, 0, 3, 3]]
    assert whole(made["scale"]).tolist() == [[2, 0.5]]
    assert whole(made["low"]).tolist() == [[0, 300]]


def test_options():
    """Options of a codec are of both sides, or a pair; what cannot work is one sentence."""
    made = kvjax.recipe("snapkv", keep=0.5, codec="kivi", bits=(4, 2), group_size=16)
    assert [codecs.build(x, "k").bits for x in (made.store.k, made.store.v)] == [4, 2]
    for word in ("snapkv+kivi@0.5,bits=4/2", "kivi,bits=4", "snapkv+int4@0.5", "int8",
                 "fp8,form=e5m2", "snapkv+raw/int4@0.25,bits=8",
                 "kvzip+grouped@0.5,group_size=32"):  # fmt: skip
        assert spelled(parse(word)) == word
    for match, name, options in (
        ("from 2 to 8, got 1", "int4", {"bits": 1}),
        ("from 1 to 8, got 9", "kivi", {"bits": 9}),
        ("at least 1, got 0", "grouped", {"group_size": 0}),
        ("did you mean 'e4m3'", "fp8", {"form": "e4m4"}),
        ("one value, or one for keys", "kivi", {"bits": (1, 2, 3)}),
    ):
        with pytest.raises(InputError, match=match):
            kvjax.recipe(name, **options)
    for name, options, page in (("int4", {}, 8), ("int4", {"bits": 3}, 32), ("kivi", {}, 32)):
        with pytest.raises(InputError, match=f"use page={page}"):
            kvjax.init_cache(PLAIN, kvjax.recipe(name, page=4, **options), 1, 64)
