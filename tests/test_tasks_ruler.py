"""Tasks with long synthetic contexts: exact lengths, and every answer where the item says it is."""

import collections
import json
import lzma
import pathlib
import re

import gguf
import pytest

from kvjax.errors import InputError
from kvjax.eval.items import made
from kvjax.eval.tasks import haystack, needles, questions, words
from kvjax.eval.tasks.key_values import KeyValues
from kvjax.eval.tasks.needles import Needles
from kvjax.eval.tasks.questions import Questions
from kvjax.eval.tasks.turns import Turns
from kvjax.eval.tasks.variables import Variables
from kvjax.eval.tasks.words import CommonWords, FrequentWords
from kvjax.models.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parent / "golden"
METADATA = json.loads(lzma.decompress((GOLDEN / "smollm2_tokenizer.json.xz").read_bytes()))
SMOLLM2 = Tokenizer.from_gguf(METADATA)  # no token in front
SENTENCE = Tokenizer.from_gguf(  # puts bos in front of a text
    {k: f.contents() for k, f in gguf.GGUFReader(GOLDEN / "spm_bpe.gguf").fields.items()}
)
MANY = Needles(keys=5, asks=5)
TASKS = {
    "needle": Needles(),
    "needles": MANY,
    "values": Needles(keys=2, values=3),
    "queries": Needles(keys=4, queries=2, asks=2),
    "variables": Variables(chains=2, hops=3),
    "common": CommonWords(top=4, common_times=9),
    "frequent": FrequentWords(),
    "pairs": KeyValues(),
    "questions": Questions(),
    "turns": Turns(),
}


def of_length(name, length):
    return type(TASKS[name])(**{**vars(TASKS[name]), "length": length})


def spread(shares):
    """How far neighbours of the sorted shares lie apart at most, ends included."""
    ordered = [0.0, *sorted(shares), 1.0]
    return max(b - a for a, b in zip(ordered, ordered[1:], strict=False))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length, seed", [(640, 0), (1021, 7), (3000, 1)])
def test_contexts_have_exactly_the_length(name, length, seed):
    for item in made(name, of_length(name, length), SMOLLM2, 2, seed):
        assert len(item.context) == length


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"questions"}))  # its options share a token
def test_a_text_begins_with_bos_where_the_tokenizer_asks_for_it(name):
    (item,) = made(name, of_length(name, 2000), SENTENCE, 1, 0)
    assert len(item.context) == 2000
    assert item.context[0] == SENTENCE.bos and item.context.count(SENTENCE.bos) == 1
    assert all(SENTENCE.bos not in ask.before + ask.question for ask in item.asks)


@pytest.mark.parametrize("name", TASKS)
def test_items_depend_on_seed_and_index_alone(name):
    three = made(name, TASKS[name], SMOLLM2, 3, 5)
    assert made(name, TASKS[name], SMOLLM2, 1, 5) == three[:1]
    assert len({item.hash for item in three}) == 3
    assert made(name, TASKS[name], SMOLLM2, 1, 6) != three[:1]


@pytest.mark.parametrize("name", ["needle", "needles", "pairs", "turns"])
def test_the_answer_stands_at_the_depth_that_is_told(name):
    for item in made(name, TASKS[name], SMOLLM2, 6, 2):
        read, keys = item.context, set()
        for ask in item.asks:
            read += ask.before
            key, value, depth = (ask.info[k] for k in ("key", "value", "depth"))
            new = ask.info.get("text") == "new"
            ids = next(a.before for a in item.asks if a.before) if new else item.context
            at = round(depth * len(ids))  # within half a thousandth of it
            near = range(max(at - 3, 0), at + 4)
            stated = f" Key {key}: {value}." if name == "pairs" else needles.sentence(key, value)
            assert any(SMOLLM2.decode(ids[i : i + 40]).startswith(stated) for i in near)
            assert SMOLLM2.decode(read).count(value) == 1
            assert SMOLLM2.decode(ask.answer) == f" {value}" and ask.metric == "match"
            asked = SMOLLM2.decode(ask.question)
            assert asked == "\n\n" + stated[1:].removesuffix(f" {value}.")
            keys.add(key)
        assert len(keys) == len(item.asks)


def test_needles_stand_between_sentences():
    for item in made("needles", MANY, SMOLLM2, 4, 3):
        text = SMOLLM2.decode(item.context)
        for match in re.finditer(r" The secret number for the \w+ \w+ is \d{5}\.", text):
            before, after = text[: match.start()], text[match.end() :]
            assert not before or before.endswith(haystack.ENDS)
            assert after[:1].isspace()


def test_depths_without_one_cover_the_text():
    found = [item.asks[0].info["depth"] for item in made("n", Needles(), SMOLLM2, 10, 0)]
    assert spread(found) < 0.2
    for item in made("n", MANY, SMOLLM2, 3, 0):
        assert spread(ask.info["depth"] for ask in item.asks) < 0.4


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_depth_is_kept_to_a_sentence(depth):
    task = Needles(length=2000, keys=3, depth=depth)
    for item in made("needles", task, SMOLLM2, 4, 0):
        assert item.asks[0].info["depth"] == pytest.approx(depth, abs=0.06)


@pytest.mark.parametrize("name, count", [("values", 3), ("queries", 2)])
def test_several_numbers_are_asked_together(name, count):
    for item in made(name, TASKS[name], SMOLLM2, 3, 0):
        text = SMOLLM2.decode(item.context)
        for ask in item.asks:
            assert ask.metric == "recall" and len(set(ask.references)) == count
            assert SMOLLM2.decode(ask.answer) == " " + ", ".join(ask.references)
            assert ask.max_new_tokens >= len(ask.answer)
            stated = re.findall(r"number for the (\w+ \w+) is (\d{5})\.", text)
            keys = ask.info["key"].split(", ")
            assert {v for k, v in stated if k in keys} == set(ask.references)
            assert all(key in SMOLLM2.decode(ask.question) for key in keys)


def test_a_chain_of_variables_is_told_in_order():
    for item in made("variables", TASKS["variables"], SMOLLM2, 5, 0):
        text = SMOLLM2.decode(item.context)
        (ask,) = item.asks
        held = {}  # reads the assignments as a machine would
        for name, other, number in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", text):
            held[name] = number or held[other]
        holders = [name for name, value in held.items() if value == ask.info["value"]]
        assert len(held) == 8 and holders == list(ask.references)
        assert len(holders) == 4


def test_common_words_are_the_most_common():
    for item in made("common", TASKS["common"], SMOLLM2, 3, 1):
        listed = SMOLLM2.decode(item.context).split(words.TITLE)[1]
        found = re.findall(r" (\d+)\. (\w+)", listed)
        assert [int(i) for i, _ in found] == list(range(1, len(found) + 1))
        times = collections.Counter(word for _, word in found)
        (ask,) = item.asks
        assert {w for w, n in times.items() if n == 9} == set(ask.references)
        assert len(ask.references) == 4 and sorted(times.values())[1:-4] == [2] * (len(times) - 5)


def test_no_word_is_a_part_of_another():
    known = words.words()
    assert len(known) > 1000
    assert not any(a in b for a in known[::10] for b in known if a != b)


def test_frequent_words_follow_the_law():
    for item in made("frequent", TASKS["frequent"], SMOLLM2, 3, 1):
        listed = SMOLLM2.decode(item.context).split(words.TITLE)[1].split()
        times = collections.Counter(listed).most_common()
        assert [word for word, _ in times[:3]] == list(item.asks[0].references)
        assert times[2][1] > times[3][1]
        for k, (_, n) in enumerate(times[:4], 1):
            assert n == int(len(listed) * 6 / 9.8696044 / k**2)


@pytest.mark.parametrize("total", [32, 33, 47, 53, 100, 5000])
def test_three_words_are_more_frequent_than_the_rest(total):
    times = words.frequencies(total)
    assert sum(times) == total and times == sorted(times, reverse=True)
    assert times[0] > times[1] > times[2] > times[3]


def test_the_explanation_of_a_question_is_in_the_context():
    asked = set()
    for item in made("questions", Questions(700), SMOLLM2, 12, 0):
        (ask,) = item.asks
        text = SMOLLM2.decode(ask.question)
        shot = next(s for s in questions.shots() if f"Question: {s['question']}\n" in text)
        at = round(ask.info["depth"] * len(item.context))
        near = (SMOLLM2.decode(item.context[i:]) for i in range(max(at - 2, 0), at + 3))
        assert any(part.startswith(f"\n\n{shot['text']}") for part in near)
        assert SMOLLM2.decode(ask.answer) == f" {shot['answer']}"
        assert len(ask.options) == 4 and ask.answer in ask.options
        right = shot["choices"]["ABCD".index(shot["answer"])]
        assert f"\n{shot['answer']}. {right}\n" in text
        asked.add(text)
    assert len(asked) == 12


def test_no_explanation_names_a_letter():
    for shot in questions.shots():
        assert len(set(shot["choices"])) == 4 and shot["answer"] in "ABCD"
        assert shot["text"].strip()
        assert not re.search(r"\([A-D]\)|answer is [A-D(]", shot["text"])


def test_the_second_turn_asks_for_both_texts():
    for item in made("turns", Turns(more=200), SMOLLM2, 3, 0):
        assert [len(ask.before) for ask in item.asks] == [0, 0, 0, 200, 0, 0]
        assert [ask.info["text"] for ask in item.asks] == ["first"] * 3 + ["new", "first", "new"]
        assert [ask.info["turn"] for ask in item.asks] == [1] * 3 + [2] * 3


@pytest.mark.parametrize(
    "name", ["needles", "values", "variables", "common", "frequent", "pairs", "questions", "turns"]
)
def test_a_length_too_small_names_the_least_one(name):
    with pytest.raises(InputError, match=r"length=40 .*give at least length=\d+") as error:
        of_length(name, 40)(SMOLLM2, 1, 0)
    least = int(str(error.value).split("give at least length=")[1].split()[0])
    for item in made(name, of_length(name, least), SMOLLM2, 5, 0):
        assert len(item.context) == least
    with pytest.raises(InputError, match=f"length={least - 1} is too small"):
        of_length(name, least - 1)(SMOLLM2, 1, 0)


@pytest.mark.parametrize(
    "task, said",
    [
        (Needles(keys=2, asks=3), "asks=3 .*keys=2; give keys=3"),
        (Needles(keys=4, asks=2, queries=3), "give keys=6"),
        (Needles(keys=0), "keys=0"),
        (Needles(depth=1.5), "depth=1.5"),
        (Needles(haystack="pros"), "did you mean 'prose'"),
        (Needles(length=10**6), "lower length"),
        (Needles(length=10**6, keys=10**4), "keys=10000 .* at most"),
        (KeyValues(pairs=3, asks=4), "asks=4 .*pairs=3"),
        (KeyValues(length=10**6, pairs=5000), "pairs=5000 .*4500"),
        (Variables(hops=0), "hops=0"),
        (Variables(length=10**6, chains=400), "chains=400 .*1200 assignments"),
        (CommonWords(top=0), "top=0"),
        (CommonWords(common_times=2), "common_times=2"),
        (CommonWords(length=200_000), "length=200000 .*lower it"),
        (Questions(length=100_000), "length=100000 .*at most"),
        (Turns(more=50), "more=50 .*give at least more="),
    ],
)
def test_bad_options_say_what_to_do(task, said):
    with pytest.raises(InputError, match=said):
        task(SMOLLM2, 1, 0)
