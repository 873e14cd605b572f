"""A figure's page in Markdown: controls first, the picture, every line's numbers, the filters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from eval.common.grids.summary import told_diverged, told_edges, told_rate, told_training
from eval.common.text_table import markdown_table
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import CONTROL, NEGATIVE
from eval.recall.show.filter_plots import verdict

FOUND = 0.9  # accuracy above which a run counts as having found its task
SOLVED = 0.99  # mean accuracy from which a model counts as having solved a task
# What a test may have found beside its accuracy -> the head of its column.
BESIDE = {
    "accuracy_shared": "shared",
    "accuracy_unshared": "unshared",
    "one_token_ceiling": "one token",
    "free_running_accuracy": "generated",
}


def warnings(record: dict[str, Any]) -> list[str]:
    """Warn, before the numbers are compared, of failed controls and of runs that diverged."""
    found = []
    for control in record["controls"]["positive"]:
        if not control["passed"]:
            found.append(
                f"The positive control of {control['row']} failed: {_model(control)} reaches "
                f"{control['accuracy']:.4f} at width {control['d_model']} and length "
                f"{control['seq_len']}, below "
                f"{control['at_least']}. Models that failed there may be under-trained; only those "
                "that succeeded say anything."
            )
    for control in record["controls"]["negative"]:
        if not control["passed"] and math.isfinite(control["accuracy"]):  # else it is told below
            found.append(
                f"The negative control failed at {control['row']}, {control['column']}, length "
                f"{control['seq_len']}: a model that mixes nothing reaches "
                f"{control['accuracy']:.4f}, above {control['at_most']:.4f}. The task gives its "
                "answers away there."
            )
    return [*found, *filter(None, [told_diverged(record["diverged"])])]


def _model(control: dict[str, Any]) -> str:
    layers = control["layers"]
    return f"`{control['mixer']}` with {layers} layer{'s'[: layers - 1]}"


def generated(record: dict[str, Any]) -> bool:
    """Return True if models were also tested with their own answers fed back."""
    return any("free_running_accuracy" in line["also"] for line in record["lines"])


def markdown(record: dict[str, Any]) -> str:
    """The page of a figure from what its JSON holds."""
    name, number = record["figure"], record["number in the paper (AAAI / workshop / arXiv)"]
    lines = [f"# {name}: {record['shows']}", ""]
    lines += [f"> **{warning}**\n" for warning in warnings(record)]
    lines += [
        f"Figure {number} of the paper (AAAI / workshop / arXiv), at {record['scale']} scale."
        + _not_run(record),
        "",
        f"`{record['provenance']['command']}`",
        "",
        told_training(record["trained"]),
        "",
        f"![{record['shows']}]({name}.png)",
        "",
        "## What this shows",
        "",
        f"The paper: {FIGURES[name].claim}",
        "",
        *([FIGURES[name].notes, ""] if FIGURES[name].notes else []),
        "Here, by the mean over seeds at a rate that was chosen apart from them:",
        "",
        *_outcome(record),
        "",
        *_controls(record["controls"]),
        "## Accuracy",
        "",
        *_explanation(record),
        _table(record["lines"], record["axis"]),
        "",
    ]
    if generated(record):
        lines += [f"![{name} with its own answers fed back]({name}-generated.png)", ""]
    if record["fixed_items"]:
        lines += ["## Accuracy with as many keys as in training", ""]
        lines += [f"![{name} with a fixed number of keys]({name}-fixed.png)", ""]
        lines += [_table(record["fixed_items"], record["axis"]), ""]
    if record["differences"]:
        lines += [*_differences(record), ""]
    if record["filters"]:
        lines += [*_filters(record), ""]
    return "\n".join(lines)


def _not_run(record: dict[str, Any]) -> str:
    missing = ", ".join(f"`{name}`" for name in record["not_run"])
    return f" Not run: {missing}." if missing else ""


def _outcome(record: dict[str, Any]) -> list[str]:
    """A point for each panel: which models solve it everywhere, and where the others end."""
    text, lines, axis = [], record["lines"], record["axis"]
    for row, column in _panels(lines):
        means: dict[str, dict[int, float]] = {}
        for x in lines:
            if (x["row"], x["column"]) == (row, column) and x["mixer"] != NEGATIVE:
                means.setdefault(x["mixer"], {})[x["x"]] = x["mean"]
        solved = [mixer for mixer, found in means.items() if min(found.values()) >= SOLVED]
        others = []
        for mixer, found in means.items():
            if mixer not in solved:
                where = min(found, key=found.__getitem__)
                others.append(f"{mixer} {found[where]:.4f} ({axis} {where})")
        said = f"{SOLVED} or more at every {axis}: {', '.join(solved) or 'none'}"
        if others:
            said += f"; least of the others: {', '.join(others)}"
        text.append(f"- {row}, {column}: {said}.")
    return text


def _controls(found: dict[str, Any]) -> list[str]:
    negative = found["negative"]
    passed = sum(control["passed"] for control in negative)
    highest = max(negative, key=lambda control: control["accuracy"] - control["at_most"])
    positive = [
        f"- Positive, {x['row']}: {_model(x)}, trained as all are, at width {x['d_model']} and "
        f"length {x['seq_len']} on `{x['task']}`, reaches {x['accuracy']:.4f} in the mean over "
        f"seeds (least {x['min']:.4f}); {x['at_least']} or more is wanted: {_word(x['passed'])}."
        + " The budget is enough for this model; another that fails may need more."
        * x["passed"]
        for x in found["positive"]
    ]
    return [
        "## Controls",
        "",
        *positive,
        f"- Negative: a model that mixes nothing is at chance in {passed} of {len(negative)} "
        f"places; the highest against its limit is {highest['accuracy']:.4f} at "
        f"{highest['row']}, {highest['column']}, length {highest['seq_len']} (chance "
        f"{highest['chance']:.4f}, limit {highest['at_most']:.4f}): "
        f"{_word(passed == len(negative))}.",
        "",
    ]


def _word(passed: bool) -> str:
    return "passed" if passed else "**failed**"


def _explanation(record: dict[str, Any]) -> list[str]:
    lines = record["lines"]
    text = (
        "Mean, least and largest are over the seeds, on test rows that were looked at once, with "
        "the last model of the training. The rate was chosen by validation rows with seed "
        f"{record['tuning_seed']}, which is not among them. "
    )
    text += told_edges(lines)
    if any("one_token_ceiling" in x["also"] for x in lines):
        text += (
            "`shared` is the accuracy of queries whose last token another key has too, `unshared` "
            "of the others; `one token` is what matching the last token alone scores on these rows."
        )
    return [text.strip(), ""]


def _table(lines: Sequence[dict[str, Any]], axis: str) -> str:
    beside = [name for name in BESIDE if any(name in x["also"] for x in lines)]
    other = "length" if axis == "width" else "width"
    heads = ["task", other, "mixer", axis, "mean", "least", "largest"]
    heads += [*(BESIDE[name] for name in beside), "lr", "runs"]
    rows = []
    for x in lines:
        values = [x["row"], x["column"], f"`{x['mixer']}`", str(x["x"])]
        values += [f"{x[key]:.4f}" for key in ("mean", "min", "max")]
        values += [f"{x['also'][name]:.4f}" if name in x["also"] else "–" for name in beside]
        rows.append([*values, told_rate(x), str(len(x["runs"]))])
    return markdown_table(heads, rows, right=range(3, len(heads)))


def _differences(record: dict[str, Any]) -> list[str]:
    found, axis = record["differences"], record["axis"]
    other = "length" if axis == "width" else "width"
    rows = [
        [
            x["row"],
            x["column"],
            str(x["x"]),
            f"`{x['mixer']}` − `{x['minus']}`",
            f"{x['mean']:+.4f}",
            "" if x["low"] is None else f"{x['low']:+.4f} to {x['high']:+.4f}",
            x["verdict"],
        ]
        for x in found
    ]
    return [
        "## Differences",
        "",
        f"Paired by seed, over {found[0]['n']} seeds; 95% for all {found[0]['comparisons']} "
        "intervals together (Student's t, divided among them). Where 0 is inside, or all seeds "
        "differ by the same, nothing is said. The intervals take runs to scatter about one value: "
        "of a model that finds the task in some runs and not in others they can be too narrow.",
        "",
        markdown_table(
            ["task", other, axis, "accuracy of", "difference", "interval", "the first is"], rows
        ),
    ]


def _filters(record: dict[str, Any]) -> list[str]:
    entries = [(entry, head) for entry in record["filters"] for head in entry["heads"]]
    ruled = any(verdict(head) for _, head in entries)
    rule = "One layer that recalls by single taps has delay(k) = delay(q) + delay(v) + 1. "
    head = (
        "task",
        "width",
        "mixer",
        "length",
        "accuracy",
        "layer",
        "head",
        "q",
        "k",
        "v",
        "single",
    )
    head += ("holds",) if ruled else ()
    rows = []
    for entry, found in entries:
        values = [entry["row"], entry["column"], f"`{entry['mixer']}`", str(entry["seq_len"])]
        values += [f"{entry['accuracy']:.4f}", str(found["layer"]), str(found["head"])]
        values += [str(found["delays"].get(stream, "–")) for stream in "qkv"]
        rows.append([*values, f"{found['single']:.2f}", *([verdict(found)] if ruled else [])])
    return [
        "## Learned filters",
        "",
        "The lag of the largest tap of each head's filters, in the run with the best accuracy "
        f"of each place. {rule if ruled else ''}"
        "`single` is the least share that a largest tap has of the squares of its filter.",
        "",
        f"![Learned filters]({record['figure']}-filters.png)",
        "",
        markdown_table(head, rows, right=range(3, len(head))),
    ]


def _panels(lines: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """(row, column) of all panels but the controls'."""
    found = dict.fromkeys((x["row"], x["column"]) for x in lines)
    return [place for place in found if place[0] != CONTROL]
