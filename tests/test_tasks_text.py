"""Tasks on real text ask what they say, grades are right by hand, and programs are held in."""

import json
import lzma
import pathlib
import re
from collections import Counter

import pytest

from kvjax.errors import InputError
from kvjax.eval import data, grades
from kvjax.eval.items import made
from kvjax.eval.tasks.cloze import Cloze
from kvjax.eval.tasks.code import Identifier, NextLine
from kvjax.eval.tasks.endings import ending
from kvjax.eval.tasks.files import Asked, LongBench
from kvjax.eval.tasks.humaneval import HumanEval
from kvjax.eval.tasks.language import ManyShot
from kvjax.eval.tasks.losses import Loss
from kvjax.models.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"
SMOLLM2 = Tokenizer.from_gguf(
    json.loads(lzma.decompress((GOLDEN / "smollm2_tokenizer.json.xz").read_bytes()))
)
EXACT = {
    "prose": Loss(length=300, recent=50, scored=20),
    "code": Loss("code", length=300, recent=50, scored=20),
    "cloze": Cloze(length=1024),
    "identifier": Identifier(length=512, recent=128),
    "next_line": NextLine(length=512, recent=128),
    "real": ManyShot(length=500),
    "renamed": ManyShot(length=2000, labels="renamed", classes=4, asks=8),
}
TASK = {
    "task_id": "T/0",
    "prompt": "def two():\n",
    "canonical_solution": "    return 2\n",
    "test": "def check(f):\n    assert f() == 2\n",
    "entry_point": "two",
}


def text(ids):
    return SMOLLM2.decode(ids)


def jsonl(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


@pytest.mark.parametrize("name", EXACT)
def test_lengths_are_exact_and_items_stand_alone(name):
    task = EXACT[name]
    items = made(name, task, SMOLLM2, 4, 0)
    assert [len(item.context) for item in items] == [task.length] * 4
    assert [i.hash for i in made(name, task, SMOLLM2, 2, 0)] == [i.hash for i in items[:2]]
    assert len({item.hash for item in [*items, *made(name, task, SMOLLM2, 2, 1)]}) == 6


@pytest.mark.parametrize("name", EXACT)
def test_bos_is_a_part_of_the_length(name):
    leads = Tokenizer(SMOLLM2.vocabulary, bos=7, add_bos=True)
    context = made(name, EXACT[name], leads, 1, 0)[0].context
    assert context[0] == 7 and len(context) == EXACT[name].length and 7 not in context[1:]


@pytest.mark.parametrize("name", ["cloze", "identifier"])
def test_the_answer_stands_in_the_far_part_only(name):
    task = EXACT[name]
    for item in made(name, task, SMOLLM2, 6, 0):
        (ask,) = item.asks
        answer = text(ask.answer).strip()
        assert re.search(rf"\b{answer}\b", text(item.context[: -task.recent]))
        assert answer not in text(item.context[-task.recent :] + ask.question)
        assert item.recent == task.recent and len(answer) >= 5


def test_the_next_line_is_whole_and_goes_on_where_the_question_ends():
    for item in made("next_line", EXACT["next_line"], SMOLLM2, 6, 0):
        (ask,) = item.asks
        assert text(ask.question).rstrip(" ").endswith("\n")
        assert 10 <= len(text(ask.answer).strip()) <= 60 and "\n" not in text(ask.answer)


def test_loss_goes_on_with_the_text(tmp_path):
    whole = "".join(f"Sentence {i} of a long text. " for i in range(200))
    file = tmp_path / "own.txt"
    file.write_text(whole)
    item = made("own", Loss(str(file), length=64, recent=8, scored=32), SMOLLM2, 1, 0)[0]
    (ask,) = item.asks
    assert (len(ask.question), len(ask.answer), ask.metric) == (1, 32, "loss")
    assert text(item.context + ask.question + ask.answer) in whole
    with pytest.raises(InputError, match=r"own.txt has \d+ tokens and 9257 are needed"):
        made("own", Loss(str(file), length=9000), SMOLLM2, 1, 0)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="own.txt is not UTF-8"):
        made("own", Loss(str(file)), SMOLLM2, 1, 0)


@pytest.mark.parametrize("name", ["real", "renamed"])
def test_examples_are_balanced_and_asked_texts_are_new(name):
    task = EXACT[name]
    known = {row["text"]: row["label"] for row in data.lines("icl_langid")}
    meanings = []
    for item in made(name, task, SMOLLM2, 6, 0):
        shown = re.findall(r"Text: (.*)\nLanguage: (\w+)\n\n", text(item.context))
        shown = [pair for pair in shown if pair[0] in known]  # not the one that is cut
        assert len(shown) == item.info["examples"] and len(set(shown)) == len(shown)
        counts = Counter(label for _, label in shown)
        assert len(counts) == task.classes and max(counts.values()) - min(counts.values()) <= 1
        meaning = {known[example]: label for example, label in shown}
        assert (meaning == {label: label for label in meaning}) == (name == "real")
        meanings.append(tuple(sorted(meaning.items())))
        asked = [text(ask.question)[len("Text: ") : -len("\nLanguage:")] for ask in item.asks]
        assert not set(asked) & {example for example, _ in shown}
        assert [text(ask.answer).strip() for ask in item.asks] == [meaning[known[a]] for a in asked]
        most = Counter(known[a] for a in asked).most_common(1)[0][1]
        assert most == -(-task.asks // task.classes)
    assert len(set(meanings)) == (1 if name == "real" else 6)


def test_many_shot_on_own_labels(tmp_path):
    rows = [{"text": f"case {i}", "label": "good" if i % 2 else "bad"} for i in range(40)]
    file = jsonl(tmp_path / "own.jsonl", *rows)
    item = made("own", ManyShot(file, classes=2, length=100), SMOLLM2, 1, 0)[0]
    assert text(item.asks[0].question).endswith("\nLabel:")
    with pytest.raises(InputError, match="classes=3, and there are 2"):
        made("own", ManyShot(file, classes=3), SMOLLM2, 1, 0)
    with pytest.raises(InputError, match="'bad' has 20 texts, and 18 shots and 5 asks need 21"):
        made("own", ManyShot(file, classes=2, shots=18), SMOLLM2, 1, 0)
    with pytest.raises(InputError, match=r"length=9 .* give at least length=\d\d$"):
        made("own", ManyShot(file, classes=2, length=9), SMOLLM2, 1, 0)


@pytest.mark.parametrize("task", [Cloze(recent=1536), Identifier(recent=0), Loss(length=100)])
def test_recent_must_lie_within_the_length(task):
    with pytest.raises(InputError, match="recent must be|recent below length"):
        made("x", task, SMOLLM2, 1, 0)


def test_endings_are_cut_between_tokens():
    before, after = ending(SMOLLM2, "x = a_long_name", "a_long_name")
    assert (text(before), text(after)) == ("x =", " a_long_name")
    before, after = ending(SMOLLM2, "if x:\n    return 1", "return 1")
    assert (text(before), text(after)) == ("if x:\n   ", " return 1")
    assert ending(SMOLLM2, "international", "national") is None


@pytest.mark.parametrize(
    ("metric", "said", "references", "expected"),
    [
        ("recall", "Blue, then RED.", ["red", "green"], 1 / 2),
        ("any", "Blue, then RED.", ["green", "red"], 1),
        ("any", "Blue", ["green", "red"], 0),
        ("f1", "The cat sat.", ["a cat", "dog"], 2 * 1 / (2 + 1)),  # cat sat; cat
        ("f1", "yes yes", ["yes"], 2 * 1 / (2 + 1)),  # a word counts once for each time it is there
        ("f1", "no", ["yes"], 0),
        ("f1", "", ["yes"], 0),
        ("f1", "大鲸", ["白鲸"], 1 / 2),
        ("f1_line", "\nyes\nno no no", ["yes"], 1),
        ("rouge_l", "one two three four", ["two four six"], 2 * 2 / (4 + 3)),  # two four
        ("rouge_l", "four two", ["two four"], 1 / 2),  # order counts
        ("code_similarity", "# note\nabcd\nxyz", ["abce"], 2 * 3 / (4 + 4)),  # abc of 8 signs
        ("code_similarity", "```", ["abce"], 0),
        ("classification", "number or date\nplace", ["date", "number", "place"], 1 / 2),
        ("classification", "release date", ["release date", "date", "place"], 1),
        ("classification", "place", ["date", "date", "place"], 0),
        ("retrieval", "Paragraph 3, or 4", ["Paragraph 3"], 1 / 2),
        ("retrieval", "none", ["Paragraph 3"], 0),
        ("count", "There are 17", ["17"], 1),
    ],
)
def test_grades_by_hand(metric, said, references, expected):
    assert grades.grade(metric, said, references) == pytest.approx(expected)


def test_metrics_that_hold_no_text_and_unknown_ones():
    assert grades.grade("match", "x", ["x"]) is None
    with pytest.raises(InputError, match="unknown metric 'rouge'; did you mean 'rouge_l'"):
        grades.grade("rouge", "x", ["x"])
    with pytest.raises(InputError, match="metric f1 got no references"):
        grades.grade("f1", "x", [])


RECORD = {"context": "The hall is blue.", "question": "Which colour?", "answer": "blue"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"context": ', "q.jsonl, line 3: expected a JSON object, found bad JSON"),
        ("[1, 2]", r"q.jsonl, line 3: expected a JSON object, found list \[1, 2\]"),
        ({"context": "c", "question": "q"}, "line 3: field 'answer' is missing: expected text"),
        (RECORD | {"question": 7}, "line 3: field 'question': expected text, found int 7"),
        (RECORD | {"context": " "}, "line 3: field 'context': expected text, found str"),
        (RECORD | {"answers": "blue"}, "line 3: field 'answers': expected a list of texts"),
        (RECORD | {"answers": []}, "line 3: field 'answers': expected a list of texts"),
        (RECORD | {"options": ["red"]}, "line 3: field 'options': .* the answer 'blue' among"),
    ],
)
def test_malformed_records_are_told_by_line_and_field(tmp_path, row, says):
    file = jsonl(tmp_path / "q.jsonl", RECORD, "", row, RECORD)
    with pytest.raises(InputError, match=says):
        made("own", Asked(file), SMOLLM2, 9, 0)


def test_own_questions(tmp_path):
    other = {"context": "Ships. " * 50, "question": "Who?", "answers": ["Ahab", "the captain"]}
    choice = RECORD | {"options": ["red", "blue"]}
    file = jsonl(tmp_path / "q.jsonl", RECORD, other, choice)
    first, second = made("own", Asked(file, length=20, metric="f1"), SMOLLM2, 9, 0)
    assert text(first.context) == RECORD["context"] and len(first.asks) == 2
    assert text(first.asks[0].question) == "\n\nQuestion: Which colour?\nAnswer:"
    assert first.asks[0].references == ("blue",) and text(first.asks[0].answer) == " blue"
    assert first.asks[1].metric == "option" and len(first.asks[1].options) == 2
    assert len(second.context) == 20 and second.asks[0].references == ("Ahab", "the captain")
    with pytest.raises(InputError, match="unknown metric"):
        made("own", Asked(file, metric="tests"), SMOLLM2, 1, 0)
    table = tmp_path / "q.csv"
    table.write_text("context,question,answer\n" + "word " * 40_000 + ',"a, b?",007\n')
    (item,) = made("own", Asked(str(table)), SMOLLM2, 9, 0)
    (ask,) = item.asks
    assert text(ask.question + ask.answer).endswith("Answer: 007") and len(item.context) > 40_000
    table.write_bytes(b"context,question,answer\none\x0ctwo,which?,two\n")  # a form feed is text
    (item,) = made("own", Asked(str(table)), SMOLLM2, 9, 0)
    assert text(item.context) == "one\x0ctwo"
    with pytest.raises(InputError, match="there is no file"):
        made("own", Asked("missing.jsonl"), SMOLLM2, 1, 0)
    half = jsonl(tmp_path / "half.jsonl", RECORD, RECORD | {"context": "\ud800"})
    with pytest.raises(InputError, match="line 2: field 'context': expected text, found half a"):
        made("own", Asked(half), SMOLLM2, 1, 0)


def test_own_questions_in_parquet_are_read_through_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"context": f"Room {i} is green.", "question": "Which?", "answer": str(i)}
            for i in range(3)]  # fmt: skip
    file = tmp_path / "own.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    items = made("own", Asked(str(file)), SMOLLM2, 9, 0)
    assert [text(item.context) for item in items] == [row["context"] for row in rows]
    assert [text(item.asks[0].answer).strip() for item in items] == ["0", "1", "2"]


def test_longbench_files(tmp_path):
    row = {"context": "a\nb = 1\nc =", "input": "", "answers": ["two"], "dataset": "lcc_e"}
    classes = {"input": "What?\nType:", "dataset": "trec", "answers": ["x"]}
    classes |= {"context": "Who?\nType: y\n", "all_classes": ["x", "y"]}
    file = jsonl(tmp_path / "lb.jsonl", row, classes)
    code, trec = made("lb", LongBench(file), SMOLLM2, 9, 0)
    assert (text(code.context), text(code.asks[0].question)) == ("a\nb = 1\n", "c =")
    assert code.asks[0].metric == "code_similarity" and code.asks[0].max_new_tokens == 64
    assert trec.asks[0].references == ("x", "x", "y")
    with pytest.raises(InputError, match="unknown data set in bad.jsonl, line 1.*'hotpotqa'"):
        bad = jsonl(tmp_path / "bad.jsonl", row | {"dataset": "hotpot"})
        made("lb", LongBench(bad), SMOLLM2, 1, 0)


def test_humaneval_runs_code_only_when_told(tmp_path):
    others = [TASK | {"task_id": f"T/{i}", "prompt": f"def f{i}():\n"} for i in range(1, 5)]
    file = jsonl(tmp_path / "tasks.jsonl", TASK, *others)
    items = made("h", HumanEval(file, shots=2), SMOLLM2, 9, 0)
    assert len(items) == 5 and {i.asks[0].metric for i in items} == {"loss"}
    item = next(
        i for i in made("h", HumanEval(file, run_code=True), SMOLLM2, 9, 0)
        if i.info["task"] == "T/0"
    )  # fmt: skip
    (ask,) = item.asks
    assert text(item.context + ask.question).count("return 2") == 3  # shots
    assert text(ask.answer) == " return 2"
    assert grades.grade("tests", " return 2\n\ndef more():\n    oops", ask.references) == 1
    assert grades.grade("tests", " return 3", ask.references) == 0
    with pytest.raises(InputError, match="shots=5 of 5 tasks"):
        made("h", HumanEval(file, shots=5), SMOLLM2, 1, 0)
    bad = jsonl(tmp_path / "bad.jsonl", TASK | {"test": None})
    with pytest.raises(InputError, match="bad.jsonl, line 1: field 'test': expected text"):
        made("h", HumanEval(bad), SMOLLM2, 1, 0)


def test_shipped_files_are_checked(monkeypatch):
    assert len(data.lines("moby_cloze")) == 400 and len(data.lines("icl_langid")) == 1930
    with pytest.raises(InputError, match="unknown shipped file 'moby'; did you mean 'moby_cloze'"):
        data.lines("moby")
    monkeypatch.setitem(data.SHA256, "moby_cloze", "0" * 64)
    with pytest.raises(InputError, match="moby_cloze.jsonl.xz is damaged.*install kvjax again"):
        data.lines("moby_cloze")
