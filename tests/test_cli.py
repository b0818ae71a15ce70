"""The command line: bad input is one sentence and exit code 2; --json is JSON."""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import kvjax
from kvjax import cli, commands, compare

ROOT = Path(__file__).parents[1]
TEXT = "The lighthouse keeper was called Ambrose Tull. He had never been to Lisbon.\n" * 8


@pytest.fixture
def book(tmp_path):
    """A folder with a good text file and several bad ones."""
    (tmp_path / "good.txt").write_text(TEXT, "utf-8")
    (tmp_path / "latin1.txt").write_bytes(b"plain, then caf\xe9\n")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfabc\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    (tmp_path / "folder").mkdir()
    return tmp_path


# The words of a command, and what its one sentence must contain.
BAD = [
    ("dmeo", "did you mean 'demo'?"),
    ("recipes --jsn", "did you mean '--json'?"),
    ("recipes extra", "'extra'"),
    ("recipes --recipe x", "option of kvjax recipes '--recipe'; there are: --json"),
    ("demo --keep 1.5", "at most 1, got '1.5'"),
    ("demo --keep half", "got 'half'"),
    ("demo --model smollm2-135n", "did you mean 'smollm2-135m'?"),
    ("fetch", "name"),
    ("fetch smollm3", "did you mean 'smollm2-135m'?"),
    ("fetch gemma3-270m", "--unofficial"),
    ("ask", "file"),
    ("ask good.txt", "question"),
    ("ask good.txt ''", "question is empty"),
    ("ask missing.txt Who?", "missing.txt"),
    ("ask folder Who?", "folder"),
    ("ask empty.txt Who?", "empty.txt is empty"),
    ("ask latin1.txt Who?", "byte 15 is 0xe9"),
    ("ask bom.txt Who?", "byte 6 is 0xff"),
    ("ask good.txt Who? --recipe snapvk", "did you mean 'snapkv'?"),
    ("ask good.txt Who? --recipe snapkv --windw 32", "did you mean '--window'?"),
    ("ask good.txt Who? --kep 0.5", "'--kep'; did you mean '--keep'?"),
    ("ask --kep 0.5 good.txt Who?", "'--kep'; did you mean '--keep'?"),
    ("ask good.txt Who? --recipe snapkv --codec int9", "did you mean 'int8'?"),
    ("ask good.txt Who? --keep", "--keep"),
    ("ask good.txt Who? --window", "needs a value"),
    ("ask good.txt Who? more", "'more'"),
    ("ask good.txt Who? --max-new-tokens 0", "above 0"),
    ("ask good.txt Who? --model missing.gguf", "missing.gguf"),
    ("ask good.txt Who? --model broken.gguf", "broken.gguf"),
    ("compare good.txt ' '", "question is empty"),
    ("compare latin1.txt Who?", "byte 15"),
    ("compare good.txt Who? --window 8", "--recipe"),
    ("compare good.txt Who? --all --recipe int8", "leave out"),
    ("compare good.txt Who? --modle x", "did you mean '--model'?"),
    ("compare good.txt Who? --recipe extract", "did you mean 'exact'?"),
    ("bench", "what"),
    ("bench sped", "sped"),
]


@pytest.mark.parametrize("words, sentence", BAD, ids=[words or "(nothing)" for words, _ in BAD])
def test_bad_input_is_one_sentence(words, sentence, book, monkeypatch, capsys):
    """Exit code 2, one line on stderr that says what is wrong, and nothing on stdout."""
    monkeypatch.chdir(book)
    assert cli.main(shlex.split(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kvjax: ") and said.err.count("\n") == 1, said.err
    assert sentence in said.err


def test_the_process_exits_with_2(book):
    """What a shell sees: the exit code, and one line on stderr."""
    file = book / "latin1.txt"
    words = [sys.executable, "-m", "kvjax", "ask", str(file), "Who?"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"kvjax: {file} is not UTF-8 text: byte 15 is 0xe9; convert it to UTF-8"
    ]


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help(command, capsys):
    """Every command explains itself and exits with 0."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert "usage: kvjax" in capsys.readouterr().out


def test_without_a_command_it_says_what_there_is(capsys):
    assert cli.main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("usage: kvjax")
    assert all(command in said.err for command in cli.COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kvjax {kvjax.__version__}\n"


def test_recipe_options_are_read_as_values():
    """Words the parser does not know are the recipe's options, typed by how they read."""
    words = "ask f q --keep 0.5 --bits=4 --codec kivi,int8 --count paper --flag true".split()
    assert cli._parse(words).options == {
        "bits": 4, "codec": ("kivi", "int8"), "count": "paper", "flag": True, "keep": 0.5,
    }  # fmt: skip


def test_recipes_lists_the_table(monkeypatch, capsys):
    """One row for each recipe, in JSON and for people."""
    assert cli.main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["recipes"]
    assert [row["name"] for row in rows] == list(kvjax.recipes())
    assert all(row["kept"] for row in rows)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["recipes"]) == 0
    table = capsys.readouterr().out
    assert "streaming_llm" in table and "arXiv:2309.17453" in table
    assert all(len(line) <= 80 for line in table.splitlines())


def test_tables_fit_80_columns(monkeypatch, capsys):
    """No cell of a table is cut, for a long text too."""
    row = dict(recipe="streaming_llm", tokens=131072, bytes=6_040_000_000, ms_per_token=123.4)
    row |= dict(share_of_exact_bf16=2.0, kl=0.12345, agreement=1.0, answer="yes")
    report = dict(tokens=131072, compared=32, dtype="float32", rows=[row])
    monkeypatch.setenv("COLUMNS", "80")
    compare.show(report, Console())
    said = capsys.readouterr().out
    assert "…" not in said and "6,040.0" in said and "ms/tok" in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_steps_are_lines_where_there_is_no_terminal(capsys):
    """One plain line a step on stderr; none with --json."""
    for as_json in (False, True):
        with commands.steps(argparse.Namespace(json=as_json), 2) as tick:
            tick("exact")
            tick("snapkv")
        lines = capsys.readouterr().err.splitlines()
        assert lines == ([] if as_json else ["kvjax: exact (1 of 2)", "kvjax: snapkv (2 of 2)"])


def test_ask_answers_in_json(book, capsys):
    """The real model, a short text: an answer, and fewer tokens than were read."""
    words = ["ask", str(book / "good.txt"), "Who is the lighthouse keeper?", "--json"]
    words += ["--recipe", "snapkv", "--keep", "0.5", "--max-new-tokens", "12"]
    assert cli.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["answer"].strip()
    assert report["options"] == {"keep": 0.5}
    assert 0 < report["tokens_kept"] < report["prompt_tokens"]


@pytest.mark.full
def test_compare_against_itself_is_zero(book, capsys):
    """The exact cache diverges from itself by rounding only; int8 agrees with it closely."""
    words = ["compare", str(book / "good.txt"), "Who is the lighthouse keeper?", "--json"]
    words += ["--recipe", "int8", "--max-new-tokens", "8"]
    assert cli.main(words) == 0
    rows = {r["recipe"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert abs(rows["exact"]["kl"]) < 1e-6 and rows["exact"]["agreement"] == 1.0
    # 255 levels a number: an error of 0.4% of the largest entry moves probabilities by less than
    # a percent, so the divergence is far below one hundredth.
    assert rows["int8"]["kl"] < 1e-2
    # (64 + 4) / 256 of the float32 cache for codes and scales, and room for the exact tail.
    assert rows["int8"]["bytes"] < 0.6 * rows["exact"]["bytes"]


@pytest.mark.full
def test_demo(capsys):
    """Six recipes beside the exact cache, which is right every time."""
    assert cli.main(["demo", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    exact, *others = report["rows"]
    assert len(others) == 6
    assert all(answer["right"] for answer in exact["answers"])
    assert report["total_s"] < 180  # the issue: under three minutes on two cores
