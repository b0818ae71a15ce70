"""Recipes with a name of their own: a scorer, a budget, a store, and the numbers of their cards."""

from dataclasses import dataclass

from kvjax.config import CacheRecipe, Choice, Spec, Store


@dataclass(frozen=True)
class Entry:
    """A recipe with its defaults, what it keeps in a phrase, and where it comes from."""

    recipe: CacheRecipe
    keeps: str
    source: str
    needs: str = ""  # what has to be there first


REST = -1
"""A window of REST takes every entry that the sinks leave: `resolve` makes it a number."""

SNAP = Spec("window_attention")
POOL_SNAP = Spec("window_attention", (("kernel", 7), ("pool", "max")))


NAMED = {
    "exact": Entry(CacheRecipe("exact"), "Keeps every token exactly", "no compression"),
    "streaming_llm": Entry(
        CacheRecipe("streaming_llm", "during", 0.5, window=REST,
                    store=Store(page=4, positions="read"), choice=Choice(Spec("oldest"), sinks=4)),
        "Keeps the first four tokens and the most recent ones, renumbered",
        "Xiao et al. 2023, arXiv:2309.17453",
    ),
    "snapkv": Entry(
        CacheRecipe("snapkv", "after", 0.5, window=64, store=Store(), choice=Choice(SNAP)),
        "Keeps what the last window of the prompt attends to, and that window",
        "Li et al. 2024, arXiv:2404.14469",
    ),
    "ada_snapkv": Entry(
        CacheRecipe("ada_snapkv", "after", 0.5, window=32, store=Store(page=32),
                    choice=Choice(POOL_SNAP, Spec("pooled"))),
        "Keeps as snapkv, with one budget shared by the heads of a layer",
        "Feng et al. 2024, arXiv:2407.11550",
    ),
    "pyramidkv": Entry(
        CacheRecipe("pyramidkv", "after", 0.5, window=8, store=Store(page=32),
                    choice=Choice(POOL_SNAP, Spec("pyramid"))),
        "Keeps as snapkv, more in low layers and less in high ones",
        "Cai et al. 2024, arXiv:2406.02069",
    ),
    "tova": Entry(
        CacheRecipe("tova", "after", 0.5, window=1, store=Store(),
                    choice=Choice(Spec("last_attention"))),
        "Keeps what the newest token attends to, alike in all heads of a layer",
        "Oren et al. 2024, arXiv:2401.06104",
    ),
    "h2o": Entry(
        CacheRecipe("h2o", "after", 0.5, window=128, store=Store(),
                    choice=Choice(Spec("accumulated"))),
        "Keeps what all queries together attended to most, and a recent window",
        "Zhang et al. 2023, arXiv:2306.14048",
    ),
    "expected_attention": Entry(
        CacheRecipe("expected_attention", "after", 0.5, window=0, store=Store(),
                    choice=Choice(Spec("expected_attention"), sinks=4)),
        "Keeps what queries distributed as the prompt's would attend to",
        "Devoto et al. 2025, arXiv:2510.00636",
    ),
    "ada_expected": Entry(
        CacheRecipe("ada_expected", "after", 0.5, window=0, store=Store(page=32),
                    choice=Choice(Spec("expected_attention", (("epsilon", 0.01),)),
                                  Spec("pooled"), sinks=4)),
        "Keeps as expected_attention, with one budget shared by the heads of a layer",
        "Devoto et al. 2025, arXiv:2510.00636; Feng et al. 2024, arXiv:2407.11550",
    ),
    "keydiff": Entry(
        CacheRecipe("keydiff", "after", 0.5, window=0, store=Store(),
                    choice=Choice(Spec("key_diff"))),
        "Keeps the keys least similar to the mean direction of all keys",
        "Park et al. 2025, arXiv:2504.15364",
    ),
    "chunkkv": Entry(
        CacheRecipe("chunkkv", "after", 0.5, window=32, store=Store(),
                    choice=Choice(SNAP, Spec("chunks"))),
        "Keeps whole runs of tokens that the last window attends to; two layers share a choice",
        "Liu et al. 2025, arXiv:2502.00299",
    ),
    "finch": Entry(
        CacheRecipe("finch", "after", 0.5, window=0, store=Store(positions="rerot"),
                    choice=Choice(Spec("question_attention"))),
        "Keeps what the question attends to, read chunk by chunk together with it, renumbered",
        "Corallo and Papotti 2024, arXiv:2408.00167",
        "the question, while it reads",
    ),
    "kvzip": Entry(
        CacheRecipe("kvzip", "after", 0.5, window=0, store=Store(page=32),
                    choice=Choice(Spec("reconstruction"), Spec("model"), sinks=4)),
        "Keeps what repeating the context needs, with one budget for all layers and heads",
        "Kim et al. 2025, arXiv:2505.23416",
    ),
    "kvzip_runs": Entry(
        CacheRecipe("kvzip_runs", "after", 0.5, window=0, store=Store(page=32),
                    choice=Choice(Spec("reconstruction", (("kernel", 3), ("part", 128))),
                                  Spec("model"), sinks=4)),
        "Keeps as kvzip, with the neighbours of what is needed, repeated in short parts",
        "kvjax; scores of Kim et al. 2025, arXiv:2505.23416",
    ),
    "kvzip_uniform": Entry(
        CacheRecipe("kvzip_uniform", "after", 0.5, window=0, store=Store(),
                    choice=Choice(Spec("reconstruction"), sinks=4)),
        "Keeps what repeating the context needs, as many entries in every head",
        "Kim et al. 2025, arXiv:2505.23416",
    ),
    "kvzap": Entry(
        CacheRecipe("kvzap", "after", 0.5, window=128, store=Store(page=32),
                    choice=Choice(Spec("surrogate"), Spec("model"), sinks=4)),
        "Keeps what a small trained surrogate expects that repeating the context would need",
        "KVzap 2026, arXiv:2601.07891",
        "a surrogate of this model",
    ),
    "kvzip_heads": Entry(
        CacheRecipe("kvzip_heads", "after", 0.6, window=0, store=Store(page=32),
                    choice=Choice(Spec("labels"), Spec("heads"), sinks=4)),
        "Keeps whole heads that repeating a long sample needed; the rest keep the first tokens",
        "Kim et al. 2025, arXiv:2505.23416",
        "labels of its heads",
    ),
    "razor": Entry(
        CacheRecipe("razor", "after", 0.32, window=0, store=Store(page=32),
                    choice=Choice(Spec("labels"), Spec("labelled"), sinks=4), reducer=Spec("mean")),
        "Keeps retrieval heads whole; the rest keep the newest tokens and a mean of what they drop",
        "Tang et al. 2024, arXiv:2407.15891",
        "labels of its heads",
    ),
    "duo": Entry(
        CacheRecipe("duo", "after", 0.5, window=256, store=Store(page=32),
                    choice=Choice(Spec("labels"), Spec("heads"), sinks=64)),
        "Keeps heads with a high learned gate whole; the rest keep the first and the newest tokens",
        "Xiao et al. 2024, arXiv:2410.10819",
        "gates of its heads",
    ),
    "less": Entry(
        CacheRecipe("less", "during", 0.5, window=REST, store=Store(page=4),
                    choice=Choice(Spec("oldest"), sinks=4), fold=Spec("less")),
        "Keeps the first four and the newest tokens, and a learned sum over all that it drops",
        "Dong et al. 2024, arXiv:2402.09398",
        "features of its layers",
    ),
    "metasoft": Entry(
        CacheRecipe("metasoft", "after", 0.5, window=32, store=Store(),
                    choice=Choice(Spec("probe_attention"), sinks=4), reducer=Spec("flow")),
        "Keeps what soft tokens made for the prompt attend to, with the values of the rest in it",
        "Meta-Soft 2026, arXiv:2605.22337 (its abstract); Judge Q 2025, arXiv:2509.10798",
        "probes of this model",
    ),
    "kivi": Entry(
        CacheRecipe("kivi", window=128, store=Store(Spec("kivi"), Spec("kivi"))),
        "Keeps every token, keys in 4 levels per channel and values in 4 per token",
        "Liu et al. 2024, arXiv:2402.02750",
    ),
    "grouped": Entry(
        CacheRecipe("grouped", window=128, store=Store(Spec("grouped"), Spec("grouped"))),
        "Keeps every token, 64 channels at a time in 16 levels",
        "QuantizedLayer of Hugging Face transformers",
    ),
    "dms": Entry(
        CacheRecipe("dms", "during", 0.5, window=256, store=Store(),
                    choice=Choice(Spec("gate"),
                                  Spec("threshold", (("room", "head"), ("tau", 0.0))))),
        "Drops, as tokens leave a recent window, what trained gates have marked, head by head",
        "Lancucki et al. 2025, arXiv:2506.05345",
        "gates of its tokens",
    ),
}  # fmt: skip
