"""Questions in files of the user's own."""

from dataclasses import dataclass
from typing import Any

from kvjax.errors import InputError, unknown
from kvjax.eval.grades import METRICS
from kvjax.eval.items import Ask, Item
from kvjax.eval.tasks import records
from kvjax.eval.tasks.endings import ending, middle_cut

FEW = "\n\nAnswer with a few words.\nQuestion: {}\nAnswer:"
SUMMARY = "\n\nWrite a summary of the text above. {}\nSummary:"
RETRIEVAL = "\n\nWhich paragraph is this a summary of?\n{}\nAnswer:"
COUNT = "\n\nHow many of the paragraphs above are different? {}\nAnswer:"
GOES_ON = "\n{}"  # the context ends with examples, or with code: the input goes on in their form
DATASETS = {  # metric, tokens that are generated, and how the question is put
    **dict.fromkeys(("narrativeqa", "qasper"), ("f1", 128, FEW)),
    **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh"), ("f1", 64, FEW)),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), ("f1", 32, FEW)),
    "dureader": ("rouge_l", 128, FEW),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), ("rouge_l", 512, SUMMARY)),
    **dict.fromkeys(("trec", "lsht"), ("classification", 64, GOES_ON)),
    "triviaqa": ("f1_line", 32, GOES_ON),
    "samsum": ("rouge_l_line", 128, GOES_ON),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), ("retrieval", 32, RETRIEVAL)),
    "passage_count": ("count", 32, COUNT),
    **dict.fromkeys(("lcc", "repobench-p"), ("code_similarity", 64, "{}")),
}


@dataclass(frozen=True)
class Asked:
    """Asks the questions in a file: context, question, answer (or answers), maybe options.

    path: a jsonl, csv or parquet file, or a data set of the hub. Questions about one context make
    one item; items are in the order of the file, whatever the seed. Those with options take the
    likeliest; the others use `metric`. Contexts longer than `length` lose their middle.
    Source: the file.
    """

    path: str
    length: int | None = None
    metric: str = "match"
    max_new_tokens: int = 64  # for metrics of text
    form: str = "\n\nQuestion: {question}\nAnswer:"
    split: str = "test"  # of a data set of the hub

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        metrics = METRICS.keys() - {"tests", "option", "classification"}
        if self.metric not in metrics:
            raise unknown("metric for a file of questions", self.metric, metrics)
        _check_length(self.length)
        asked = {}
        rows = records.all_of(records.read(self.path, self.split), _question)
        for where, (context, *question) in rows:
            if context in asked or len(asked) < count:
                asked.setdefault(context, []).append(self._ask(tokenizer, where, *question))
        return [
            Item(middle_cut(tokenizer, context, self.length), tuple(asks))
            for context, asks in asked.items()
        ]

    def _ask(self, tokenizer, where, question, answers, options):
        text = self.form.replace("{question}", question)
        ids, answer = _split(tokenizer, where, text, answers[0])
        if not options:
            generated = METRICS[self.metric] is not None
            references, new = (tuple(answers), self.max_new_tokens) if generated else ((), 0)
            return Ask(ids, answer, self.metric, (), references, new)
        splits = [_split(tokenizer, where, text, option) for option in options]
        found = tuple(option for _, option in splits)
        first = {option[0] for option in found}
        alike = all(before == ids for before, _ in splits)
        if not alike or answer not in found or len(first) < max(2, len(options)):
            raise InputError(
                f"{where}: field 'options': expected two or more that begin with different tokens, "
                f"the answer {answers[0]!r} among them, found {options}"
            )
        return Ask(ids, answer, "option", found)


def _question(where, row):
    """(context, question, answers, options) of a record, checked."""
    context, question = (records.get(where, row, name, str) for name in ("context", "question"))
    if "answers" in row:
        answers = records.get(where, row, "answers", list)
    else:
        answers = [records.get(where, row, "answer", str)]
    options = records.get(where, row, "options", list) if row.get("options") is not None else []
    return context, question, answers, options


@dataclass(frozen=True)
class LongBench:
    """Asks the questions of a file in the form of LongBench, each graded as its data set is.

    The model writes its answer. The words around a question are ours and Chinese is compared by
    characters, so figures are near the published ones and not the same. Contexts longer than
    `length` lose their middle. Items are in the order of the file, whatever the seed.
    Source: Bai et al. 2023 (arXiv:2308.14508), section 3.
    """

    path: str
    length: int | None = None

    def __call__(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        _check_length(self.length)
        rows = records.all_of(records.jsonl(self.path), _longbench)
        return [self._item(tokenizer, where, *row) for where, row in rows[:count]]

    def _item(self, tokenizer, where, name, context, text, answers, classes):
        metric, new, form = DATASETS[name]
        question = form.format(text)
        if not question:  # code to be continued: its last line is the question
            at = context.rstrip().rfind("\n") + 1
            context, question = context[:at] or "\n", context[at:]
        ids, answer = _split(tokenizer, where, question, answers[0])
        references = (answers[0], *classes) if metric == "classification" else tuple(answers)
        ask = Ask(ids, answer, metric, (), references, new, info={"dataset": name})
        return Item(middle_cut(tokenizer, context, self.length), (ask,))


def _longbench(where, row):
    """(data set, context, input, answers, classes) of a record, checked."""
    name = records.get(where, row, "dataset", str).removesuffix("_e")
    if name not in DATASETS:
        raise unknown(f"data set in {where}, field 'dataset'", name, DATASETS)
    context = records.get(where, row, "context", str)
    text = records.get(where, row, "input", str, empty=True)
    answers = records.get(where, row, "answers", list)
    classes = []
    if DATASETS[name][0] == "classification":
        classes = records.get(where, row, "all_classes", list)
    return name, context, text, answers, classes


def _check_length(length):
    if length is not None and length < 2:
        raise InputError(f"length={length}: a context cut in the middle has at least 2 tokens")


def _split(tokenizer, where, question, answer):
    """Ids of a question, and of its answer as it follows there."""
    space = "" if question[-1:].isspace() else " "
    found = ending(tokenizer, question + space + answer.strip(), answer.strip())
    if found is None or not found[0]:
        raise InputError(f"{where}: no token begins with the answer {answer[:60]!r}; change it")
    return found
