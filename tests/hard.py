"""What the hard cases share: the ways of every recipe, a reference, and what a cache holds.

`Dense` is a decoder written in float64 NumPy that sees exactly the tokens it is told to see. It
shares no code with kvjax: plain softmax over a list of positions, one token at a time.
"""

import itertools

import jax
import numpy as np
import pytest
from cases import PLAIN, generator

import kvjax
from kvjax.cache import init
from kvjax.cache.recipes import RECIPES, REST, options_of, resolve
from kvjax.errors import InputError

EMPTY16 = 65535  # what an empty slot's two-byte position is


@pytest.fixture(autouse=True, scope="module")
def fast_compile():
    """Compiling takes most of these tests' time, and they run tiny shapes a few times."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def small(name, **options):
    """A recipe of the table, with those of the options that it has."""
    known = [*options_of(RECIPES[name].recipe), "codec"]
    if RECIPES[name].recipe.window == REST:
        options.pop("window", None)
    return kvjax.recipe(name, **{k: v for k, v in options.items() if k in known})


NAMES = [n for n, x in RECIPES.items() if not x.recipe.fold and not x.recipe.reducer]
NAMES = [n for n in NAMES if n != "dms"]
"""Recipes whose memory is entries, and nothing that stands for what was dropped; and not dms, which
keeps as many as its gates say."""

QUICK = ("exact", "streaming_llm", "snapkv", "ada_snapkv", "key_norm", "int8", "kvzip")
SLOW = [name for name in NAMES if name not in QUICK]
"""For the full suite: each of their parts is in a quicker one, or in tests of its own."""


def _variants():
    """(name, when, positions) of every way that the table allows, and of those it refuses."""
    good, bad = [], []
    for name in NAMES:
        known = options_of(RECIPES[name].recipe)
        ways = itertools.product(("during", "after"), ("keep", "rerot", "read"))
        for when, positions in ways if "when" in known else [("during", "keep")]:
            made = small(name, when=when, positions=positions, slots=12, sinks=4, window=4)
            try:
                init.check(PLAIN, resolve(made, 64), 64)
                good.append((name, when, positions))
            except InputError:
                bad.append((name, when, positions))
    return good, bad


VARIANTS, REFUSED = _variants()
FIRST = list({v[:2]: v for v in reversed(VARIANTS)}.values())[::-1]
"""One way of placing positions for each recipe and time of compressing."""


def longer(values, *names):
    """Parameters, SLOW ones and those of these names marked for the full suite: others nearly
    repeat them."""
    out, names = [], {*names, *SLOW}
    for value in values:
        value = value if isinstance(value, tuple) else (value,)
        out.append(pytest.param(*value, marks=[pytest.mark.full] if value[0] in names else []))
    return out


SKIPPED = [v for v in FIRST if v[:2] in (("int8", "after"), ("streaming_llm", "after"))]
SKIPPED += [v for v in FIRST if v[0] in SLOW]
TIERS = [pytest.param(*v, marks=pytest.mark.full) if v in SKIPPED else v for v in FIRST]
"""FIRST, with what the others nearly repeat marked for the full suite."""


class Dense:
    """The Llama structure: RMS norms, rotary positions, gated mlp, tied output."""

    def __init__(self, params, config):
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        self.config = config
        self.k = [[] for _ in range(config.layers)]  # keys before RoPE, [n d] each
        self.v = [[] for _ in range(config.layers)]
        self.rows = [[{}] * config.heads for _ in range(config.layers)]  # weights of the last query

    def read(self, token, kept=None, renumber=False):
        """Logits [w] of the next token, which it then remembers.

        kept[layer][head]: arrivals that the token sees beside itself; None: all before it, or the
        newest of a sliding window. renumber: what is seen is placed at 0, 1, 2 ..., itself last.
        """
        c, blocks = self.config, self.w.blocks
        now = len(self.k[0])
        x = self.w.embed[token]
        for i in range(c.layers):
            w = jax.tree.map(lambda a, i=i: a[i], blocks)
            window = c.kinds[c.pattern[i]].window
            y = norm(x, w.attn_norm, c.eps)
            q = np.einsum("hdm,m->hd", w.q, y)
            self.k[i].append(np.einsum("ndm,m->nd", w.k, y))
            self.v[i].append(np.einsum("nem,m->ne", w.v, y))
            out = []
            for h in range(c.heads):
                n = h * c.kv_heads // c.heads
                see = list(range(now)) if kept is None else list(kept[i][n])
                if window is not None:
                    see = [p for p in see if p > now - window]
                see.append(now)
                at = np.arange(len(see)) if renumber else np.array(see)
                base = c.kinds[c.pattern[i]].rope.base
                keys = rope(np.stack([self.k[i][p][n] for p in see]), at, base)
                s = keys @ rope(q[h][None], at[-1:], base)[0] * c.head_dim**-0.5
                p = np.exp(s - s.max())
                self.rows[i][h] = dict(zip(see, p / p.sum(), strict=True))
                out.append(p @ np.stack([self.v[i][p][n] for p in see]) / p.sum())
            x = x + np.einsum("mhe,he->m", w.o, np.stack(out))
            y = norm(x, w.mlp_norm, c.eps)
            gate = w.gate @ y
            x = x + w.down @ (gate / (1 + np.exp(-gate)) * (w.up @ y))
        return self.w.embed @ norm(x, self.w.norm, c.eps)

    def norms(self, layer, head):
        """Key norms of all tokens read so far: rotation does not change them."""
        return np.array([np.linalg.norm(k[head]) for k in self.k[layer]])


def norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def rope(x, at, base):
    """Rotates the pairs (i, i + d/2) of x [s d] by the positions at [s]."""
    half = x.shape[1] // 2
    angle = at[:, None] * base ** (-np.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def held(cache, row=0):
    """Arrivals that a row remembers and its next query sees: [layer][kv head], ascending.

    Bodies: `pos` per slot (all ones or -1: empty), or base + slot below edge. The pool: `owner` per
    page too, and each layer's stretch of pages.
    The tail: from edge on, or a sliding window short of the query itself.
    """
    cache = jax.tree.map(np.asarray, cache)
    seen, edge = int(cache.seen[row]), int(cache.edge[row])
    out = []
    for group in cache.groups:
        for i in range(group.stop - group.start):
            low = 0 if group.keeps_all else edge
            low = low if group.window is None else max(0, seen - group.window + 1)
            heads = [list(range(low, seen)) for _ in range(group.tail.k.shape[2])]
            for body in group.bodies:
                for head, arrival in _stored(body, i, row, edge, len(heads)):
                    heads[head].append(arrival)
            if group.pooled is not None:
                for head, arrival in _pooled(cache.pool, group.pooled + i, row):
                    heads[head].append(arrival)
            out.append([sorted(h) for h in heads])
    return out


def _stored(body, layer, row, edge, heads):
    if body.pos is None:
        base = int(body.base[layer, row])
        last = min(edge, base + body.capacity)
        return [(h, p) for h in range(heads) for p in range(base, last)]
    pos = np.asarray(body.pos[layer, row]).astype(int)  # [r p s]
    real = (pos >= 0) & (pos != EMPTY16)
    return [(r, pos[r, p, s]) for r, p, s in np.argwhere(real).tolist()]


def _pooled(pool, layer, row):
    first = int(pool.first[layer, row])
    pages = range(first, first + int(pool.count[layer, row]))
    pos, owner = pool.pos[0, row, 0].astype(int), pool.owner[0, row, 0].astype(int)
    return [(owner[p], x) for p in pages if owner[p] >= 0
            for x in pos[p].tolist() if x not in (-1, EMPTY16)]  # fmt: skip


RAW = 2e-4  # float32 against float64, over tens of tokens; logits are of order 10

CHOOSING = [name for name in NAMES if RECIPES[name].recipe.choice is not None]
BUDGET = {name: RECIPES[name].recipe.choice.budget.name for name in CHOOSING}
APART = [  # scores of one token do not depend on the others, and each head keeps as many
    name for name in CHOOSING if BUDGET[name] == "uniform"
    and RECIPES[name].recipe.choice.scorer.name not in ("key_diff", "expected_attention")
]  # fmt: skip

IDS = generator("hard cases").integers(0, PLAIN.vocab, 64)
absorb_long = jax.jit(kvjax.absorb_long)
