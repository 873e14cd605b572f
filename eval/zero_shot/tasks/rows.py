"""Refuse rows that cannot be scored: those whose answer is not among the definition's choices.

The harness scores whatever it gets: a label of -1, as the Hub's test splits have it where answers
are hidden, is an answer that no model gives, and one beyond the choices counts as a wrong answer.
Here both are errors, before anything is scored.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.core.readers import short
from eval.zero_shot.tasks.harness import first_line

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

HIDDEN = "the answer is hidden, as in test splits of the Hub; such rows cannot be scored"
_HIDDEN_VALUES = (-1, "-1", "", None)


def check_answers(
    task: ConfigurableTask, source: Any, splits: Sequence[str], limit: int | None
) -> None:
    """Check what the definition makes of the rows that will be scored or shown as examples.

    Args:
        source: the source of the rows, see `eval.zero_shot.tasks.sources`.
        splits: the one that is scored, and the one that examples come from, if there are any.
        limit: rows that will be scored; None for all.

    Raises:
        UserError: with the first row whose answer is not among its choices, or that has none.
    """
    checked = [(splits[0], task.task_docs, limit)]
    if task.config.num_fewshot and task.fewshot_cfg.samples is None:
        checked.append((splits[-1], task.fewshot_docs(), None))
    name = task.config.task
    for split, rows, most in checked:
        for number, row in itertools.islice(enumerate(rows), most):
            if problem := _row_problem(task, row):
                place = source.place(name, split, number)
                if len(rows) != len(task.dataset[split]):  # It is not known which rows are kept.
                    where = source.describe(name)
                    place = f"{where}, row {number + 1} of those that the definition makes"
                raise UserError(f"task {name}: {place}: {problem}")


def _row_problem(task: ConfigurableTask, row: Mapping[str, Any]) -> str | None:
    """Return why a row cannot be scored as the task's definition reads it, else None."""
    try:
        gold = task.doc_to_target(row)
        choices = None if task.config.doc_to_choice is None else task.doc_to_choice(row)
        if choices is not None and isinstance(text := task.doc_to_text(row), int):
            gold = text  # The prompts differ, what follows them is the same.
    except Exception as error:  # A definition's templates and functions may raise anything.
        reason = f"{type(error).__name__}: {first_line(error)}"
        return f"the harness's definition cannot read it ({reason})"
    if choices is None:
        likelihood = task.OUTPUT_TYPE.startswith("loglikelihood")
        if gold is None or (likelihood and _is_blank(gold)):
            return f"its answer is {short(gold)}; such rows cannot be scored"
        return None
    if task.OUTPUT_TYPE == "multiple_choice":
        if not isinstance(choices, list) or len(choices) < 2:
            return f"has the choices {short(choices)}, must have at least two"
        if not all(isinstance(choice, str) for choice in choices) or any(map(_is_blank, choices)):
            return f"has the choices {short(choices)}, each must be a text that is not blank"
    golds = gold if isinstance(gold, list) else [gold]
    if golds and all(_is_answer(one, choices) for one in golds):
        return None
    # A definition with a metric of its own may keep the right answers elsewhere.
    is_hidden = any(isinstance(one, int) and one < 0 for one in golds)
    if callable(task.config.process_results) and not is_hidden:
        return None
    if not isinstance(gold, list) and gold in _HIDDEN_VALUES:
        return f"answer {short(gold)}: {HIDDEN}"
    return f"answer {short(gold)}: must be one of its {len(choices)} choices, counted from 0"


def _is_blank(text: Any) -> bool:
    return isinstance(text, str) and not text.strip()


def _is_answer(gold: Any, choices: Sequence[Any]) -> bool:
    if isinstance(gold, int):
        return 0 <= gold < len(choices)
    return isinstance(gold, str) and gold in choices
