"""The README's example runs as printed, and its promises of length hold."""

import re
from pathlib import Path

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
