"""`kvjax.eval.run` on a small model: paired rows, resumed and repeated, against plain attention."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluating import LENGTH, MODEL, RECIPES, TASKS, draw, plain, run

import kvjax
from kvjax import eval as evaluation
from kvjax.errors import InputError
from kvjax.eval import Ask, Item, check, file, keys, plans
from kvjax.eval.one import room
from kvjax.model import look


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("eval") / "whole.jsonl"
    return run(out), out


def rows(path):
    return [line for line in path.read_text().splitlines() if '"kind":"row"' in line]


def test_exact_rows_equal_attention_without_a_cache(whole):
    for row in whole[0].rows:
        if row["recipe"] != "exact":
            continue
        item = TASKS[row["task"]](None, 3, 0)[row["item"]]
        text = list(item.context)
        for ask, found in zip(item.asks, row["asks"], strict=True):
            text += ask.before
            ids = [*text, *ask.question, *ask.answer]
            logits, _ = look(MODEL.params, MODEL.config, None, jnp.asarray([ids], jnp.int32))
            table = np.asarray(jax.nn.log_softmax(logits[0].astype("float32")))
            at = len(ids) - len(ask.answer) - 1 + np.arange(len(ask.answer))
            assert abs(found["lp"] - table[at, ask.answer].sum()) < 1e-4
            if ask.metric == "match":
                assert found["right"] == (table[at].argmax(-1) == ask.answer).all()
            if ask.metric == "option":
                want = {str(o[0]): table[at[0], o[0]] for o in ask.options}
                assert found["options"] == pytest.approx(want, abs=1e-4)


def test_the_recent_text_alone_is_a_shorter_context(whole):
    row = next(r for r in whole[0].rows if r["recipe"] == "exact" and r["task"] == "plain")
    item = plain(None, 1, 0)[0]
    ids = [*item.context[-16:], *item.asks[0].question, *item.asks[0].answer]
    logits, _ = look(MODEL.params, MODEL.config, None, jnp.asarray([ids], jnp.int32))
    table = np.asarray(jax.nn.log_softmax(logits[0].astype("float32")))
    assert abs(row["asks"][0]["lp_recent"] - table[[18, 19], ids[19:]].sum()) < 1e-4


def test_a_recipe_that_drops_nothing_changes_nothing(whole):
    by = {(r["task"], r["item"], r["recipe"]): r for r in whole[0].rows}
    for (task, i, recipe), row in by.items():
        if recipe == "snapkv@1,window=8":
            for mine, exact in zip(row["asks"], by[task, i, "exact"]["asks"], strict=True):
                assert abs(mine["lp"] - exact["lp"]) < 2e-5
                assert mine["kl"] < 1e-5 and mine["top1"] == 1.0
        if recipe == "streaming_llm@0.5":
            assert row["entries"] == LENGTH / 2  # of the context, not of the room that it has


def test_repeated_runs_give_the_same_rows(whole, tmp_path):
    again = tmp_path / "again.jsonl"
    run(again)
    assert rows(again) == rows(whole[1])
    found = check.compare("whole", whole[0].header, whole[0].lines, evaluation.Results.read(again))
    assert found.same == found.rows == 2 * 3 * 4 and not found.different and found.worst == 0


class Killed(Exception):
    pass


@pytest.mark.parametrize("after, torn", [(3, b""), (11, b'{"kind":"row","mod'), (20, b"\0\0")])
def test_a_run_that_was_killed_resumes_to_the_same_file(whole, tmp_path, after, torn):
    out, seen = tmp_path / "part.jsonl", []

    def tick(what, done, total):
        if len(rows(out) if out.exists() else []) >= after:
            raise Killed

    with pytest.raises(Killed):
        run(out, tick=tick)
    assert after <= len(rows(out)) < len(rows(whole[1]))
    with out.open("ab") as stream:
        stream.write(torn)
    run(out, tick=lambda *a: seen.append(a))
    assert rows(out) == rows(whole[1])
    assert seen[-1][1] == pytest.approx(seen[-1][2])  # all work is counted, whoever did it


def test_rows_of_earlier_files_are_reused_where_they_still_hold(whole, tmp_path):
    out = tmp_path / "new.jsonl"
    found = run(out, reuse=[whole[1]], recipes=[*RECIPES, "key_norm@0.5"])
    fresh = {x["recipe"] for x in found.lines if x["kind"] == "time"}
    assert fresh == {"key_norm@0.5"}  # nothing else was run
    assert [r for r in rows(out) if "key_norm" not in r] == rows(whole[1])


def test_rows_of_another_question_mode_or_model_are_not_reused(whole):
    tasks = {"plain": plain}
    fresh = run(tasks=tasks, recipes=["snapkv@1,window=8"], query_aware=True, reuse=[whole[1]])
    times = {x["recipe"] for x in fresh.lines if x["kind"] == "time"}
    assert times == {"snapkv@1,window=8"}  # the exact rows hold in both modes
    kind = dataclasses.replace(MODEL.config.kinds[0], rope=dataclasses.replace(
        MODEL.config.kinds[0].rope, base=77.0))  # fmt: skip
    other = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, kinds=(kind,)))
    fresh = evaluation.run(other, [], tasks, items=1, reuse=[whole[1]])
    assert [x["kind"] for x in fresh.lines] == ["row", "time"]


def test_budgets_are_of_the_context_whatever_its_length():
    task = {"odd": lambda *a: [Item(draw(0, 0, n), (Ask((1,), (2,)),)) for n in (100, 40)]}
    for row in run(tasks=task, recipes=["streaming_llm@0.5", "key_norm@0.5"]).rows:
        length = (100, 40)[row["item"]]
        assert row["entries"] == (length if row["recipe"] == "exact" else length / 2)


def test_two_runs_do_not_write_one_file(whole):
    with file.opened(whole[1], whole[0].header):
        with pytest.raises(InputError, match="another run is writing"):
            run(whole[1])
    assert run(whole[1]).rows == whole[0].rows


def test_rows_of_other_code_are_made_again(whole, tmp_path):
    out = tmp_path / "old.jsonl"
    lines = [json.loads(line) for line in whole[1].read_text().splitlines()]
    stale = next(x for x in lines if x["kind"] == "row" and x["recipe"] == "int8")
    stale["code"], stale["asks"][0]["lp"] = "0" * 12, -999.0
    out.write_text("".join(map(file.dumps, lines)))
    assert -999.0 not in [a["lp"] for r in run(out).rows for a in r["asks"]]
    assert sorted(rows(out)) == sorted(rows(whole[1]))
    assert len(out.read_text().splitlines()) == 1 + 2 * len(rows(out))  # no times of dropped rows


def test_code_hashes_see_programs_and_not_their_words():
    one = keys.stripped('def f(x):\n    """One."""\n    return x  # why\n')
    assert one == keys.stripped("def f(x):\n    '''Another.'''\n    return (x)\n")
    assert one != keys.stripped('def f(x):\n    """One."""\n    return -x\n')
    codes = {keys.code_of(kvjax.recipe(name)) for name in kvjax.recipes()}
    assert len(codes) == len(kvjax.recipes())


def test_another_configuration_is_not_mixed_in(whole):
    before = whole[1].read_bytes()
    with pytest.raises(
        InputError, match=r"made with seed = 0 and this run has 1; give another --out"
    ):
        run(whole[1], seed=1)
    assert whole[1].read_bytes() == before


FULL = """
import resource, signal, sys
from kvjax.errors import InputError
from kvjax.eval import file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
header, lines, _ = file.parse(sys.argv[1])
try:
    with file.opened(sys.argv[2], header) as log:
        for pair in zip(lines[::2], lines[1::2]):
            log.add(pair)
except InputError as error:
    print(error)
"""


def test_a_full_disk_tears_no_line(whole, tmp_path):
    out = tmp_path / "full.jsonl"
    made = subprocess.run(
        [sys.executable, "-c", FULL, str(whole[1]), str(out)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "its rows so far are whole: make room and give the same command" in made.stdout
    size = out.stat().st_size
    assert size < 9000 and file.parse(out)[2] == size
    assert rows(out) == rows(whole[1])[: len(rows(out))] and rows(out)
    run(out)
    assert rows(out) == rows(whole[1])


def noise(tokenizer, count, seed):
    """What nobody can know: the random model is right by chance only."""
    return [Item(draw(seed, i, LENGTH), (Ask(draw(9, i, 2), (3,), "option", ((3,), (5,))),))
            for i in range(count)]  # fmt: skip


def test_a_task_near_chance_drops_itself(tmp_path):
    found = run(tasks={"noise": noise, "plain": plain}, items=25, recipes=["int8"])
    assert found.dropped[0] == ("model", "noise")
    assert sum(r["task"] == "noise" for r in found.rows) == 2 * 20  # and stops there
    from kvjax.eval import tables

    assert "noise is left out for model: the exact cache is near chance" in tables.notes(found)[0]
    assert "noise" not in tables.matrix(found, "change")[1]


def test_query_aware_condenses_for_each_question():
    tasks = {"plain": plain}
    found = run(tasks=tasks, query_aware=True, recipes=["snapkv@0.5,window=8"])
    assert found.header["config"]["query"] == "aware"
    item = plain(None, 1, 0)[0]
    ids = np.asarray([item.context], np.int32)
    _, exact = kvjax.prefill(MODEL, ids, max_length=room(item), logits="none")
    row = next(r for r in found.rows if r["recipe"] != "exact")
    for ask, mine in zip(item.asks, row["asks"], strict=True):
        question = np.asarray([ask.question], np.int32)
        recipe = kvjax.recipe("snapkv", keep=0.5, window=8)
        cache = kvjax.condense(MODEL, exact, recipe, tokens=ids, question=question)
        both = np.asarray([[*ask.question, *ask.answer]], np.int32)
        logits, _ = kvjax.extend(MODEL, both, cache, logits="all")
        table = np.asarray(jax.nn.log_softmax(logits[0].astype("float32")))
        at = len(ask.question) - 1 + np.arange(len(ask.answer))
        assert abs(mine["lp"] - table[at, ask.answer].sum()) < 1e-4
    with pytest.raises(InputError, match="goes on after its questions"):
        run(tasks=TASKS, query_aware=True)


def test_words_of_recipes_and_tasks():
    made = plans.plan(MODEL, ["snapkv", "snapkv@0.3", "int8", "snapkv+int8"], ["niah_single@2048"],
                      keep=(0.5, 0.25))  # fmt: skip
    assert list(made.recipes) == [
        "exact", "snapkv@0.5", "snapkv@0.25", "snapkv@0.3", "int8",
        "snapkv+int8@0.5", "snapkv+int8@0.25",
    ]  # fmt: skip
    task, count = made.tasks["niah_single@2048"]
    assert dataclasses.asdict(task)["length"] == 2048 and count == plans.ITEMS
    some = plans.plan(MODEL, None, ["niah_single@2048,depth=0.5,items=7", ("cloze@512", 9)]).tasks
    assert {label: n for label, (_, n) in some.items()} == {
        "niah_single@2048,depth=0.5": 7, "cloze@512": 9,
    }  # fmt: skip
    assert made.config()["tasks"]["niah_single@2048"]["items"] == count
    json.dumps(made.config())


def test_a_task_of_the_users_own_is_a_function_in_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from kvjax.eval import Ask, Item\n\n\ndef ones(tokenizer, count, seed):\n"
        "    return [Item((1, 2, 3) * 9, (Ask((1,), (2,)),)) for _ in range(count)]\n"
    )
    found = run(tasks=[f"{path}:ones"], recipes=["int8"], items=2)
    assert len(found.rows) == 4
    with pytest.raises(InputError, match="did you mean 'ones'"):
        run(tasks=[f"{path}:one"])


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file.write(tmp_path / "a.jsonl", "{}\n")
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
    with pytest.raises(InputError, match="cannot write"):
        file.write(tmp_path / "none" / "a.jsonl", "{}\n")
