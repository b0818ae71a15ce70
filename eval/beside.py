"""A peer on the items of a job: same weights, token ids and budgets, in a process of its own."""

from collections.abc import Callable

from kvjax.cache import recipes, sizes, spelling
from kvjax.config import CacheRecipe
from kvjax.eval import keys, peers, rows, where
from kvjax.eval.items import Ask, Item
from kvjax.eval.score import Heard

LAYOUT = "when page positions stride lookahead chunk slots count fold reduce scorer budget".split()


def scripts(peer: str) -> list[str]:
    """The text of what the peer's child runs."""
    own = peers.script(peer)
    return [path.read_text("utf-8") for path in (own, own.with_name("quality.py"))]


def code(peer: str, word: str, known: dict[str, CacheRecipe]) -> str:
    """A hash of what a result of the peer depends on."""
    return keys.peer_code(told(word, known), scripts(peer), peers.PEERS[peer].packages)


def run(
    peer: str, labels: list[str], python: str | None, job, todo, ledger, cost: Callable
) -> None:
    """Adds the rows of `labels` for every item whose exact row is there."""
    wanted, index = [], {}
    for task, made in job.items.items():
        for i, item in enumerate(made):
            missing = [w for w in labels if ledger.get(job, task, i, w) is None]
            # a task that dropped itself has no exact rows past that
            if missing and (job.label, task, i, "exact") in ledger.rows:
                index[f"{task}/{i}"] = (task, i)
                wanted.append(_request(f"{task}/{i}", item, labels, todo, job.model.tokenizer))
                ledger.advance(task, cost(item) * (len(labels) - len(missing)))
            else:
                ledger.advance(task, cost(item) * len(labels))
    if not wanted:
        return
    recipes_ = [told(word, todo.recipes) for word in labels]
    work = {"model": job.path, "cores": where.cores(), "recipes": recipes_}
    for said in peers.rows(peer, python or peers.python(peer), work, wanted, ledger.advance):
        if "id" not in said:
            line = {"kind": "peer", "model": job.label, "peer": peer} | said
            ledger.log.add([line] if line not in ledger.log.lines else [])
            continue
        task, i = index[said["id"]]
        item, label = job.items[task][i], said["recipe"]
        ledger.advance(f"{job.label}, {peer}, {task} {i + 1} of {len(job.items[task])}", cost(item))
        if (job.label, task, i, label) in ledger.rows:
            continue
        heard = [_heard(ask) for ask in said["asks"]]
        exact = ledger.rows[job.label, task, i, "exact"]
        made = rows.row(item, heard, job.model.tokenizer, rows.masks(exact))
        times = {k: {"s": round(v, 4), "compile_s": 0.0} for k, v in said["seconds"].items()}
        ledger.new(job, task, i, label, said["bytes"] | made, times)


def _heard(ask: dict) -> Heard:
    return Heard(
        ask["lp"], ask["best"], ask["options"], ask["made"], ask.get("kl"), ask.get("top1")
    )


def _request(key: str, item: Item, labels, todo, tokenizer) -> dict:
    """An item as the child reads it, with the entries that each recipe keeps of it."""
    counts = {word: kept(word, todo.recipes, len(item.context)) for word in labels}
    counts = {word: count for word, count in counts.items() if count is not None}
    stop = sorted(tokenizer.stop_ids) if tokenizer else []
    asks = [_asked(ask, stop) for ask in item.asks]
    return {"id": key, "context": item.context, "asks": asks, "kept": counts}


def _asked(ask: Ask, stop) -> dict:
    return {
        "question": ask.question, "answer": ask.answer, "options": ask.options,
        "max_new_tokens": ask.max_new_tokens, "before": ask.before, "stop": stop,
    }  # fmt: skip


def kept(word: str, known: dict[str, CacheRecipe], length: int) -> int | None:
    """Entries of a kv head that a recipe keeps of a context; None where nothing says so."""
    recipe = known.get(word.partition(":")[2])
    if recipe is None:
        keep = spelling.split(word, "keep")[1].get("keep")
        return None if keep is None else max(round(keep * length), 1)
    return sizes.kept(spelling.budgeted(recipe, length), length)


def told(word: str, known: dict[str, CacheRecipe]) -> dict:
    """A recipe as the child reads it: what its methods take, and not how kvjax lays it out."""
    peer, _, label = word.partition(":")
    name, options = spelling.split(label, "keep")
    recipe = known.get(label)
    if recipe is not None:
        name, options = recipe.name, dict(recipes.options_of(recipe))
        options = {k: v for k, v in options.items() if k not in LAYOUT and v is not None}
        if peer == "hf-quant":  # the exact tail of both
            options["residual"] = options.pop("window")
    return {"label": word, "name": name, "keep": options.pop("keep", 1.0), "options": options}
