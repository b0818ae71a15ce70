"""generate and sampling: stop tokens, seeds, batches, callbacks, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.config import LayerKind, ModelConfig
from kvjax.params import init_params
from kvjax.sampling import sample

CONFIG = ModelConfig("llama", 60, 32, 48, 4, 2, 8, (LayerKind(),), (0, 0), 128)


@pytest.fixture(scope="module")
def model():
    return kvjax.Model(init_params(CONFIG, jax.random.key(0), std=0.3), CONFIG, None)


def ids(seed, t):
    return jax.random.randint(jax.random.key(seed), (t,), 0, 60).tolist()


def greedy(model, prompt, count):
    """The continuation by reading the whole text anew for each token, without any cache."""
    text = list(prompt)
    read = jax.jit(
        lambda x, n: kvjax.look(model.params, CONFIG, None, x, count=n, logits="last")[0]
    )
    for _ in range(count):
        padded = jnp.zeros((1, 64), jnp.int32).at[0, : len(text)].set(jnp.array(text))
        text.append(int(read(padded, jnp.array([len(text)]))[0].argmax()))
    return text[len(prompt) :]


def test_greedy_is_that_of_no_cache_for_prompts_of_unequal_length(model):
    prompts = [ids(1, 9), ids(2, 3), ids(3, 14)]
    made = kvjax.generate(model, prompts, max_new_tokens=20)
    assert made.tokens == [greedy(model, p, 20) for p in prompts]
    assert made.cache.seen.tolist() == [29, 23, 34]  # the prompt and every token made
    assert made.stats["prompt_tokens"] == [9, 3, 14] and made.stats["new_tokens"] == [20] * 3


def test_stop_ends_a_row_and_is_not_given(model):
    prompts = [ids(1, 9), ids(2, 3)]
    full = kvjax.generate(model, prompts, max_new_tokens=20, stop=()).tokens
    end = full[0][6]
    made = kvjax.generate(model, prompts, max_new_tokens=20, stop=[end]).tokens
    assert made[0] == full[0][: full[0].index(end)]
    want = full[1][: full[1].index(end)] if end in full[1] else full[1]
    assert made[1] == want


def test_callback_gives_every_token_in_order(model):
    heard = [[], []]
    made = kvjax.generate(model, [ids(1, 9), ids(2, 3)], max_new_tokens=19,
                          on_token=lambda row, token: heard[row].append(token))  # fmt: skip
    assert heard == made.tokens and len(heard[0]) == 19


def test_a_cache_goes_on_where_it_was(model):
    prompt = ids(1, 9)
    whole = kvjax.generate(model, prompt, max_new_tokens=24).tokens
    _, cache = kvjax.prefill(model, [prompt[:5]], max_length=64)
    first = kvjax.generate(model, prompt[5:], cache=cache, max_new_tokens=10)
    assert first.tokens == whole[:10]
    last = first.cache
    more = greedy(model, prompt + whole[:10] + [7], 6)
    assert kvjax.generate(model, [7], cache=last, max_new_tokens=6).tokens == more


def test_seeds_and_temperature(model):
    def draw(seed):
        options = dict(max_new_tokens=24, temperature=1.5, top_p=0.95)
        return kvjax.generate(model, ids(1, 9), seed=seed, **options).tokens

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """Probabilities .5 .3 .15 .05: top_p .8 needs the first two, .81 the first three."""
    logits = jnp.log(jnp.array([[0.05, 0.5, 0.15, 0.3]]))
    keys = jax.random.split(jax.random.key(0), 2000)
    for top_p, allowed in ((0.79, {1, 3}), (0.81, {1, 2, 3}), (1.0, {0, 1, 2, 3}), (0.01, {1})):
        drawn = jax.vmap(lambda k, p=top_p: sample(logits, k, temperature=1.0, top_p=p)[0])(keys)
        assert set(np.unique(drawn).tolist()) == allowed
    # among {1, 3} the odds stay .5 to .3: a frequency of .625, deviation .011 over 2,000 draws
    drawn = jax.vmap(lambda k: sample(logits, k, temperature=1.0, top_p=0.79)[0])(keys)
    assert abs(float((drawn == 1).mean()) - 0.625) < 0.05
    cold = jax.vmap(lambda k: sample(logits, k, temperature=0.25)[0])(keys)
    # odds to the fourth power: .5^4 against .3^4 + .15^4 + .05^4, .879
    assert abs(float((cold == 1).mean()) - 0.879) < 0.04


def test_compressed_caches_generate_and_stay_within_their_room(model):
    prompt = ids(1, 60)
    for recipe in (kvjax.recipe("snapkv", keep=0.5, window=8), kvjax.recipe("int8", window=4),
                   kvjax.recipe("streaming_llm", keep=0.3)):  # fmt: skip
        made = kvjax.generate(model, prompt, recipe, max_new_tokens=40)
        assert len(made.tokens) == 40 and made.cache.seen.tolist() == [100]
        assert made.stats["peak_bytes"] >= made.stats["cache_bytes"] == kvjax.nbytes(made.cache)


def test_bad_calls_say_both_values(model):
    _, cache = kvjax.prefill(model, [ids(1, 9)], max_length=32)
    small = kvjax.condense(model, cache, kvjax.recipe("key_norm", window=2))
    for call, said in (
        (lambda: kvjax.generate(model, []), "empty"),
        (lambda: kvjax.generate(model, [ids(1, 3), []]), r"\[1\] are empty"),
        (lambda: kvjax.generate(model, ids(1, 9), max_new_tokens=0), "at least 1, got 0"),
        (lambda: kvjax.generate(model, ids(1, 9), temperature=-1.0), "got -1.0"),
        (lambda: kvjax.generate(model, ids(1, 9), top_p=0.0), "0.0"),
        (lambda: kvjax.generate(model, ids(1, 100), max_new_tokens=60), "context of 128"),
        (lambda: kvjax.generate(model, ids(1, 9), cache=cache, max_new_tokens=60), "length is 32"),
        (lambda: kvjax.generate(model, ids(1, 9), kvjax.recipe("int8"), cache=cache), "'int8'"),
        (lambda: kvjax.generate(model, [99]), "vocabulary has 60"),
        (lambda: kvjax.prefill(model, [ids(1, 40)], max_length=20), "40 tokens and max_length is"),
        (lambda: kvjax.prefill(model, [ids(1, 200)], max_length=300), "context of 128"),
        (lambda: kvjax.prefill(model, np.zeros((2, 0), int), max_length=20), "at least one token"),
        (lambda: kvjax.prefill(model, np.ones((2, 3), int), max_length=20, lengths=[3, 0]),
         r"\[3, 0\]"),
        (lambda: kvjax.prefill(model, np.ones((2, 3)), max_length=20), "whole numbers"),
        (lambda: kvjax.prefill(model, np.ones((2, 3), int), max_length=20, mask=np.ones((2, 4))),
         r"\(2, 4\)"),
        (lambda: kvjax.extend(model, np.ones((2, 3), int), cache), "1 rows and tokens have 2"),
        (lambda: kvjax.extend(model, np.ones((1, 30), int), cache), "39 tokens and max_length"),
        (lambda: kvjax.condense(model, cache, kvjax.recipe("snapkv")), "tokens="),
        (lambda: kvjax.condense(model, cache, kvjax.recipe("int8")), "give it to prefill"),
        (lambda: kvjax.truncate(small, 3), "forget"),
        (lambda: kvjax.recipe("snapvk"), "snapkv"),
        (lambda: kvjax.recipe("snapkv", windw=3), "window"),
        (lambda: kvjax.recipe("snapkv", keep=1.5), "1.5"),
        (lambda: kvjax.recipe("snapkv", codec="int9"), "int8"),
        (lambda: kvjax.recipe("int8", keep=0.5), "keeps every token"),
    ):  # fmt: skip
        with pytest.raises(kvjax.InputError, match=said) as error:
            call()
        assert "\n" not in str(error.value)


def test_nan_weights_are_told_before_anything_is_lost(model):
    bad = model.params.replace(embed=model.params.embed.at[3].set(jnp.nan))
    broken = kvjax.Model(bad, CONFIG, None)
    with pytest.raises(kvjax.InputError, match="NaN"):
        kvjax.prefill(broken, [[1, 3, 5]], max_length=20)
