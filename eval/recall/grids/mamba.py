"""How fast Mamba learns to recall: dropout of its embeddings, its start, and the learning rate.

Mamba stays on a plateau and then finds the task within few steps, at a time that differs between
seeds. So what is told and compared is when, in how many runs, and not the accuracy at the end,
which nearly all reach. Every rate and seed is shown. For the differences that dropout and the start
make, a rate is chosen for each of the four, as in the figures, but the one that finds the task
first: on validation rows, with a seed that is not reported, and one rate beyond where the best lies
on the grid's edge. Two controls have the same task and budget: two layers of attention, which must
find it, and no mixing, which must not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from cat_lm.core.files import finite, write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from eval.common.comparison import compare
from eval.common.grids import cells
from eval.common.grids.execution import Execution, alone_in, run_unfinished
from eval.common.grids.places import NEGATIVE
from eval.common.grids.summary import (
    diverged,
    told_diverged,
    told_edges,
    told_rate,
    told_training,
    training,
)
from eval.common.grids.tuning import TUNING_SEED, Choice, all_records, foreseen, run_tuned
from eval.common.provenance import provenance
from eval.common.style import RUN_COLOURS, STYLE, save_figure
from eval.common.text_table import markdown_table
from eval.recall.grids.plan import Place, Run
from eval.recall.show.page import FOUND
from eval.recall.train.cell import Cell

DROPOUTS = (0.0, 0.1)  # of the embeddings: Zoology's MambaBlock, and its TransformerBlock
STARTS = ("own", "zoology")
POSITIVE = "attention"
_DASHES = {0.0: "-", 0.1: (0, (3, 2))}


@dataclass(frozen=True)
class PlateauCell(Cell):
    """A cell whose rate is chosen by when it finds the task."""

    def score(self, record: dict[str, Any]) -> float:
        """Return −log2 of the steps; without them, below all that have some, the accuracy."""
        step = found_at(record)
        return super().score(record) - 100 if step is None else -math.log2(step)


def found_at(record: dict[str, Any]) -> int | None:
    """Return the step at which validation rows were first seen above FOUND, if they ever were."""
    return next((p["step"] for p in record["history"] if p["accuracy"] > FOUND), None)


@dataclass(frozen=True)
class Scale:
    """Fix how large the grid is.

    Attributes:
        eval_steps: steps between two looks at the accuracy.
    """

    d_model: int
    vocab_size: int
    lengths: tuple[int, ...]
    examples: int
    epochs: int
    batch_size: int
    rates: tuple[float, ...]
    seeds: int
    eval_steps: int


SCALES = {
    "smoke": Scale(16, 64, (8,), 128, 2, 32, (3e-3, 1e-2), 1, 4),
    "cpu": Scale(64, 128, (16,), 16_000, 48, 64, (1e-3, 3e-3, 1e-2, 3e-2), 3, 125),
    "paper": Scale(64, 8192, (64, 128), 100_000, 64, 512, (1e-4, 1e-3, 1e-2, 1e-1), 3, 195),
}


def plan(
    scale: Scale, seeds: int | None = None, rates: Sequence[float] | None = None
) -> list[Place]:
    """All places whose rate is chosen: a row a length, a line a dropout and a start."""
    return [
        Place(
            Run(
                f"L = {length}",
                "",
                f"dropout {dropout:g}, start {start}",
                _cell_of(scale, length, f"mamba:init={start}", embedding_dropout=dropout),
            ),
            tuple(rates or scale.rates),
            seeds or scale.seeds,
        )
        for length in scale.lengths
        for dropout in DROPOUTS
        for start in STARTS
    ]


def controls(scale: Scale) -> list[Run]:
    """The controls of each length, at one seed and a rate from the middle of the scale's."""
    rate = scale.rates[len(scale.rates) // 2]
    return [
        Run(f"L = {length}", "", mixer, _cell_of(scale, length, mixer, lr=rate))
        for length in scale.lengths
        for mixer in (POSITIVE, NEGATIVE)
    ]


def _cell_of(scale: Scale, length: int, mixer: str, **how: float) -> PlateauCell:
    return PlateauCell(
        f"mqar:vocab_size={scale.vocab_size}",
        mixer,
        scale.d_model,
        length,
        epochs=scale.epochs,
        train_examples=scale.examples,
        batch_size=scale.batch_size,
        eval_steps=scale.eval_steps,
        **how,
    )


def every_run(places: Sequence[Place]) -> list[Run]:
    """Return each place's runs at every rate and seed, in a column for each rate."""
    return [
        replace(place.at(rate, seed), column=f"{rate:g}")
        for place in places
        for rate in place.rates
        for seed in range(place.seeds)
    ]


def study(
    scale_name: str,
    out: Path,
    execution: Execution,
    seeds: int | None = None,
    rates: Sequence[float] | None = None,
) -> dict[str, Any] | None:
    """Estimates, runs what is not finished, and writes mamba.json, mamba.md and a picture.

    Args:
        seeds, rates: runs at each place, and learning rates; none: the scale's.

    Returns:
        What mamba.json got, or none after an estimate alone.
    """
    scale, title = SCALES[scale_name], f"mamba at {scale_name} scale"
    places, checks = plan(scale, seeds, rates), controls(scale)
    runs = [*checks, *every_run(places)]
    with alone_in(out, execution):
        if not execution.estimate_only:
            claim_outputs(out, "mamba.json", named("mamba", ".md", *PICTURES))
        if not run_unfinished(title, runs, out, execution, later=foreseen(places, out)):
            return None
        tuned = run_tuned(f"{title}, a rate for each", places, out, execution) or []
    every = {run.cell: run for run in (*every_run(places), *(run for run, *_ in tuned))}
    found = [(run, cells.finished(out, run.cell)) for run in every.values()]
    controlled = [(run, cells.finished(out, run.cell)) for run in checks]
    trained = [*(record for _, record in (*controlled, *found)), *all_records(places, out)]
    record = {
        "scale": scale_name,
        "tuning_seed": TUNING_SEED,
        "controls": [_control(run, record) for run, record in controlled],
        "trained": training(trained),
        "diverged": diverged((run, record["accuracy"]) for run, record in (*controlled, *found)),
        "lines": summary(found),
        **compared(tuned),
        "provenance": provenance(),
    }
    page = markdown(record)
    write_json(out / "mamba.json", finite(record))  # a rate may diverge
    write_text(out / "mamba.md", page)
    save_figure(draw(record["lines"]), out / "mamba")
    print(page)
    return record


def summary(rows: Sequence[tuple[Run, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return each run's accuracy, the steps it took, its curve, and when it left the plateau."""
    lines = []
    for run, record in rows:
        curve = [(point["step"], point["accuracy"]) for point in record["history"]]
        lines.append(
            {
                "row": run.row,
                "rate": run.cell.lr,
                "dropout": run.cell.embedding_dropout,
                "start": record["mixer"]["options"]["init"],
                "seed": run.cell.seed,
                "accuracy": record["accuracy"],
                "steps": record["steps"],
                "found_at_step": found_at(record),
                "curve": curve,
            }
        )
    return lines


def compared(tuned: Sequence[tuple[Run, dict[str, Any], Choice]]) -> dict[str, Any]:
    """Compare dropout with none and the starts, each at its chosen rate, paired by seed.

    The value is log2 of the steps to the task; intervals are corrected for all comparisons, and
    there is none where a run never found it.

    Returns:
        `chosen`: each line's rate, steps and how the rate was chosen; `differences`: for each
        length of dropout at either start, and of the start at either dropout.
    """
    values: dict[tuple[str, float, str], dict[int, float]] = {}
    choices: dict[tuple[str, float, str], Choice] = {}
    for run, record, choice in tuned:
        line = (run.row, run.cell.embedding_dropout, record["mixer"]["options"]["init"])
        step = found_at(record)
        values.setdefault(line, {})[run.cell.seed] = math.inf if step is None else math.log2(step)
        choices[line] = choice
    (none, some), (own, zoology) = DROPOUTS, STARTS
    pairs = [((row, some, start), (row, none, start)) for row in _rows(values) for start in STARTS]
    pairs += [((row, d, zoology), (row, d, own)) for row in _rows(values) for d in DROPOUTS]
    found = [(pair, compare(*(values[line] for line in pair), len(pairs))) for pair in pairs]
    return {
        "chosen": [_chosen(*line, values[line], choices[line]) for line in values],
        "differences": [
            {"row": one[0], "of": _name(one), "less": _name(other), **asdict(difference)}
            for (one, other), difference in found
            if difference is not None
        ],
    }


def _rows(lines: Iterable[tuple[str, float, str]]) -> list[str]:
    return list(dict.fromkeys(row for row, *_ in lines))


def _name(line: tuple[str, float, str]) -> str:
    return f"dropout {line[1]:g}, start {line[2]}"


def _chosen(
    row: str, dropout: float, start: str, values: dict[int, float], choice: Choice
) -> dict[str, Any]:
    return {
        "row": row,
        "dropout": dropout,
        "start": start,
        "lr": choice.rate,
        "lr_on_edge": choice.on_edge,
        "tried": {f"{rate:g}": score for rate, score in sorted(choice.tried.items())},
        "found_at_step": {
            str(seed): round(2**value) if math.isfinite(value) else None
            for seed, value in values.items()
        },
    }


def _control(run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """Return the words for a control: whether it did as it must."""
    step = found_at(record)
    return {
        "row": run.row,
        "mixer": run.line,
        "rate": run.cell.lr,
        "found_at_step": step,
        "accuracy": record["accuracy"],
        "passed": (step is None) == (run.line == NEGATIVE) and math.isfinite(record["accuracy"]),
    }


def markdown(record: dict[str, Any]) -> str:
    """The page from what mamba.json holds: what was run, and `tables`."""
    head = [
        f"# mamba, at {record['scale']} scale",
        f"`{record['provenance']['command']}`",
        told_training(record["trained"]),
        *filter(None, [told_diverged(record["diverged"])]),
        tables(record),
    ]
    return "\n\n".join(head)


def tables(record: dict[str, Any]) -> str:
    """The controls, how many runs found the task and when, the chosen rates, the differences."""
    parts = (_controls(record), _found(record["lines"]), _chosen_rates(record))
    return "\n".join(line for part in (*parts, _differences(record)) for line in part)


def _controls(record: dict[str, Any]) -> list[str]:
    """Return first which controls did not do as they must."""
    told = [
        f"{x['row']}, {x['mixer']}: {_when(x['found_at_step'])} (accuracy {x['accuracy']:.3f}), "
        f"{'as it must' if x['passed'] else 'and must not: nothing here is to be believed'}"
        for x in sorted(record["controls"], key=lambda x: x["passed"])
    ]
    return [f"Controls, one run each. {'; '.join(told)}.", ""]


def _when(step: int | None) -> str:
    return "never found" if step is None else f"found at step {step}"


def _found(lines: Sequence[dict[str, Any]]) -> list[str]:
    """For each length: how many runs found the task and when, by dropout, start and rate."""
    text = []
    for row in dict.fromkeys(line["row"] for line in lines):
        of_row = [line for line in lines if line["row"] == row]
        rates = sorted({line["rate"] for line in of_row})
        table = []
        for dropout, start in dict.fromkeys((x["dropout"], x["start"]) for x in of_row):
            of_line = [x for x in of_row if (x["dropout"], x["start"]) == (dropout, start)]
            shown = (_cell([x for x in of_line if x["rate"] == rate]) for rate in rates)
            table.append([f"{dropout:g}", start, *shown])
        text += [
            f"{row}: runs with an accuracy above {FOUND:g}, the median step at which they first "
            "had it (least to largest), and the tested models' accuracy (least to largest)",
            "",
            markdown_table(["dropout", "start", *(f"rate {rate:g}" for rate in rates)], table),
            "",
        ]
    return text


def _chosen_rates(record: dict[str, Any]) -> list[str]:
    """Each line's rate, marked where it lies on the edge, and when its runs found the task."""
    chosen = record["chosen"]
    rows = [
        [x["row"], f"{x['dropout']:g}", x["start"], told_rate(x), _steps(x["found_at_step"])]
        for x in chosen
    ]
    how = (
        "Rates that found the task first, on validation rows with seed "
        f"{record['tuning_seed']}, which is not reported"
    )
    return [
        f"{how}, and when the reported seeds found it. {told_edges(chosen)}".strip(),
        "",
        markdown_table(["task", "dropout", "start", "rate", "steps of the seeds"], rows),
        "",
    ]


def _differences(record: dict[str, Any]) -> list[str]:
    """What each factor changes; nothing where no interval could be made, as with one seed."""
    found = [x for x in record["differences"] if x["low"] is not None]
    if not found:
        return []
    rows = [
        [
            x["row"],
            f"{x['of']} less {x['less']}",
            f"{x['mean']:+.3f}",
            f"{x['low']:+.3f} to {x['high']:+.3f}",
            x["verdict"],
        ]
        for x in found
    ]
    return [
        f"Differences at these rates of log2 of the steps (1: twice as many), paired by seed over "
        f"{found[0]['n']} seeds; 95% for all {found[0]['comparisons']} intervals together. Where 0 "
        "is inside, nothing is said; where a run never found the task, there is none.",
        "",
        markdown_table(["task", "log2 steps of", "difference", "interval", "the first is"], rows),
        "",
    ]


def _steps(found: dict[str, int | None]) -> str:
    return ", ".join("never" if step is None else str(step) for step in found.values())


def _cell(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return "–"  # a rate beyond the grid's edge, which other lines had no reason to try
    steps = sorted(x["found_at_step"] for x in runs if x["found_at_step"] is not None)
    accuracies = [x["accuracy"] for x in runs]
    told = f"{len(steps)} of {len(runs)}"
    if steps:
        told += f", {statistics.median(steps):g} ({steps[0]} to {steps[-1]})"
    return f"{told}; {min(accuracies):.2f} to {max(accuracies):.2f}"


def draw(lines: Sequence[dict[str, Any]]) -> Figure:
    """Accuracy by step: a panel a length and rate, a colour a start, dashes with dropout."""
    rows, rates = dict.fromkeys(x["row"] for x in lines), sorted({x["rate"] for x in lines})
    with matplotlib.rc_context(STYLE):
        drawing = Figure(figsize=(2.4 * len(rates), 0.9 + 2.1 * len(rows)), layout="constrained")
        panels = drawing.subplots(len(rows), len(rates), squeeze=False, sharey=True)
        for row, beside in zip(rows, panels, strict=True):
            for rate, axes in zip(rates, beside, strict=True):
                shown = [x for x in lines if (x["row"], x["rate"]) == (row, rate)]
                for x in shown:
                    axes.plot(
                        *zip(*x["curve"], strict=True),
                        color=RUN_COLOURS[STARTS.index(x["start"])],
                        linestyle=_DASHES[x["dropout"]],
                        linewidth=1.2,
                        label=f"dropout {x['dropout']:g}, start {x['start']}",
                    )
                axes.set_title(f"{row}, rate {rate:g}", loc="left", fontsize=8)
                axes.set_xlabel("steps")
                axes.set_ylim(-0.03, 1.05)
            beside[0].set_ylabel("accuracy")
        # A panel of a rate beyond the grid's edge has some of the lines.
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)
    return drawing
