"""The page that says how to add a method is true: its scorer, added to the table, is a recipe."""

import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax import scorers
from kvjax.cache import recipes
from kvjax.config import LayerKind, ModelConfig
from kvjax.params import init_params

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture
def listed(monkeypatch, tmp_path):
    """The page's file and its line, as a contributor would add them."""
    code, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    name, cls = re.search(r'"(\w+)": (\w+),', line).groups()
    assert f"from kvjax.scorers.{name} import {cls}" in line
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    method = getattr(__import__(name), cls)
    monkeypatch.setitem(scorers.SCORERS, name, method)
    monkeypatch.setitem(recipes.RECIPES, name, recipes._scored(name))
    yield name
    sys.modules.pop(name)


def test_the_method_of_the_page_keeps_what_it_says(listed):
    """Five values of norm 3, 1, 4, 2, 5 in every layer; three entries kept, the window of one among
    them: the last token, and of the others the norms 4 and 3."""
    config = ModelConfig("llama", 9, 32, 48, 4, 2, 8, (LayerKind(),), (0, 0), 64)
    model = kvjax.Model(init_params(config, jax.random.key(0), std=0.3), config, None)
    _, exact = kvjax.prefill(model, [[1, 2, 3, 4, 5]], max_length=8)
    group = exact.groups[0]
    norms = np.array([3.0, 1.0, 4.0, 2.0, 5.0, 0, 0, 0])
    v = np.zeros(group.tail.v.shape, np.float32)
    v[..., 0] = norms
    exact = exact.replace(groups=(group.replace(tail=group.tail.replace(v=jax.numpy.array(v))),))
    small = kvjax.condense(model, exact, kvjax.recipe(listed, slots=3, window=1))
    pos = np.asarray(small.groups[0].bodies[0].pos)
    assert {tuple(sorted(row[row < 65535])) for row in pos.reshape(-1, pos.shape[-1])} == {(0, 2)}
    assert small.edge.tolist() == [4]


def test_it_composes_and_is_described(listed):
    made = kvjax.recipe(listed, keep=0.25, codec="int8")
    assert made.choice.scorer.name == listed and made.store.k.name == "int8"
    assert recipes.RECIPES[listed].keeps.startswith("Keeps the values")
