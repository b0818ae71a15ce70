"""One recipe on one task: its figures, from the rows of its items and of the exact cache's."""

from collections import defaultdict
from dataclasses import dataclass

from kvjax.eval import stats
from kvjax.eval.stats import Mean

CALIBRATED = 10  # asks with the same options, for a mean that means something


@dataclass(frozen=True)
class Summary:
    """One recipe on one task with one model, beside the exact cache on the same asks."""

    model: str
    task: str
    recipe: str
    kind: str  # "accuracy" or "loss"
    items: int
    asks: int
    value: Mean  # accuracy, or nats a token
    change: Mean  # accuracy: difference from the base; loss: relative to it, minus 1
    logprob: Mean  # of the right answer, in nats an answer (loss: a token)
    logprob_change: Mean  # paired difference from the base
    key_loss: Mean | None  # nats a token, of tokens that need the far prefix
    kl: float  # nats a token; nan for exact
    top1: float  # share of equal likeliest tokens
    held: float  # bytes of the leaves, mean over items
    live: float  # bytes of what a query can see
    share: float  # held, of the exact cache's
    entries: float  # live, per layer and kv head
    chance: float  # accuracy by guessing; loss: with the recent text alone
    claim: str  # equal, worse, open, few: kvjax.eval.stats.claim
    compress_s: tuple[float, float, float] | None  # median, quartiles; warm runs
    decode_ms: tuple[float, float, float] | None  # a token


def alike(rows) -> bool:
    """Whether all asks have the same options."""
    seen = {tuple(sorted(a["options"])) for r in rows.values() for a in r["asks"] if "options" in a}
    return len(seen) == 1


def over_items(pairs) -> Mean:
    """The mean over asks, with an interval over items."""
    sums, counts = defaultdict(float), defaultdict(int)
    for (item, _), x in pairs:
        sums[item] += x
        counts[item] += 1
    order = sorted(sums)
    return stats.mean([sums[i] for i in order], [counts[i] for i in order])


def logprobs(rows, base, exact, shared, kind):
    """Sums of log-probabilities by item, of this and the other, and numbers of asks (tokens)."""
    lps, others, counts = [], [], []
    for item in shared:
        a = b = count = 0
        trio = zip(*(x[item]["asks"] for x in (rows, base, exact)), strict=True)
        for mine, theirs, asked in trio:
            if asked.get("needs", True):
                a, b = a + mine["lp"], b + theirs["lp"]
                count += mine["n"] if kind == "loss" else 1
        lps.append(a)
        others.append(b)
        counts.append(count)
    return lps, others, counts


def key_loss(rows, exact, shared) -> Mean | None:
    """Loss on the tokens that need the far prefix."""
    sums, counts = [], []
    for item in shared:
        pairs = zip(rows[item]["asks"], exact[item]["asks"], strict=True)
        known = [(mine["lp_key"], theirs["n_key"]) for mine, theirs in pairs if "lp_key" in mine]
        sums.append(-sum(lp for lp, _ in known))
        counts.append(sum(n for _, n in known))
    return stats.mean(sums, counts) if any(counts) else None


def average(asks, what) -> float:
    """A mean over tokens."""
    known = [(ask[what], ask["n"]) for ask in asks if what in ask]
    if not known:
        return float("nan")
    return sum(x * n for x, n in known) / sum(n for _, n in known)
