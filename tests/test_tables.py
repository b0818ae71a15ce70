"""What recipes need of a model: made by `kvjax train`, found by `load`, and said where missing."""

import dataclasses
import importlib.util

import checkpoints
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PLAIN, model
from evaluating import TASKS

import kvjax
from kvjax import cli, commands, models
from kvjax import eval as evaluation
from kvjax import tables as tabling
from kvjax.cache.recipes import RECIPES
from kvjax.errors import InputError
from kvjax.models.tokenizer import Tokenizer
from kvjax.train import command

BARE = dataclasses.replace(model(), tables={})
NEEDY = [name for name, entry in RECIPES.items() if entry.needs]
LABELS = {"scorer": {"label": jnp.array([[1.0, 0.0], [0.0, 0.0]])}}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache folder of its own: the user's tables are neither read nor written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvjax" / "tables"


@pytest.mark.parametrize("name", NEEDY)
def test_a_recipe_says_what_it_needs(name):
    """With its tables it can be used; without, one sentence names the remedy."""
    recipe = kvjax.recipe(name)
    said = tabling.missing(recipe, {})
    remedy = "kvjax.prefill(question=)" if name == "finch" else f"kvjax train {name}"
    assert said and name in said and RECIPES[name].needs in said and remedy in said
    assert name == "finch" or tabling.missing(recipe, {name: LABELS}) is None


def test_every_trained_recipe_has_its_maker():
    assert set(command.MAKERS) == {*NEEDY} - {"finch"}
    assert tabling.missing(kvjax.recipe("snapkv"), {}) is None


def test_named_recipes_are_refused_and_others_left_out(capsys):
    chosen = [("exact", kvjax.recipe("exact")), ("razor", kvjax.recipe("razor"))]
    assert commands.usable(BARE, chosen) == chosen[:1]
    assert "left out: razor needs labels" in capsys.readouterr().err
    with pytest.raises(InputError, match="razor needs labels of its heads: run `kvjax train razor"):
        commands.usable(BARE, chosen, ["razor"])
    labelled = dataclasses.replace(model(), tables={"razor": LABELS})
    assert commands.usable(labelled, chosen, ["razor"]) == chosen


@pytest.mark.parametrize("aware", [False, True])
def test_an_evaluation_refuses_before_any_work(aware):
    with pytest.raises(InputError, match="razor needs labels"):
        plain = {"plain": TASKS["plain"]}
        evaluation.run(BARE, ["razor@0.5"], plain, items=1, query_aware=aware)


def test_a_made_file_is_found_for_its_model_only(home):
    """Razor's labels of a tiny model, by the command's own function, there and back."""
    path = command.target("razor", "tiny", None, force=False)
    assert path.parent == home / "tiny"
    report = command.run("razor", model(), path, None, 4, None)
    made = tabling.found("elsewhere/tiny", model())["razor"]["scorer"]["label"]
    assert made.shape == (PLAIN.layers, PLAIN.kv_heads) and set(np.unique(made)) == {0.0, 1.0}
    assert report["bytes"] == made.nbytes and report["file"] == str(path)
    with pytest.raises(InputError, match="there already; use --force"):
        command.target("razor", "tiny", None, force=False)
    assert command.target("razor", "tiny", None, force=True) == path
    other = dataclasses.replace(PLAIN, eps=1e-3)
    with pytest.warns(UserWarning, match="razor.tables is left out: .*kvjax train razor --force"):
        assert tabling.found("tiny", dataclasses.replace(model(), config=other)) == {}
    path.write_bytes(path.read_bytes()[:40])
    with pytest.warns(UserWarning, match="is left out"):
        assert tabling.found("tiny", model()) == {}


def test_load_brings_what_was_made(tmp_path, monkeypatch):
    """A checkpoint loaded, labelled and loaded again has its labels; in another dtype a warning."""
    monkeypatch.setattr(Tokenizer, "from_folder", lambda path: None)  # weights are what counts here
    config = models.FAMILIES["llama"].config_from_hf(checkpoints.HF["llama"])
    values = checkpoints.arrays(config)
    folder = tmp_path / "small"
    checkpoints.write_folder(folder, checkpoints.HF["llama"], values, config)
    plain = kvjax.load(folder)
    assert plain.tables == {}
    shape = (plain.config.layers, plain.config.kv_heads)
    path = command.target("kvzip_heads", str(folder), None, force=False)
    tabling.save_tables(path, {"scorer": {"label": jnp.ones(shape)}}, plain)
    assert kvjax.load(folder).tables["kvzip_heads"]["scorer"]["label"].shape == shape
    with pytest.warns(UserWarning, match="left out"):
        assert kvjax.load(folder, dtype="bfloat16").tables == {}


def test_training_without_its_packages_is_one_sentence(monkeypatch, capsys):
    found = importlib.util.find_spec
    lacks = lambda name, *a: None if name == "optax" else found(name, *a)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", lacks)
    assert cli.main(["train", "razor"]) == 2
    assert "training needs optax: pip install 'kvjax[train]'" in capsys.readouterr().err


@pytest.mark.parametrize("words, sentence", [
    (["--steps", "3"], "razor takes --length only"),
    (["--count", "3"], "--count is of kvzap"),
    (["--model", "nowhere"], "nowhere"),
])  # fmt: skip
def test_bad_options_of_train(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(command, "loaded", lambda name: (model(), 0.0) if name != "nowhere"
                        else commands.loaded(name))  # fmt: skip
    assert cli.main(["train", "razor", *words]) == 2
    assert sentence in capsys.readouterr().err
