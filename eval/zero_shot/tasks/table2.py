"""The tasks and metrics behind the columns of the paper's Table 2.

The printed columns are in eval/report/paper_table2.json. `acc_norm` (the choice with the largest
log-likelihood per byte) is used where the paper says so, `acc` elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Column of eval/report/paper_table2.json -> (harness task, metric), in the paper's order.
COLUMNS = {
    "wikitext_ppl": ("wikitext", "word_perplexity"),
    "lambada_standard_ppl": ("lambada_standard", "perplexity"),
    "lambada_openai_ppl": ("lambada_openai", "perplexity"),
    "lambada_standard_acc": ("lambada_standard", "acc"),
    "lambada_openai_acc": ("lambada_openai", "acc"),
    "piqa": ("piqa", "acc"),
    "hellaswag": ("hellaswag", "acc_norm"),
    "winogrande": ("winogrande", "acc"),
    "arc_easy": ("arc_easy", "acc"),
    "arc_challenge": ("arc_challenge", "acc_norm"),
}
TASKS = tuple(dict.fromkeys(task for task, _ in COLUMNS.values()))
AVERAGED = tuple(column for column in COLUMNS if not column.endswith("_ppl"))


def columns(
    tasks: Mapping[str, Mapping[str, Any]], kind: str = "metrics"
) -> dict[str, float | None]:
    """Return the values of the table's columns; None if a task was not run.

    Args:
        tasks: name -> {kind: {metric: value}}, as in zero_shot.json.
        kind: metrics, or stderr.
    """
    return {
        column: tasks.get(task, {}).get(kind, {}).get(metric)
        for column, (task, metric) in COLUMNS.items()
    }


def average(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the paper's average: the mean of its seven accuracies; None if one is missing.

    Its standard error takes the seven as independent.
    """
    values = [columns(tasks)[column] for column in AVERAGED]
    errors = [columns(tasks, "stderr")[column] for column in AVERAGED]
    whole = None not in values
    return {
        "value": sum(values) / len(values) if whole else None,
        "stderr": math.hypot(*errors) / len(errors) if whole and None not in errors else None,
        "of": [" ".join(COLUMNS[column]) for column in AVERAGED],
    }
