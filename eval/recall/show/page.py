"""A figure's page in Markdown: controls first, the picture, every line's numbers, the filters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from eval.common.text_table import markdown_table
from eval.recall.grids.catalog import FIGURES
from eval.recall.grids.plan import NEGATIVE
from eval.recall.show.filter_plots import verdict

SOLVED = 0.99  # from which a model counts as having solved a task; Zoology's runs stop there


def warnings(record: dict[str, Any]) -> list[str]:
    """Warn, before the numbers are compared, of each failed control in a sentence."""
    found, positive = [], record["controls"]["positive"]
    if not positive["passed"]:
        found.append(
            f"The positive control failed: two layers of attention reach "
            f"{positive['accuracy']:.3f} with four keys, below {positive['at_least']}. Models that "
            "failed here may be under-trained; only those that succeeded say anything."
        )
    for control in record["controls"]["negative"]:
        if not control["passed"]:
            found.append(
                f"The negative control failed at {control['row']}, {control['column']}, length "
                f"{control['seq_len']}: a model that mixes nothing reaches "
                f"{control['accuracy']:.4f}, above {control['at_most']:.4f}. The task gives its "
                "answers away there."
            )
    return found


def markdown(record: dict[str, Any]) -> str:
    """The page of a figure from what its JSON holds."""
    name, number = record["figure"], record["number in the paper (AAAI / workshop / arXiv)"]
    lines = [f"# {name}: {record['shows']}", ""]
    lines += [f"> **{warning}**\n" for warning in warnings(record)]
    lines += [
        f"Figure {number} of the paper (AAAI / workshop / arXiv), at {record['scale']} scale.",
        "",
        f"`{record['provenance']['command']}`",
        "",
        f"![{record['shows']}]({name}.png)",
        "",
        "## What this shows",
        "",
        f"The paper: {FIGURES[name].claim}",
        "",
        "Here, by the best of all runs, as the paper reports it:",
        "",
        *_outcome(record["lines"]),
        "",
        *_controls(record["controls"]),
        "## Accuracy",
        "",
        *_explanation(record["lines"]),
        _table(record["lines"]),
        "",
    ]
    if record["fixed_items"]:
        lines += ["## Accuracy with as many keys as in training", ""]
        lines += [f"![{name} with a fixed number of keys]({name}-fixed.png)", ""]
        lines += [_table(record["fixed_items"]), ""]
    if record["filters"]:
        lines += [*_filters(record), ""]
    return "\n".join(lines)


def _outcome(lines: Sequence[dict[str, Any]]) -> list[str]:
    """A point for each panel: which models solve it at every length, and where the others end."""
    text = []
    for row, column in _panels(lines):
        best: dict[str, dict[int, float]] = {}
        for x in lines:
            if (x["row"], x["column"]) == (row, column) and x["mixer"] != NEGATIVE:
                best.setdefault(x["mixer"], {})[x["seq_len"]] = x["best_of_all"]
        solved = [mixer for mixer, found in best.items() if min(found.values()) >= SOLVED]
        others = []
        for mixer, found in best.items():
            if mixer not in solved:
                length = min(found, key=found.__getitem__)
                others.append(f"{mixer} {found[length]:.3f} (length {length})")
        said = f"{SOLVED} or more at every length: {', '.join(solved) or 'none'}"
        if others:
            said += f"; least of the others: {', '.join(others)}"
        text.append(f"- {row}, {column}: {said}.")
    return text


def _controls(found: dict[str, Any]) -> list[str]:
    positive, negative = found["positive"], found["negative"]
    passed = sum(control["passed"] for control in negative)
    highest = max(negative, key=lambda control: control["accuracy"] - control["at_most"])
    return [
        "## Controls",
        "",
        f"- Positive: two layers of attention with four keys reach {positive['accuracy']:.4f}; "
        f"{positive['at_least']} or more is wanted: {_word(positive['passed'])}.",
        f"- Negative: a model that mixes nothing is at chance in {passed} of {len(negative)} "
        f"places; the highest against its limit is {highest['accuracy']:.4f} at "
        f"{highest['row']}, {highest['column']}, length {highest['seq_len']} (chance "
        f"{highest['chance']:.4f}, limit {highest['at_most']:.4f}): "
        f"{_word(passed == len(negative))}.",
        "",
    ]


def _word(passed: bool) -> str:
    return "passed" if passed else "**failed**"


def _explanation(lines: Sequence[dict[str, Any]]) -> list[str]:
    edges = sum(x["best_lr_on_grid_edge"] for x in lines)
    text = (
        "Mean, least and largest are over the seeds at the best learning rate, which is the one "
        "with the best mean, for each length by itself. "
    )
    if edges:
        text += (
            f"In {edges} of {len(lines)} rows it is the least or largest of the grid (marked ≤ or "
            "≥): a rate beyond might be better."
        )
    return [text.strip(), ""]


def _table(lines: Iterable[dict[str, Any]]) -> str:
    heads = (
        "task",
        "width",
        "mixer",
        "length",
        "mean",
        "least",
        "largest",
        "best lr",
        "best of all",
        "runs",
    )
    rows = []
    for x in lines:
        values = [x["row"], x["column"], f"`{x['mixer']}`", str(x["seq_len"])]
        values += [f"{x[key]:.4f}" for key in ("mean", "min", "max")]
        values += [_rate(x), f"{x['best_of_all']:.4f}", str(sum(map(len, x["runs"].values())))]
        rows.append(values)
    return markdown_table(heads, rows, right=range(3, len(heads)))


def _rate(line: dict[str, Any]) -> str:
    """The best rate, with the side of the grid on which it lies."""
    if not line["best_lr_on_grid_edge"]:
        return f"{line['best_lr']:g}"
    least = line["best_lr"] == min(map(float, line["runs"]))
    return f"{'≤' if least else '≥'} {line['best_lr']:g}"


def _filters(record: dict[str, Any]) -> list[str]:
    entries = [(entry, head) for entry in record["filters"] for head in entry["heads"]]
    ruled = any(verdict(head) for _, head in entries)
    rule = "Layers that recall by single taps have delay(k) = delay(q) + delay(v) + 1. "
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
        "The lag of the largest tap of each head's filters, in the run with the best last accuracy "
        f"of each place. {rule if ruled else ''}"
        "`single` is the least share that a largest tap has of the squares of its filter.",
        "",
        f"![Learned filters]({record['figure']}-filters.png)",
        "",
        markdown_table(head, rows, right=range(3, len(head))),
    ]


def _panels(lines: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    """(row, column) of all panels but the control's."""
    found = dict.fromkeys((x["row"], x["column"]) for x in lines)
    return [place for place in found if place[0] != "control"]
