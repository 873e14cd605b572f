"""How fast Mamba learns to recall: dropout of its embeddings, its start, and the learning rate.

Mamba stays on a plateau and then finds the task within few steps, at a time that differs between
seeds. So what is told is when, and in how many runs, and not the accuracy after a fixed time alone.
Every rate and seed is shown; nothing is chosen.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from cat_lm.io.files import write_json, write_text
from eval.common.grids import cells
from eval.common.grids.execution import Execution, run_unfinished
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.provenance import provenance
from eval.common.style import RUN_COLOURS, STYLE, save_figure
from eval.common.text_table import markdown_table
from eval.recall.grids.plan import Run
from eval.recall.train.cell import Cell

DROPOUTS = (0.0, 0.1)  # of the embeddings: Zoology's MambaBlock, and its TransformerBlock
STARTS = ("own", "zoology")
FOUND = 0.9  # accuracy from which a run counts as over its plateau
_DASHES = {0.0: "-", 0.1: (0, (3, 2))}


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


def plan(scale: Scale, seeds: int | None = None, rates: Sequence[float] | None = None) -> list[Run]:
    """All runs: a row a length, a column a rate, a line a dropout and a start."""
    return [
        Run(
            f"L = {length}",
            f"{rate:g}",
            f"dropout {dropout:g}, start {start}",
            Cell(
                f"mqar:vocab_size={scale.vocab_size}",
                f"mamba:init={start}",
                scale.d_model,
                length,
                lr=rate,
                seed=seed,
                epochs=scale.epochs,
                train_examples=scale.examples,
                batch_size=scale.batch_size,
                eval_steps=scale.eval_steps,
                embedding_dropout=dropout,
            ),
        )
        for length in scale.lengths
        for dropout in DROPOUTS
        for start in STARTS
        for rate in rates or scale.rates
        for seed in range(seeds or scale.seeds)
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
    runs = plan(SCALES[scale_name], seeds, rates)
    if not execution.estimate_only:
        claim_outputs(out, "mamba.json", named("mamba", ".md", *PICTURES))
    if not run_unfinished(f"mamba at {scale_name} scale", runs, out, execution):
        return None
    lines = summary([(run, cells.finished(out, run.cell)) for run in runs])
    record = {"scale": scale_name, "lines": lines, "provenance": provenance()}
    write_json(out / "mamba.json", record)
    write_text(out / "mamba.md", markdown(lines))
    save_figure(draw(lines), out / "mamba")
    print(markdown(lines))
    return record


def summary(rows: Sequence[tuple[Run, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Give each run's accuracy, the steps it took, its curve, and when it left the plateau."""
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
                "found_at_step": next((s for s, accuracy in curve if accuracy > FOUND), None),
                "curve": curve,
            }
        )
    return lines


def markdown(lines: Sequence[dict[str, Any]]) -> str:
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
    return "\n".join(text)


def _cell(runs: Sequence[dict[str, Any]]) -> str:
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
        handles = dict(zip(*reversed(panels[0][0].get_legend_handles_labels()), strict=True))
        drawing.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)
    return drawing
