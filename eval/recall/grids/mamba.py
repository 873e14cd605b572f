"""How fast Mamba learns to recall: dropout of its embeddings, its start, and the learning rate.

Mamba stays on a plateau and then finds the task within few steps, at a time that differs between
seeds. So what is told is when, and in how many runs, and not the accuracy after a fixed time alone.
Every rate and seed is shown. For the differences that dropout and the start make, a rate is chosen
for each of the four, as in the figures: by validation rows, with a seed that is not reported, and
one rate beyond where the best lies on the grid's edge.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from cat_lm.io.files import write_json, write_text
from eval.common.comparison import compare
from eval.common.grids import cells
from eval.common.grids.execution import Execution, run_unfinished
from eval.common.grids.summary import told_edges, told_rate
from eval.common.grids.tuning import TUNING_SEED, Choice, foreseen, run_tuned
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.common.provenance import provenance
from eval.common.style import RUN_COLOURS, STYLE, save_figure
from eval.common.text_table import markdown_table
from eval.recall.grids.plan import Place, Run
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
                Cell(
                    f"mqar:vocab_size={scale.vocab_size}",
                    f"mamba:init={start}",
                    scale.d_model,
                    length,
                    epochs=scale.epochs,
                    train_examples=scale.examples,
                    batch_size=scale.batch_size,
                    eval_steps=scale.eval_steps,
                    embedding_dropout=dropout,
                ),
            ),
            tuple(rates or scale.rates),
            seeds or scale.seeds,
        )
        for length in scale.lengths
        for dropout in DROPOUTS
        for start in STARTS
    ]


def every_run(places: Sequence[Place]) -> list[Run]:
    """Give each place's runs at every rate and seed, in a column for each rate."""
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
    places, title = plan(SCALES[scale_name], seeds, rates), f"mamba at {scale_name} scale"
    runs = every_run(places)
    if not execution.estimate_only:
        claim_outputs(out, "mamba.json", named("mamba", ".md", *PICTURES))
    if not run_unfinished(title, runs, out, execution, later=foreseen(places, out)):
        return None
    tuned = run_tuned(f"{title}, a rate for each", places, out, execution) or []
    every = {run.cell: run for run in (*runs, *(run for run, *_ in tuned))}
    record = {
        "scale": scale_name,
        "tuning_seed": TUNING_SEED,
        "lines": summary([(run, cells.finished(out, run.cell)) for run in every.values()]),
        **compared(tuned),
        "provenance": provenance(),
    }
    page = markdown(record)
    write_json(out / "mamba.json", record)
    write_text(out / "mamba.md", page)
    save_figure(draw(record["lines"]), out / "mamba")
    print(page)
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


def compared(tuned: Sequence[tuple[Run, dict[str, Any], Choice]]) -> dict[str, Any]:
    """Compare dropout with none and the starts, each at its chosen rate, paired by seed.

    The value is the accuracy of the tested model; intervals are corrected for all comparisons.

    Returns:
        `chosen`: each line's rate, accuracies and how the rate was chosen; `differences`: for each
        length of dropout at either start, and of the start at either dropout.
    """
    values: dict[tuple[str, float, str], dict[int, float]] = {}
    choices: dict[tuple[str, float, str], Choice] = {}
    for run, record, choice in tuned:
        line = (run.row, run.cell.embedding_dropout, record["mixer"]["options"]["init"])
        values.setdefault(line, {})[run.cell.seed] = record["accuracy"]
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
        "tried": {f"{rate:g}": accuracy for rate, accuracy in sorted(choice.tried.items())},
        "mean": statistics.fmean(values.values()),
        "runs": {str(seed): accuracy for seed, accuracy in values.items()},
    }


def markdown(record: dict[str, Any]) -> str:
    """How many runs found the task and when, the chosen rates, and the differences."""
    return "\n".join([*_found(record["lines"]), *_chosen_rates(record), *_differences(record)])


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
    """Each line's rate, marked where it lies on the edge, with the accuracy of its runs."""
    chosen = record["chosen"]
    rows = [
        [x["row"], f"{x['dropout']:g}", x["start"], told_rate(x), f"{x['mean']:.3f}"]
        for x in chosen
    ]
    how = (
        f"Rates chosen by validation rows with seed {record['tuning_seed']}, which is not reported"
    )
    return [
        f"{how}, and the mean accuracy of the reported seeds. {told_edges(chosen)}".strip(),
        "",
        markdown_table(["task", "dropout", "start", "rate", "accuracy"], rows),
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
        f"Differences at these rates, paired by seed over {found[0]['n']} seeds; 95% for all "
        f"{found[0]['comparisons']} intervals together. Where 0 is inside, nothing is said.",
        "",
        markdown_table(["task", "accuracy of", "difference", "interval", "the first is"], rows),
        "",
    ]


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
