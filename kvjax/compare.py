"""One recipe beside the exact cache: what it holds, what it answers, how long a token takes."""

import dataclasses
import statistics
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvjax
from kvjax.cache import positions, slots
from kvjax.cache.cache import nbytes, oldest_in_ring
from kvjax.cache.recipes import RECIPES, options_of
from kvjax.cache.spelling import budgeted, parse
from kvjax.cache.state import State
from kvjax.config import CacheRecipe, ModelConfig
from kvjax.errors import InputError, unknown

# One of each kind: where a token stands, what it is, who looks at it, budgets per head, and codes.
SIX = (
    ("streaming_llm", {}),
    ("key_norm", {}),
    ("snapkv", {}),
    ("ada_snapkv", {}),
    ("int8", {}),
    ("snapkv", {"codec": "int8"}),
)
TIMED = 16  # tokens of a timed run, a whole run of `generate`
RUNS = 3
WORDS = 32  # question and answer are padded to whole multiples, so that they share a compilation


@dataclass(frozen=True)
class Held:
    """What a cache holds."""

    tokens: float  # live entries, mean over layers and kv heads, to a tenth
    bytes: int
    share_of_exact_bf16: float  # of the exact bf16 cache with the same room


def with_keep(name: str, keep: float | None, **options) -> CacheRecipe:
    """The recipe `name`; `keep` is passed on only where the recipe drops tokens."""
    recipe = kvjax.recipe(name, **options)
    if keep is None or recipe.choice is None:
        return recipe
    return kvjax.recipe(name, keep=keep, **options)


def build(model, exact, tokens, recipe: CacheRecipe, max_length: int, evidence=None):
    """The cache that `recipe` makes of `tokens [b t]`; evidence: `api.evidence_of`, if known.

    Recipes that compress afterwards condense the exact cache, which stays as it was; recipes that
    compress as tokens arrive read the tokens again, and keep a fraction of these, not of the room.
    """
    if recipe.store is None:
        return kvjax.fork(exact)
    if recipe.when == "after":
        return kvjax.condense(model, exact, recipe, tokens=tokens, evidence=evidence)
    recipe = budgeted(recipe, tokens.shape[1])
    return kvjax.prefill(model, tokens, recipe, max_length=max_length, logits="none")[1]


def held(config: ModelConfig, cache, max_length: int) -> Held:
    """Counts what one row of `cache` holds."""
    size = kvjax.nbytes(cache)
    exact = 2 * 2 * config.layers * config.kv_heads * config.head_dim * max_length  # k and v, bf16
    tokens = round(live(cache), 1)
    return Held(int(tokens) if tokens == int(tokens) else tokens, size, size / exact)


def live(cache) -> float:
    """Entries that a query can see, per layer and kv head, on average."""
    total, layers = 0.0, 0
    for group in cache.groups:
        depth = group.stop - group.start
        count = float(_ring(cache, group).sum(-1).mean())
        for body in group.bodies:
            if isinstance(body, State):  # sums over tokens: it has no entries
                continue
            if body.pos is None:
                count += float(jnp.clip(cache.edge - body.base, 0).mean())
                continue
            filled = (slots.unpack_pos(body.pos) >= 0).sum((-1, -2))  # [l b r]
            count += int(filled.sum()) / filled.size
        total += count * depth
        layers += depth
    if cache.pool is not None:
        heads = cache.groups[0].tail.k.shape[2]
        total += int((slots.unpack_pos(cache.pool.pos) >= 0).sum()) / (heads * cache.batch)
    return total / layers


def _ring(cache, group):
    """Which slots of a tail hold a token, [b c]."""
    return positions.ring(group.tail.capacity, cache.seen, oldest_in_ring(cache, group)) >= 0


def live_bytes(cache) -> tuple[int, float]:
    """(bytes of what a query can see, entries per layer and kv head on average).

    A page that is half full counts half; `nbytes` counts all that is allocated.
    """
    size = 0.0
    for group in cache.groups:
        rings = [group.tail.k, group.tail.v]
        size += nbytes(rings) * float(_ring(cache, group).mean())
        for body in group.bodies:
            size += nbytes(body) * _filled(cache, body)
    if cache.pool is not None:
        size += nbytes(cache.pool) * float((slots.unpack_pos(cache.pool.pos) >= 0).mean())
    return round(size), live(cache)


def _filled(cache, body) -> float:
    """The share of a body's slots that are in use."""
    if isinstance(body, State):
        return 1.0
    if body.pos is None:
        return float((jnp.clip(cache.edge - body.base, 0) / body.capacity).mean())
    return float((slots.unpack_pos(body.pos) >= 0).mean())


def room(tokens: int) -> int:
    """The max_length for so many tokens, with room for a question and its answer."""
    return tokens + 128


def logprobs(model, cache, question, answer):
    """Log-probabilities [t w] before each token of `answer`, after `question`; cache unchanged."""
    ids = [*question, *answer]
    padded = np.zeros((1, -(-len(ids) // WORDS) * WORDS), np.int32)
    padded[0, : len(ids)] = ids
    lengths = np.asarray([len(ids)], np.int32)
    logits, _ = kvjax.extend(model, padded, kvjax.fork(cache), lengths=lengths, logits="all")
    here = logits[0, len(question) - 1 : len(ids) - 1]
    return np.asarray(jax.nn.log_softmax(here.astype(jnp.float32), axis=-1))


def answer_logprob(model, cache, question, answer) -> float:
    """Log-probability of `answer` after `question`, teacher-forced."""
    table = logprobs(model, cache, question, answer)
    return float(table[np.arange(len(answer)), list(answer)].sum())


def divergence(exact, other):
    """(mean KL(exact || other), share of equal best tokens) of two tables [t w]."""
    kl = (np.exp(exact) * (exact - other)).sum(-1)
    return float(kl.mean()), float((exact.argmax(-1) == other.argmax(-1)).mean())


def answer(model, cache, question, max_new_tokens: int, stop=None):
    """A greedy answer, as `kvjax.generate` gives it; the cache is unchanged."""
    return kvjax.generate(
        model, question, cache=kvjax.fork(cache), max_new_tokens=max_new_tokens, stop=stop
    )


def ms_per_token(model, cache, question, count: int) -> float:
    """Milliseconds a token in the compiled loop, greedy: the median of several runs.

    Shapes are those of an answer to `question`, so that nothing compiles for the sake of timing.
    """
    times = []
    for _ in range(RUNS + 1):  # the first one may compile
        made = answer(model, cache, question, count, stop=())
        times.append(made.stats["decode_s"])
    return 1000 * statistics.median(times[1:]) / count


def when(recipe: CacheRecipe) -> str:
    """When it compresses: "during" the reading, "after" it, or "" for never."""
    return recipe.when if recipe.store else ""


def describe(name: str) -> dict:
    """A row of the table of recipes."""
    entry = RECIPES[name]
    return {
        "name": name,
        "kept": entry.keeps,
        "when": when(entry.recipe),
        "options": options_of(entry.recipe),
        "source": entry.source,
    }


def split(tokenizer, text: str, question: str) -> tuple[list[int], list[int]]:
    """Token ids of the text, and of the question with what the model needs to begin its answer."""
    if tokenizer.template is None:
        return tokenizer.encode(text), tokenizer.encode(f"\n\n{question}\n", add_bos=False)
    chats = [[{"role": "user", "content": f"{text}\n\n{end}"}] for end in (question, "")]
    whole, without = map(tokenizer.encode_chat, chats)
    pairs = zip(whole, without, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(without))
    return whole[:common], whole[common:]


def check_options(options: dict, others) -> None:
    """Raises InputError for an option that no recipe takes; `others` are the command's own."""
    known = {"codec"}.union(*(options_of(entry.recipe) for entry in RECIPES.values()))
    for name in options:
        if name not in known:
            flags = [f"--{option.replace('_', '-')}" for option in known]
            raise unknown("option", f"--{name.replace('_', '-')}", {*flags, *others})


def contenders(names, options: dict, everything: bool = False) -> list:
    """(title, CacheRecipe) of the exact cache and of the recipes named, by default the six."""
    made = [("exact", kvjax.recipe("exact"))]
    if names and everything:
        raise InputError("--all is every recipe; leave out --recipe or --all")
    if names:
        made += [(name, parse(name, **options)) for name in names if name != "exact"]
        return made
    if other := [name for name in options if name != "keep"]:
        raise InputError(f"option --{other[0]} belongs to one recipe; name it with --recipe")
    every = ((name, {}) for name in kvjax.recipes() if name != "exact")
    for name, own in every if everything else SIX:
        title = " + ".join([name, *own.values()])
        made.append((title, with_keep(name, options.get("keep"), **own)))
    return made


def run(model, tokens, asked, chosen, max_new_tokens: int, tick) -> dict:
    """A row for each recipe, measured on the answer that the exact cache gives; `tick` advances."""
    max_length = room(len(tokens) + len(asked) + max_new_tokens)
    ids = np.asarray([tokens], np.int32)
    tick("reading the text")
    _, exact = kvjax.prefill(model, ids, max_length=max_length, logits="none")
    target = answer(model, exact, asked, max_new_tokens).tokens
    truth = logprobs(model, exact, asked, target)
    report = {"tokens": len(tokens), "compared": len(target), "dtype": model.config.dtype}
    report["rows"] = []
    for name, recipe in chosen:
        tick(name)
        cache = build(model, exact, ids, recipe, max_length)
        kl, agreement = divergence(truth, logprobs(model, cache, asked, target))
        row = {"recipe": name, "when": when(recipe), "keep": recipe.keep}
        row |= dataclasses.asdict(held(model.config, cache, max_length))
        row |= {"kl": kl, "agreement": agreement}
        row["ms_per_token"] = ms_per_token(model, cache, asked, TIMED)
        row["answer"] = answer(model, cache, asked, max_new_tokens).text
        report["rows"].append(row)
    return report


def legend(dtype: str) -> str:
    """What the bytes count, in a sentence."""
    return (
        f"MB is all that is allocated: {dtype} where it is not coded, whole pages, and room for "
        "later tokens, so that small texts gain less than keep says."
    )


def table(title: str, columns) -> Table:
    """A table of recipes that fits 80 columns."""
    made = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    made.add_column("recipe", no_wrap=True)
    for name in ("tokens", "MB", "of exact", "of bf16", *columns, "ms/tok"):
        made.add_column(name, justify="right", no_wrap=True)
    return made


def add_row(table: Table, row: dict, exact: int, cells) -> None:
    """Adds a row of the report, with `cells` for the columns that `table` was given."""
    table.add_row(
        row["recipe"], f"{row['tokens']:,.0f}", f"{row['bytes'] / 1e6:,.1f}",
        f"{row['bytes'] / exact:.0%}", f"{row['share_of_exact_bf16']:.0%}",
        *cells, f"{row['ms_per_token']:.1f}",
    )  # fmt: skip


def show(report: dict, console: Console) -> None:
    """A table of measures, then the answers."""
    title = f"{report['tokens']:,} tokens read, {report['compared']} tokens of answer compared"
    drawn = table(title, ("KL", "top-1"))
    exact = report["rows"][0]["bytes"]
    for row in report["rows"]:
        add_row(drawn, row, exact, (f"{row['kl']:z.4f}", f"{row['agreement']:.0%}"))
    console.print(drawn)
    console.print(
        "\nKL: mean divergence of the next-token probabilities from those of the exact cache, in "
        "nats, along its answer. top-1: how often the likeliest token is the same. tokens: kept, "
        "per layer and kv head. of exact: of the exact cache here. of bf16: of an exact bfloat16 "
        f"cache. ms/tok: median, compiled. {legend(report['dtype'])}\n",
        highlight=False,
    )
    for row in report["rows"]:
        console.print(f"[bold]{row['recipe']}[/]: {escape(row['answer'].strip())}")
