"""The README's example runs as printed, and its promises of length hold."""

import re
from pathlib import Path

import pytest

from kvjax.cache.recipes import RECIPES

README = Path(__file__).parents[1] / "README.md"


def test_readme_is_short():
    """Under 150 lines (style: one minute to read)."""
    assert len(README.read_text("utf-8").splitlines()) < 150


def test_readme_example_runs(capsys):
    """The one Python block, run as it stands: it answers, from a smaller cache."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.S)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    answer, ratio = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "Ambrose" in answer
    assert 0 < float(ratio) < 1


@pytest.mark.parametrize("page", ["README.md", "docs/recipes.md"])
def test_every_recipe_is_named(page):
    """By name, in backquotes; a recipe that is not in the table is in no row."""
    text = (README.parent / page).read_text("utf-8")
    assert [name for name in RECIPES if f"`{name}`" not in text and name != "exact"] == []
