"""What the turns of `kvjax bench speed` amount to: ratios with spread, bars, and bounds."""

import statistics

from rich.console import Console
from rich.table import Table

# What issue 2 asks for; the last two are of one recipe and context, against the exact cache there.
DECODE, PREFILL, MAXRSS = 1.5, 1.0, 1.3
RECIPE, RECIPE_DECODE, RECIPE_BYTES = ("snapkv@0.25", 4096), 1.2, 0.30


def rows(turns: dict, machine: dict) -> list[dict]:
    """One row for each thing measured.

    turns: {"kvjax": [...], "transformers": [...]} of speed turns, in pairs, each with the result of
    its memory turn as "maxrss_bytes"; without a peer there are no ratios to one. A ratio is taken
    within each pair: its median, and the lowest and highest as its spread.
    """
    ours = turns["kvjax"]
    peer = next((turns[name] for name in turns if name != "kvjax"), None)
    out = [_decode(ours, peer, i, machine) for i, r in _cells(ours) if r["recipe"] == "exact"]
    out += [_prefill(ours, peer, r, machine) for r in ours[0]["prefill"]["s"]]
    out.append(_maxrss(ours, peer))
    for i, row in _cells(ours):
        if row["recipe"] != "exact":
            out += [_recipe_decode(ours, i, machine), _recipe_bytes(ours, i)]
    return out


def _cells(turns):
    return enumerate(turns[0]["decode"])


def _decode(ours, peer, i, machine):
    cell = ours[0]["decode"][i]
    rates = [_rate(t["decode"][i]) for t in ours]
    others = None if peer is None else [_rate(t["decode"][i]) for t in peer]
    row = {"what": "decode", "context": cell["context"], "recipe": "exact", "unit": "tokens/s"}
    row |= compare(rates, others, at_least=DECODE) | _reads(cell, statistics.median(rates), machine)
    if peer is not None:
        row["same_tokens"] = agreement(cell["tokens"], peer[0]["decode"][i]["tokens"])
    return row


def _prefill(ours, peer, recipe, machine):
    """Reading, and compressing with the recipe; a method that the peer lacks has no ratio."""
    cell = ours[0]["decode"][0]
    count = ours[0]["prefill"]["tokens"]
    rates = [_prefill_rate(t, recipe) for t in ours]
    has = peer is not None and recipe in peer[0]["prefill"]["s"]
    others = [_prefill_rate(t, recipe) for t in peer] if has else None
    row = {"what": "prefill", "context": count, "recipe": recipe, "unit": "tokens/s"}
    row |= compare(rates, others, at_least=PREFILL)
    if recipe != "exact":
        return row
    flops = count * cell["flops_per_token"] + cell["flops_per_pair"] * count * (count + 1) // 2
    share = flops / machine["flops_per_s"] / (count / statistics.median(rates))
    return row | {"bound": "arithmetic", "flops": flops, "bound_share": share}


def _maxrss(ours, peer):
    row = {"what": "maxrss", "context": ours[0]["prefill"]["tokens"], "recipe": "exact"}
    sizes = [t["maxrss_bytes"] for t in ours]
    others = None if peer is None else [t["maxrss_bytes"] for t in peer]
    row |= {"unit": "bytes"} | compare(sizes, others, at_most=MAXRSS)
    weights = ours[0]["decode"][0]["weight_bytes"]
    return row | {"bound": "weights", "bytes": weights, "bound_share": weights / row["ours"]}


def _recipe_decode(ours, i, machine):
    """Against the exact cache at the same context, measured in the same process."""
    cell = ours[0]["decode"][i]
    j = _exact_beside(ours, i)
    rates = [_rate(t["decode"][i]) for t in ours]
    exact = [_rate(t["decode"][j]) for t in ours]
    row = {"what": "decode", "context": cell["context"], "recipe": cell["recipe"]}
    bar = RECIPE_DECODE if (cell["recipe"], cell["context"]) == RECIPE else None
    row |= {"unit": "tokens/s"} | compare(rates, exact, at_least=bar, against="exact")
    return row | _reads(cell, statistics.median(rates), machine)


def _recipe_bytes(ours, i):
    cell, exact = ours[0]["decode"][i], ours[0]["decode"][_exact_beside(ours, i)]
    bar = RECIPE_BYTES if (cell["recipe"], cell["context"]) == RECIPE else None
    row = {"what": "nbytes", "context": cell["context"], "recipe": cell["recipe"], "unit": "bytes"}
    size, whole = [cell["cache_bytes"]], [exact["cache_bytes"]]
    return row | compare(size, whole, at_most=bar, against="exact")


def _exact_beside(ours, i):
    cells = ours[0]["decode"]
    here = cells[i]["context"]
    return next(j for j, c in enumerate(cells) if (c["context"], c["recipe"]) == (here, "exact"))


def compare(ours, others, *, at_least=None, at_most=None, against="peer") -> dict:
    """Medians, the ratio of each pair as median and spread, and whether it meets its bar."""
    row = {"ours": statistics.median(ours), "against": against}
    if others is None:
        return row | {"against": None}
    ratios = [a / b for a, b in zip(ours, others, strict=True)]
    ratio = statistics.median(ratios)
    row |= {"other": statistics.median(others), "ratio": ratio}
    row |= {"low": min(ratios), "high": max(ratios)}
    if at_least is not None:
        row |= {"bar": f">= {at_least:g}", "met": ratio >= at_least}
    if at_most is not None:
        row |= {"bar": f"<= {at_most:g}", "met": ratio <= at_most}
    return row


def agreement(ours, other) -> str:
    """How many of the first greedy tokens are the same, as "64 of 64"."""
    pairs = list(zip(ours, other, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return f"{same} of {len(pairs)}"


def _rate(cell):
    """Tokens a second: the median of the turn's timed runs."""
    return 1000 / statistics.median(cell["ms"])


def _prefill_rate(turn, recipe):
    return turn["prefill"]["tokens"] / statistics.median(turn["prefill"]["s"][recipe])


def _reads(cell, rate, machine):
    """What bounds decoding: the bytes a token reads, at the bandwidth measured."""
    size = cell["weight_bytes"] + cell["cache_bytes"]
    share = size * rate / machine["bytes_per_s"]
    return {"bound": "bandwidth", "bytes": size, "bound_share": share}


def show(head: dict, table_rows: list[dict], console: Console) -> None:
    """The rows as a table, under what was measured and on what."""
    hardware, machine = head["hardware"], head["machine"]
    table = Table(title_justify="left", title="ratios: median of pairs (lowest to highest)")
    table.add_column("what", no_wrap=True)
    for name in ("kvjax", "other", "ratio", "bar", "bound by"):
        table.add_column(name, justify="right")
    for row in table_rows:
        table.add_row(*map(str, _cells_of(row)))
    console.print(table)
    console.print(
        f"{hardware['cpu']}, {hardware['cores']} cores: "
        f"{machine['bytes_per_s'] / 1e9:.1f} GB/s, {machine['flops_per_s'] / 1e9:.0f} Gflop/s "
        "measured here. Bound: the share that was reached of what bandwidth or arithmetic alone "
        "would allow; of peak memory, the share that is weights.",
        highlight=False,
    )


def _cells_of(row):
    what = f"{row['what']} {row['context']:,} {row['recipe']}"
    amount = _amount(row["unit"])
    yield what
    yield amount(row["ours"])
    if row["against"] is None:
        yield from ("", "", "")
    else:
        yield f"{row['against']} {amount(row['other'])}"
        yield f"{row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f})"
        met = {True: "met", False: "missed"}
        yield f"{row['bar']}x {met[row['met']]}" if "bar" in row else ""
    yield _bound(row)


def _amount(unit):
    if unit == "bytes":
        return lambda x: f"{x / 1e6:,.0f} MB"
    return lambda x: f"{x:,.1f} {unit}"


def _bound(row):
    if "bound" not in row:
        return ""
    size = f"{row['flops'] / 1e9:,.0f} Gflop" if "flops" in row else f"{row['bytes'] / 1e6:,.0f} MB"
    return f"{row['bound']}, {size}: {row['bound_share']:.0%}"
