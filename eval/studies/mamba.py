"""How fast Mamba learns to recall: dropout of its embeddings, its initialization, and the rate.

Mamba stays on a plateau and then finds the task within few steps, at a time that differs between
seeds. What is compared is therefore when it finds the task, and not the accuracy at the end, which
nearly all runs reach. A rate is chosen for each of the four, as in all studies, but the one that
finds the task first. Two controls have the same task and budget: two layers of attention, which
must find it, and no mixing, which must not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eval.lab.contrasts import Contrast, compare_pairs
from eval.lab.frame import Line, Record
from eval.lab.places import CONTROL, NEGATIVE, Place, Run
from eval.lab.study import Control, Rows, Study, StudyOptions
from eval.recall.cell import Cell

FOUND = 0.9  # accuracy above which a run counts as having found its task
DROPOUTS = (0.0, 0.1)  # dropout of the embeddings in Zoology's MambaBlock and TransformerBlock
STARTS = ("own", "zoology")
POSITIVE = "attention"


@dataclass(frozen=True)
class PlateauCell(Cell):
    """A cell whose rate is chosen by when it finds the task."""

    def score(self, record: Record) -> float:
        """Return −log2 of the steps; without them, below all that have some, the accuracy."""
        step = found_at(record)
        return super().score(record) - 100 if step is None else -math.log2(step)


def found_at(record: Record) -> int | None:
    """Return the step at which validation rows were first seen above FOUND, if they ever were."""
    return next((p["step"] for p in record["history"] if p["accuracy"] > FOUND), None)


class Scale(NamedTuple):
    """The size of the study; `how` has options of its cells."""

    vocab_size: int
    lengths: tuple[int, ...]
    rates: tuple[float, ...]
    seeds: int
    how: dict[str, int]


def _cell_options(
    d_model: int, rows: int, epochs: int, batch_size: int, eval_steps: int
) -> dict[str, int]:
    """Return options of a cell, with `eval_steps` steps between two looks at the accuracy."""
    sizes = {"d_model": d_model, "train_examples": rows, "epochs": epochs}
    return sizes | {"batch_size": batch_size, "eval_steps": eval_steps}


_PAPER_RATES = (1e-4, 1e-3, 1e-2, 1e-1)
SCALES = {
    "smoke": Scale(64, (8,), (3e-3, 1e-2), 1, _cell_options(16, 128, 2, 32, 4)),
    "cpu": Scale(128, (16,), (1e-3, 3e-3, 1e-2, 3e-2), 3, _cell_options(64, 16_000, 48, 64, 125)),
    "paper": Scale(8192, (64, 128), _PAPER_RATES, 3, _cell_options(64, 100_000, 64, 512, 195)),
}


def _name(dropout: float, start: str) -> str:
    return f"dropout {dropout:g}, start {start}"


def plan_places(asked: StudyOptions) -> list[Place]:
    """Return a row a length, a line a dropout and a start, and the controls of each length."""
    scale = SCALES[asked.scale]
    task = f"mqar:vocab_size={scale.vocab_size}"
    found = []
    for length in scale.lengths:
        for dropout in DROPOUTS:
            for start in STARTS:
                how = {"seq_len": length, "embedding_dropout": dropout, **scale.how}
                cell = PlateauCell(task, f"mamba:init={start}", **how)
                run = Run(f"L = {length}", "", _name(dropout, start), cell)
                found.append(Place(run, scale.rates, asked.seeds or scale.seeds))
        middle = scale.rates[len(scale.rates) // 2]
        for mixer in (POSITIVE, NEGATIVE):
            cell = PlateauCell(task, mixer, seq_len=length, **scale.how)
            run = Run(CONTROL, f"L = {length}", mixer, cell)
            found.append(Place(run, (middle,), 1))
    return found


def measured_values(run: Run, record: Record) -> dict[int, dict[str, float]]:
    """Return log2 of the steps until the task was found, infinite where it never was."""
    step = found_at(record)
    found = {"value": math.inf if step is None else math.log2(step)}
    return {run.cell.seq_len: found | {"accuracy": record["accuracy"]}}


def contrasts(lines: Sequence[Line]) -> list[Contrast]:
    """Compare dropout with none at either start, and the starts at either dropout."""
    (none, some), (own, zoology) = DROPOUTS, STARTS
    pairs = [(_name(some, start), _name(none, start)) for start in STARTS]
    pairs += [(_name(dropout, zoology), _name(dropout, own)) for dropout in DROPOUTS]
    return compare_pairs(lines, pairs)


def controls(rows: Rows) -> list[Control]:
    """Check that attention finds the task, and that no mixing does not."""
    return [
        Control(
            run.column,
            "negative" if run.line == NEGATIVE else "positive",
            "accuracy",
            run.line,
            max(point["accuracy"] for point in record["history"]),
            FOUND,
            "No number here is to be believed.",
        )
        for run, record in rows
        if run.row == CONTROL
    ]


ENTRY = Study(
    "mamba",
    "when Mamba learns to recall, by dropout, initialization and learning rate",
    plan_places,
    measured_values,
    measures={"": f"log2 of the steps until validation was above {FOUND:g}"},
    also={"accuracy": "accuracy at the end"},
    contrasts=contrasts,
    controls=controls,
    options=(),
)
