"""From what was heard to the rows of a result file."""

from collections.abc import Sequence
from typing import Any

from kvjax.eval.grades import grade
from kvjax.eval.items import Ask, Item
from kvjax.eval.score import Heard

# A token needs the far prefix if that raises its log-probability by more than GAIN, to more than
# LIKELY: the key tokens of LongPPL (Fang et al. 2024, arXiv:2410.23771, equation 5).
GAIN, LIKELY = 2.0, -2.0
SHOWN = 300  # characters of a generated answer that a row holds
DIGITS = 6


def keys(exact: Heard, recent: Heard) -> list[bool]:
    """Which tokens of an answer need what lies before the recent text."""
    return [a - b > GAIN and a > LIKELY for a, b in zip(exact.lp, recent.lp, strict=True)]


def row(
    item: Item, heard: list[Heard], tokenizer: Any, masks: Sequence[list[bool] | None] | None
) -> dict:
    """The asks of an item, graded; the same for kvjax and every peer."""
    pairs = enumerate(zip(item.asks, heard, strict=True))
    return {"asks": [_ask(a, h, tokenizer, masks and masks[i]) for i, (a, h) in pairs]}


def _ask(ask: Ask, heard: Heard, tokenizer, mask) -> dict:
    out: dict[str, Any] = {"lp": _round(sum(heard.lp)), "n": len(heard.lp)}
    if ask.metric == "match":
        out["right"] = float(all(heard.best))
    elif ask.metric == "option":
        first = [option[0] for option in ask.options]
        out["options"] = {str(i): _round(x) for i, x in zip(first, heard.options, strict=True)}
        out["answer"] = str(ask.answer[0])
    elif ask.max_new_tokens:
        text = tokenizer.decode(heard.made)
        right = grade(ask.metric, text, ask.references)
        out |= {"text": text[:SHOWN]} | ({} if right is None else {"right": _round(right)})
    if heard.kl is not None and heard.top1 is not None:
        out["kl"] = _round(sum(heard.kl) / len(heard.kl))
        out["top1"] = _round(sum(heard.top1) / len(heard.top1))
    if mask is not None and any(mask) and ask.metric == "loss":
        out["lp_key"] = _round(sum(x for x, key in zip(heard.lp, mask, strict=True) if key))
    return out


def exact(item: Item, heard: list[Heard], tokenizer: Any, recent: list[Heard] | None) -> dict:
    """The row of the exact cache: with what the asks are, and what the recent text alone says."""
    masks = [keys(*pair) for pair in zip(heard, recent, strict=True)] if recent else None
    made = row(item, heard, tokenizer, masks)
    for i, (out, ask) in enumerate(zip(made["asks"], item.asks, strict=True)):
        if recent and masks:
            out["lp_recent"] = _round(sum(recent[i].lp))
            if ask.metric == "loss":
                out |= {"key": pack(masks[i]), "n_key": sum(masks[i])}
            else:
                out["needs"] = sum(heard[i].lp) - sum(recent[i].lp) > GAIN
        if ask.info:
            out["info"] = ask.info
    return made


def pack(mask: list[bool]) -> str:
    """A mask as hex digits, four tokens each."""
    bits = "".join("1" if key else "0" for key in mask)
    bits += "0" * (-len(bits) % 4)
    return "".join(f"{int(bits[i : i + 4], 2):x}" for i in range(0, len(bits), 4))


def unpack(text: str, count: int) -> list[bool]:
    """The mask that `pack` wrote."""
    return [bit == "1" for digit in text for bit in f"{int(digit, 16):04b}"][:count]


def masks(exact: dict) -> list[list[bool] | None] | None:
    """The key tokens of each ask, from the row of the exact cache."""
    if not any("key" in ask for ask in exact["asks"]):
        return None
    return [unpack(a["key"], a["n"]) if "key" in a else None for a in exact["asks"]]


def _round(x: float) -> float:
    return round(float(x), DIGITS) + 0.0
