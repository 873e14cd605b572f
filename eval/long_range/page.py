"""A figure's page in Markdown: controls first, the picture, numbers beside the paper's, doubts."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from eval.common.grids.places import NEGATIVE
from eval.common.grids.summary import told_diverged, told_edges, told_rate, told_training
from eval.common.text_table import markdown_table
from eval.long_range.catalog import FIGURES

_AROUND = "Labels reach the model by another way than its rows."
# What a negative control that failed means.
_LEAKS = {
    "other rows' labels": _AROUND,
    "other rows' inputs": _AROUND,
    "mixes nothing": "Positions hold their own answers: nothing has to be mixed.",
}


def warnings(record: dict[str, Any]) -> list[str]:
    """Warn, before the numbers are compared, of failed controls and of runs that diverged."""
    found = [_warning(control) for control in record["controls"] if not control["passed"]]
    return [*found, *filter(None, [told_diverged(record["diverged"])])]


def _warning(control: dict[str, Any]) -> str:
    where, value, bound = control["row"], control["value"], control["bound"]
    if control["kind"] == "positive":
        return (
            f"The positive control of {where} failed: `{control['mixer']}` reaches {value:.3f}, "
            f"below {bound:.3f}. Models may be under-trained; their order says nothing."
        )
    return (
        f"The negative control of {where} failed: `{control['mixer']}` ({control['what']}) reaches "
        f"{value:.3f}, above {bound:.3f}. {_LEAKS[control['what']]}"
    )


def markdown(record: dict[str, Any]) -> str:
    """The page of a figure from what its JSON holds."""
    shown = FIGURES[record["figure"]]
    models = "causal models, as the paper's" if record["is_causal"] else "encoders of both sides"
    lines = [f"# {record['figure']}: {record['shows']}", ""]
    lines += [f"> **{warning}**\n" for warning in warnings(record)]
    lines += [
        f"{shown.number} of the LaS paper, at {record['scale']} scale; {models}"
        f"{_protocol(record)}.",
        "",
        f"`{record['provenance']['command']}`",
        "",
        told_training(record["trained"]),
        "",
        f"![{record['shows']}]({record['figure']}.png)",
        "",
        f"The paper: {shown.claim}",
        "",
        f"To know: {shown.doubts}",
        "",
        *_controls(record),
        *_tasks(record),
        "## Numbers",
        "",
        f"{record['metric']} of the test, once, by the model of the best validation. `none` mixes "
        "nothing and takes the mean over positions: a bag of tokens. Steps are those "
        "until validation was at nine tenths of the best line's mean, the mean of the seeds that "
        "were there. The paper's numbers are of its scale, and do "
        "not compare with those of another.",
        "",
        _table(record),
        "",
        *_rates(record),
        *_differences(record),
    ]
    return "\n".join(lines)


def _protocol(record: dict[str, Any]) -> str:
    """Name the protocol where a task heeds it."""
    heeded = any("protocol" in task["task"] for task in record["tasks"].values())
    return f"; protocol={record['protocol']}" if heeded else ""


def _controls(record: dict[str, Any]) -> list[str]:
    rows = [
        (c["row"], c["kind"], c["what"], c["mixer"], f"{c['value']:.4f}", f"{c['bound']:.4f}",
         "yes" if c["passed"] else "**no**")
        for c in record["controls"]
    ]  # fmt: skip
    header = ("task", "control", "of", "model", record["metric"], "at least / at most", "passed")
    return ["## Controls", "", markdown_table(header, rows, (4, 5)), ""] if rows else []


def _tasks(record: dict[str, Any]) -> list[str]:
    lines = ["## Tasks", ""]
    for name, task in record["tasks"].items():
        share = task["most_frequent"]
        guess = "" if share is None else f" Most frequent class of the test: {share:.3f}."
        said = f"{', '.join(task['counted'])}; {task['layers']} layers of width {task['d_model']}."
        if task["level"] is not None:
            said += f" Steps are counted to {task['level']:.3f}."
        lines.append(f"- {name}: {said}{guess} {' '.join(task['notes'])}".rstrip())
    return [*lines, ""]


def _table(record: dict[str, Any]) -> str:
    axis = FIGURES[record["figure"]].axis
    header = ("task", "model", axis, "mean", "least", "largest", "seeds", "steps to 90%", "rate")
    printed = FIGURES[record["figure"]].printed
    rows, seen = [], set()
    for line in record["lines"]:
        paper = printed.get(line["row"], {})
        model = line["mixer"]
        if record["figure"] == "ablation":  # whose numbers are of chunks, and of nothing else
            model, has_chunk, _ = model.partition(":chunk=")
            model = model if has_chunk else ""
        number = paper.get(model)
        seen.add((line["row"], model))
        rows.append(
            (
                *(line["row"], line["mixer"] + (" (control)" if line["mixer"] == NEGATIVE else "")),
                *(str(line["x"]), f"{line['mean']:.4f}", f"{line['min']:.4f}"),
                *(f"{line['max']:.4f}", str(len(line["runs"]))),
                *(_steps(line["steps"]), told_rate(line)),
                "" if number is None else f"{number:.4f}",
            )
        )
    for task, paper in printed.items():
        if task in record["tasks"]:
            rows += [
                (task, f"{model} (the paper alone)", *[""] * 7, f"{number:.4f}")
                for model, number in paper.items()
                if (task, model) not in seen
            ]
    return markdown_table((*header, "the paper"), rows, tuple(range(2, 10)))


def _steps(by_seed: dict[str, int | None]) -> str:
    """The mean of the seeds that came to the level, and how many did where it is not all."""
    there = [steps for steps in by_seed.values() if steps is not None]
    if not there:
        return ""
    of = "" if len(there) == len(by_seed) else f" ({len(there)} of {len(by_seed)})"
    return f"{statistics.fmean(there):.0f}{of}"


def _rates(record: dict[str, Any]) -> list[str]:
    """Return how rates were chosen, where they were."""
    if not any(line["tried"] for line in record["lines"]):
        return []
    chosen = "The rate was chosen by validation rows with a seed that is not among the reported. "
    return [(chosen + told_edges(record["lines"])).strip(), ""]


def _differences(record: dict[str, Any]) -> list[str]:
    if not record["differences"]:
        return [_no_difference(record["lines"]), ""]
    rows = [
        (d["row"], str(d["x"]), f"{d['mixer']} − {d['minus']}", f"{d['mean']:+.4f}",
         "" if d["low"] is None else f"{d['low']:+.4f} … {d['high']:+.4f}", d["verdict"])
        for d in record["differences"]
    ]  # fmt: skip
    header = ("task", "at", "difference", "mean", "interval", "first is")
    return [
        "## Differences",
        "",
        "Of each task's first model from every other, and of the models that the figure is about "
        "from each other, paired by seed; 95% intervals for all of the page's together. With three "
        "seeds they are wide.",
        "",
        markdown_table(header, rows, (1, 3)),
        "",
    ]


def _no_difference(lines: list[dict[str, Any]]) -> str:
    """Return why a page has no differences: there are no two models, or one seed of them."""
    models = [line for line in lines if line["mixer"] != NEGATIVE]
    places = Counter((line["row"], line["column"], line["x"]) for line in models)
    if max(places.values(), default=0) < 2:
        return "No task has two models at one length, beside the control: nothing to compare."
    return "One seed: no difference can be told from chance."
