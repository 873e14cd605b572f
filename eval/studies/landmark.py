"""What models lose that read chosen blocks of keys, trained with the landmarks' loss and without.

The quickstart's CAT is trained on all keys (`dense`) or with a loss for its landmarks in addition
(`guided`), without positions and with rotary ones, and is read at four times its training length
with the blocks that selectors choose. `random` and `local`, the blocks just before, are controls:
a selector that is not better than both finds nothing; `oracle` chooses by attention's own weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.data.manifest import read_manifest
from eval.lab.contrasts import Contrast, difference_of
from eval.lab.frame import Line, Record
from eval.lab.places import Place, Run
from eval.lab.study import Asked, Rows, Study
from eval.landmark.cell import POSITIONS, WAYS, Cell, over_dense
from eval.landmark.diagnose import retrieval_points
from eval.landmark.options import LEARNED, SELECTORS
from eval.language.grids import check, texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINED = "as trained"  # the row of validation losses
RATE = 2e-3  # the quickstart's
MODELS = tuple(f"{position}-{way}" for position in POSITIONS for way in WAYS)
NAMES = {"none": "no positions", "rope": "RoPE"}
# Compared at every number of blocks.
PAIRS = (
    *((one, control) for one in ("box", "ssm") for control in ("random", "local")),
    *(("ssm", other) for other in ("box", "learned", "exponential", "oracle")),
)


# What cells of a scale have; without lessons, selectors that learn are left out.
SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"lengths": (4 * 32,), "documents": 4, "block": 4, "diagnosed": (4, 8)},
    "cpu": {"lengths": (4 * 256,), "documents": 54, "lessons": 262_144},
}
SEEDS = {"smoke": 2, "cpu": 3}


def places(asked: Asked) -> list[Place]:
    """Return a place for each model's training, and each of its selectors.

    Raises:
        UserError: a model that there is not, or text that is too short.
    """
    sizes, seeds = SCALES[asked.scale], asked.seeds or SEEDS[asked.scale]
    for model in asked.models:
        if model not in MODELS:
            raise UserError(f"--models {model}: choose among {', '.join(MODELS)}")
    data = texts(tuple(asked.more.get("data", ())), "landmark", 4096, held_out=0.02)
    if len(data) > 1:
        raise UserError("--data: name one folder")
    (folder, _), (length,) = *data, sizes["lengths"]
    there = read_manifest(folder)["splits"]["validation"]["tokens"]
    if there <= length:
        raise UserError(
            f"--data {folder}: its validation split has {there:,} tokens, models are read at "
            f"{length:,}; hold out more text"
        )
    select = tuple(name for name in SELECTORS if "lessons" in sizes or name not in LEARNED)
    found = []
    for model in asked.models or MODELS:
        position, way = model.split("-")
        cell = Cell(model, asked.scale, data, RATE, select=select, **sizes)
        runs = [Run(NAMES[position], f"{way}, {length:,} tokens", name, cell) for name in select]
        runs.append(Run(TRAINED, NAMES[position], way, cell))
        found += [Place(run, (RATE,), seeds) for run in runs]
    return found


def values(run: Run, record: Record) -> dict[int, dict[str, Any]]:
    """Return by the number of blocks what a selector loses; or the validation loss of training."""
    if run.row == TRAINED:
        loss = math.nan if record["loss"] is None else record["loss"]
        return {run.cell.seq_len: {"value": loss}}
    if record["diverged"]:
        return {top_k: {"value": math.nan} for top_k in run.cell.top_k}
    return over_dense(record["rows"], run.line)


def contrasts(lines: Sequence[Line]) -> list[Contrast]:
    """Compare selectors by PAIRS, and the losses of the ways of training."""
    at = {(line["row"], line["column"], line["x"], line["line"]): line for line in lines}
    panels = dict.fromkeys(place[:3] for place in at)
    return [
        difference_of(at[*panel, one], at[*panel, other])
        for panel, (one, other) in itertools.product(panels, (*PAIRS, WAYS[::-1]))
        if {(*panel, one), (*panel, other)} <= at.keys()
    ]


def extra(rows: Rows) -> dict[str, Any]:
    """Return how often blocks are found: in bins over heads, and means over them for each run."""
    heads: dict[str, list[Record]] = {}
    means = []
    for run, record in rows:
        if run.row == TRAINED and not record["diverged"]:
            name = f"{run.column}, {run.line}"
            heads.setdefault(name, []).extend(record["diagnosis"]["rows"])
            label = {"label": f"{name}, seed {run.cell.seed}"}
            means += [label | row for row in record["diagnosis"]["means"]]
    return {
        # The place on the axis of the figure's strips.
        "training_length": max(rows[0][0].cell.top_k),
        "retrieval": {name: retrieval_points(of_model) for name, of_model in heads.items()},
        "diagnoses": means,
    }


def pictures(record: Record) -> dict[str, Figure]:
    """Draw how often a match's block is chosen against SNR²."""
    from eval.landmark.figures import retrieval_figure

    found = record["extra"].get("retrieval")
    return {"retrieval": retrieval_figure(found)} if found else {}


ENTRY = Study(
    "landmark",
    "what models lose that read chosen blocks of keys",
    places,
    values,
    source="CAT, section 7",
    notes="Every query reads its own block, the one before it, and the chosen ones. A selector "
    "that is not better than random blocks and the ones just before says nothing for landmarks.",
    measures={
        "": "loss over that with all keys, nats a token",
        TRAINED: "validation loss, nats a token",
    },
    also={
        "loss": "loss, nats a token",
        "error": "standard error over documents of the difference to all keys",
        "share": "keys read, of all",
    },
    axis="top-k",
    figure="losses",
    contrasts=contrasts,
    extra=extra,
    pictures=pictures,
    check=check,
    options=("models", "data"),
    scales=tuple(SCALES),
)
