"""Rows that can be scored: columns of the right kind, and an answer that is among the choices.

The harness scores whatever it gets: a label of -1, as the Hub's test splits have it where answers
are hidden, is an answer that no model gives, and one beyond the choices counts as a wrong answer.
Here both are errors, before anything is scored. The tasks of the paper's table are checked by their
columns; for all others, the answers and choices that the definition makes of the rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cat_lm.core.errors import UserError
from cat_lm.core.readers import Record, check_shape, short

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

    from eval.zero_shot.tasks.sources import Source

HIDDEN = "the answer is hidden, as in test splits of the Hub; such rows cannot be scored"
_HIDDEN_VALUES = (-1, "-1", "", None)


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


def _not_hidden(value: Any) -> Any:
    if not isinstance(value, (list, dict)) and value in _HIDDEN_VALUES:
        raise ValueError(HIDDEN)
    return value


def _exact(value: Any) -> Any:
    if isinstance(value, (bool, float)):  # equal to a whole number in Python, but not one in JSON
        raise ValueError("must be a whole number, not another value that equals one")
    return value


def _with_words(text: str) -> str:
    if not re.sub(r"\[.*?\]", "", text).strip():  # the definition leaves brackets out
        raise ValueError("must not be blank")
    return text


def _with_last_word(text: str) -> str:
    if not text.split(" ")[-1].strip():
        raise ValueError("must end with the word that is to be guessed")
    return text


def _with_gap(text: str) -> str:
    if "_" not in text:
        raise ValueError("must have a gap, written as _")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]
Ending = Annotated[str, AfterValidator(_with_words)]
_KNOWN = BeforeValidator(_not_hidden)
_EXACT = BeforeValidator(_exact)


class _Page(Record):
    page: Text


class _Story(Record):
    text: Annotated[str, AfterValidator(_with_last_word)]


class _Solutions(Record):
    goal: str
    sol1: Text
    sol2: Text
    label: Annotated[Literal[0, 1], _KNOWN, _EXACT]


class _Endings(Record):
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: Annotated[list[Ending], Field(min_length=4, max_length=4)]
    label: Annotated[Literal["0", "1", "2", "3", 0, 1, 2, 3], _KNOWN, _EXACT]


class _Gap(Record):
    sentence: Annotated[str, AfterValidator(_with_gap)]
    option1: Text
    option2: Text
    answer: Annotated[Literal["1", "2"], _KNOWN]


class _Choices(Record):
    text: Annotated[list[Text], Field(min_length=2)]
    label: list[str]


class _Question(Record):
    question: str
    choices: _Choices
    answerKey: Annotated[str, _KNOWN]

    @model_validator(mode="after")
    def _check_answer(self) -> _Question:
        labels, texts = self.choices.label, self.choices.text
        if len(labels) != len(texts) or len(set(labels)) < len(labels):
            raise ValueError(f"{len(texts)} choices have the labels {short(labels)}")
        if self.answerKey not in labels:
            raise ValueError(f"answerKey {short(self.answerKey)} is not in {short(labels)}")
        return self


COLUMNS: dict[str, type[Record]] = {
    "wikitext": _Page,
    "lambada_standard": _Story,
    "lambada_openai": _Story,
    "piqa": _Solutions,
    "hellaswag": _Endings,
    "winogrande": _Gap,
    "arc_easy": _Question,
    "arc_challenge": _Question,
}


def check_exact(name: str, row: Mapping[str, Any], place: str) -> None:
    """Check a row as it stands in its file: a table's column would make 1 of 1.0 and of true.

    Raises:
        UserError: the label of a task of the paper's table is another value than a whole number.
    """
    schema = COLUMNS.get(name)
    if schema is not None and "label" in schema.model_fields and "label" in row:
        try:
            _exact(row["label"])
        except ValueError as error:
            label = short(row["label"])
            raise UserError(f"task {name}: {place}: label is {label}: {error}") from None


def check_columns(
    name: str, dataset: Mapping[str, Iterable], splits: Sequence[str], source: Source
) -> None:
    """Check all rows of a task of the paper's table; others have no fixed columns.

    Raises:
        UserError: with the row's place, the column, what it holds and what it should.
    """
    schema = COLUMNS.get(name)
    if schema is None:
        return
    for split in splits:
        for number, row in enumerate(dataset[split]):
            check_shape(row, schema, f"task {name}: {source.place(name, split, number)}")


def check_answers(
    task: ConfigurableTask, source: Source, splits: Sequence[str], limit: int | None
) -> None:
    """Check what the definition makes of the rows that will be scored or shown as examples.

    Args:
        splits: the one that is scored, and the one that examples come from, if there are any.
        limit: rows that will be scored; None for all.

    Raises:
        UserError: with the first row whose answer is not among its choices, or that has none.
    """
    if task.config.task in COLUMNS:
        return  # by `check_columns`, in a fraction of the time that templates take
    scored = itertools.islice(enumerate(task.task_docs), limit)
    _check(task, source, splits[0], scored, task.config.process_docs)
    if task.config.num_fewshot and task.fewshot_cfg.samples is None:
        shown = enumerate(task.fewshot_docs())
        process = task.fewshot_cfg.process_docs
        _check(task, source, splits[-1], shown, process or task.config.process_docs)


def _check(
    task: ConfigurableTask,
    source: Source,
    split: str,
    rows: Iterable[tuple[int, Mapping[str, Any]]],
    processed: Any,
) -> None:
    name = task.config.task
    for number, row in rows:
        problem = row_problem(task, row)
        if not problem:
            continue
        if processed is None:
            place = source.place(name, split, number)
        else:  # what a definition keeps or moves cannot be known
            place = f"{source.describe(name)}, row {number + 1} of those that the definition makes"
        raise UserError(f"task {name}: {place}: {problem}")


def row_problem(task: ConfigurableTask, row: Mapping[str, Any]) -> str | None:
    """Return why a row cannot be scored as the task's definition reads it, else None."""
    try:
        gold = task.doc_to_target(row)
        choices = None if task.config.doc_to_choice is None else task.doc_to_choice(row)
        if choices is not None and isinstance(text := task.doc_to_text(row), int):
            gold = text  # the prompts differ, what follows them is the same
    except Exception as error:  # whatever a definition's templates and functions raise
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        return f"the harness's definition cannot read it ({type(error).__name__}: {reason})"
    if choices is None:
        if gold is None or (task.OUTPUT_TYPE == "loglikelihood" and gold == ""):
            return f"its answer is {short(gold)}; such rows cannot be scored"
        return None
    if task.OUTPUT_TYPE == "multiple_choice":
        if not isinstance(choices, list) or len(choices) < 2:
            return f"has the choices {short(choices)}, must have at least two"
        if "" in choices or not all(isinstance(choice, str) for choice in choices):
            return f"has the choices {short(choices)}, each must be a text that is not empty"
    # A definition with a metric of its own may keep the right answers elsewhere.
    return _gold_problem(gold, choices, own_metric=callable(task.config.process_results))


def _gold_problem(gold: Any, choices: Sequence[Any], own_metric: bool) -> str | None:
    golds = gold if isinstance(gold, list) else [gold]
    if golds and all(_is_answer(one, choices) for one in golds):
        return None
    if own_metric and not any(isinstance(one, int) and one < 0 for one in golds):
        return None
    if not isinstance(gold, list) and gold in _HIDDEN_VALUES:
        return f"answer {short(gold)}: {HIDDEN}"
    return f"answer {short(gold)}: must be one of its {len(choices)} choices, counted from 0"


def _is_answer(gold: Any, choices: Sequence[Any]) -> bool:
    if isinstance(gold, int):
        return 0 <= gold < len(choices)
    return isinstance(gold, str) and gold in choices
