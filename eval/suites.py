"""Default suites: tasks with their numbers of items, for models of a size."""

from collections.abc import Iterable

from kvjax.errors import unknown

# SmolLM2-135M: 512 to 2,048 tokens, tasks on which its exact cache is well above chance. Four have
# 150 questions, enough for a claim.
SMOLLM2 = (
    ("niah_multikey@1024", 30),
    ("key_values@512", 30),
    ("langid@1024", 30),
    ("turns@1024", 25),
    ("niah_single@2048", 16),
    ("identifier@1024", 30),
    ("prose_loss@1536", 16),
    ("code_loss@1536", 16),
)
# Qwen2.5-Coder-0.5B: 2,048 to 4,096 tokens; it retrieves, follows variables and writes code.
QWEN = (
    ("niah_multikey@2048", 30),
    ("key_values@2048,pairs=30", 30),
    ("niah_single@4096", 16),
    ("variables@2048", 30),
    ("identifier@2048", 40),
    ("code_loss@3072", 16),
)
QUICK = (
    ("prose_loss@512,scored=31", 4),
    ("niah_multikey@512", 4),
    ("langid@512,classes=4,shots=2", 4),
)

SUITES = {"smollm2": SMOLLM2, "qwen": QWEN, "quick": QUICK}


def of(name: str | None, models: Iterable[str]) -> tuple:
    """The tasks of a suite; without a name the one that suits the first model."""
    if name is None:
        name = "qwen" if any("qwen" in model.lower() for model in models) else "smollm2"
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return SUITES[name]
