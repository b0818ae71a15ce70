"""What scorers see, along with the prompt or again; any scorer with any budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LENGTHS, LONGEST, MAX, model, random_ids, small
from holding import entries

import kvjax
from kvjax import api, observing, scorers
from kvjax.cache import init
from kvjax.cache.recipes import RECIPES
from kvjax.config import LayerKind, ModelConfig
from kvjax.errors import InputError
from kvjax.eval import one
from kvjax.params import abstract_params

IDS = random_ids(LONGEST, "evidence")
ARGS = dict(max_length=MAX, lengths=LENGTHS)
LOOKING = [n for n, x in RECIPES.items() if x.recipe.when == "after" and not x.needs
           and scorers.reads(x.recipe.choice)]  # fmt: skip
LOOKING = [n if n in ("h2o", "kvzip") else pytest.param(n, marks=pytest.mark.full) for n in LOOKING]


@pytest.fixture(scope="module")
def exact():
    return kvjax.prefill(model(), IDS, logits="none", **ARGS)[1]


@pytest.mark.parametrize("name", LOOKING)
def test_along_and_again_keep_the_same_and_leave_the_prompt_alone(name, exact):
    """Prompt logits are those of the exact cache, bit for bit; `condense` afterwards keeps what
    `prefill` keeps; and evidence of one recipe serves another budget."""
    recipe, other = small(name, chunk=8), small(name, chunk=8, keep=0.75)
    logits, made = kvjax.prefill(model(), IDS, recipe, logits="all", chunk=8, **ARGS)
    plain = kvjax.prefill(model(), IDS, logits="all", chunk=8, **ARGS)[0]
    assert np.asarray(logits).tobytes() == np.asarray(plain).tobytes()
    again = kvjax.condense(model(), exact, recipe, tokens=IDS)
    assert entries(made) == entries(again) and len({len(x) for x in entries(again)}) > 0
    seen = api.evidence_of(model(), exact, recipe, tokens=IDS)
    shared = kvjax.condense(model(), exact, other, evidence=seen)
    assert entries(shared) == entries(kvjax.condense(model(), exact, other, tokens=IDS))
    assert sum(map(len, entries(shared))) > sum(map(len, entries(again)))


def test_an_evaluation_looks_once_for_all_budgets(monkeypatch):
    ids = IDS[:1, :18]
    cache = kvjax.prefill(model(), ids, max_length=MAX, logits="none")[1]
    asked, seen = [], one.Seen()
    monkeypatch.setattr(
        one, "evidence_of", lambda m, c, recipe, tokens: asked.append(str(recipe.choice.scorer))
    )
    for name, keep in (("kvzip", 0.5), ("kvzip", 0.75), ("kvzip_uniform", 0.5), ("snapkv", 0.5),
                       ("snapkv", 0.75), ("key_norm", 0.5)):  # fmt: skip
        seen.of(model(), cache, ids, small(name, keep=keep))
    assert asked == ["reconstruction", "window_attention"]
    seen.of(model(), cache, ids, small("snapkv", window=3))  # another window looks from elsewhere
    assert len(asked) == 3


@pytest.mark.parametrize("name, options, like", [
    ("snapkv", {"budget": "pooled", "kernel": 7, "pool": "max", "window": 32, "page": 32},
     "ada_snapkv"),
    ("expected_attention", {"budget": "pooled", "epsilon": 0.01, "page": 32}, "ada_expected"),
    ("kvzip", {"budget": "uniform", "page": 128}, "kvzip_uniform"),
    ("keydiff", {"scorer": "key_norm", "window": 32}, "key_norm"),
])  # fmt: skip
def test_any_scorer_with_any_budget(name, options, like):
    """A recipe made of another's scorer and budget is the named one."""
    made, want = kvjax.recipe(name, **options), kvjax.recipe(like)
    assert (made.choice, made.store, made.window) == (want.choice, want.store, want.window)


def test_a_recipe_keeps_the_options_of_its_own_methods():
    assert kvjax.recipe("ada_snapkv", budget="pooled", scorer="window_attention") == kvjax.recipe(
        "ada_snapkv"
    )


@pytest.mark.parametrize("options, sentence", [
    ({"budget": "pool"}, "pooled"),
    ({"scorer": "key_nrom"}, "key_norm"),
    ({"budget": 3}, "budget must be a name, got 3"),
    ({"budget": "uniform", "alpha": 0.5}, "alpha"),
])  # fmt: skip
def test_unknown_methods_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        kvjax.recipe("ada_snapkv", **options)


@pytest.mark.parametrize("name", ["h2o", "kvzip"])
def test_without_tokens_one_sentence(name, exact):
    with pytest.raises(InputError, match=f"{name} looks at the prompt again: pass tokens="):
        kvjax.condense(model(), exact, kvjax.recipe(name))


def test_scoring_needs_little_more_than_a_prefill():
    """Temporaries of a KVzip pass over 2,048 tokens of SmolLM2 (chunk and input whole), by XLA's
    own count: at most 1.2 times those of a prefill of as many tokens in chunks of 512. The scores
    of all heads for input and chunk would be 153 MB alone; they are never there."""
    config = ModelConfig(
        "llama", vocab=49152, width=576, mlp=1536, heads=9, kv_heads=3, head_dim=64,
        kinds=(LayerKind(),), pattern=(0,) * 30, context=8192,
    )  # fmt: skip
    length, recipe = 2048, kvjax.recipe("kvzip")
    params = abstract_params(config)
    cache = init.abstract_cache(config, kvjax.recipe("exact"), 1, length)
    ids = lambda t: jax.ShapeDtypeStruct((1, t), jnp.int32)  # noqa: E731
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    need = lambda made: made.compile().memory_analysis().temp_size_in_bytes  # noqa: E731
    prefill = need(api._read.lower(params, config, cache, ids(recipe.chunk), count, "last"))
    watch = observing.watcher(recipe).replace(first=jnp.int32(0), size=length, sinks=4)
    asked = ids(length + 30)  # the request and the turn to the assistant
    scoring = need(observing._observe.lower(params, config, cache, asked, count, watch, None))
    assert scoring <= 1.2 * prefill, (scoring, prefill)
