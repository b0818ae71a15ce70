"""What `kvjax.eval.run` refuses, before any work: one sentence with the remedy."""

import jax
import jax.numpy as jnp
import pytest
from evaluating import draw, plain, run

import kvjax
from kvjax.errors import InputError
from kvjax.eval import Ask, Item, programs

LONG = [Item(draw(0, 0, 4090), (Ask((1,), tuple(range(1, 9))),))]
BAD = [
    ({"tasks": "nia_single"}, "unknown task 'nia_single'; did you mean 'niah_single'?"),
    ({"tasks": "niah_single@1024,dept=0.5"}, "did you mean 'depth'?"),
    ({"tasks": "niah_single@lots"}, "niah_single: length must be of type int, got 'lots'"),
    ({"tasks": "none.py:mine"}, "there is no file none.py"),
    ({"recipes": ["snapvk@0.5"]}, "unknown recipe 'snapvk'; did you mean 'snapkv'?"),
    ({"recipes": ["kvpress:kvzip@0.5"]}, "give --peer kvpress too"),
    ({"peers": ["kvpres"]}, "unknown peer 'kvpres'; did you mean 'kvpress'?"),
    ({"peers": ["kvpress"], "query_aware": True}, "kvpress compresses without the question here"),
    ({"peers": ["kvpress"]}, "give the model by its name or path"),
    ({"tasks": None, "suite": "smolm2"}, "unknown suite 'smolm2'; did you mean 'smollm2'?"),
    ({"items": 0}, "items must be a whole number above 0, got 0"),
    ({"tasks": {"long": lambda *a: LONG}}, "takes 4107 tokens and the context of model is 4096"),
    ({"tasks": {"none": lambda *a: []}}, "task none made no items"),
    ({"tasks": {"odd": lambda *a: [3]}}, "task odd, item 0: expected kvjax.eval.Item, got int"),
    ({"tasks": {"empty": lambda *a: [Item((1, 2), (Ask((1,), ()),))]}}, "the answer has no tokens"),
    ({"tasks": {"metric": lambda *a: [Item((1,), (Ask((1,), (2,), "mach"),))]}}, "'match'?"),
    ({"tasks": {"text": lambda *a: [Item((1,), (Ask((1,), (2,), "f1"),))]}}, "got 0 and 0"),
    ({"tasks": {"word": lambda *a: [Item((1,), (Ask((99,), (2,)),))]}}, "ids of model go to 60"),
    (
        {"tasks": {"nan": lambda *a: [Item((1,), (Ask((1,), (2,), info={"x": float("nan")}),))]}},
        "info must be plain JSON",
    ),
    ({"tasks": {"ids": lambda *a: [Item("text", ())]}}, "the context must be token ids"),
    ({"tasks": {"boom": lambda *a: 1 / 0}}, "task boom made no items: ZeroDivisionError"),
    ({"tasks": {"nothing": lambda *a: None}}, "task nothing made no items: TypeError"),
    ({"tasks": [plain, plain]}, "two tasks are called 'plain'"),
    ({"tasks": []}, "there is no task to run"),
    ({"recipes": {"exact": "int8"}}, "the exact cache is always there"),
    ({"recipes": [3]}, "a recipe is a word or kvjax.recipe(...), got 3"),
    ({"recipes": ["streaming_llm@0.05"]}, "streaming_llm@0.05 cannot take the 64 tokens of task"),
    ({"peers": ["transformers"]}, "unknown peer 'transformers'"),
    ({"out": "nowhere/x.jsonl"}, "there is no folder nowhere"),
    ({"out": "x.jsonl.xz"}, "results are written as .jsonl"),
]


@pytest.mark.parametrize("options, says", BAD)
def test_bad_input_is_one_sentence_before_any_work(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kvjax, "prefill", None)
    with pytest.raises(InputError) as error:
        run(**options)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


HEAD = '{"kind":"run","format":1,"config":{},"versions":{},"hardware":{}}\n'


@pytest.mark.parametrize("text, says", [
    ("", "expected results of format 1, got an empty file"),
    ('{"kind":"run","format":7}\n', "expected results of format 1, got format 7"),
    (HEAD + '{"no":1}\n', "line 2: expected a JSON object with a field 'kind'"),
    ("some text\nmore\n", "line 1: expected a JSON object"),
    ('{"kind":"run","format":1}\n', "line 1: expected a field 'config' in a line of kind 'run'"),
    (HEAD + '{"kind":"row","model":"m"}\n', "line 2: expected a field 'task' in a line of"),
])  # fmt: skip
def test_files_that_are_no_results_are_refused(text, says, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="x.jsonl") as error:
        run(path)
    assert says in str(error.value)
    assert path.read_text() == text


def test_a_long_run_forgets_programs_in_time(monkeypatch):
    """Many compiled programs are many memory maps, of which a process has so many and no more."""
    if not (before := programs.maps()):
        pytest.skip("this system does not say")
    for i in range(40):
        jax.block_until_ready(jax.jit(lambda x, i=i: jnp.cumsum(x * i) @ x)(jnp.ones(8 + i)))
    many = programs.maps()
    programs.forget()
    assert programs.maps() > before  # far from too many: they stay
    monkeypatch.setattr(programs, "MOST", 0)
    programs.forget()
    assert programs.maps() < many
