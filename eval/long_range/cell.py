"""Cells: one model trained on one task, and how the paper trains for each task.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from cat_lm.core import numbers
from cat_lm.core.errors import UserError
from cat_lm.core.fields import parse_specification
from cat_lm.core.readers import Versioned
from cat_lm.mixers import Mixer
from eval.common.options import Option
from eval.lab import cell
from eval.lab.cell import Step, cell_path, finished, plan_steps
from eval.long_range import mixers
from eval.long_range.tasks import SPLITS, Place, Task, make_task

# The paper's Table 9, and S4's code where the table is silent. `patience`: epochs without a better
# validation after which the rate falls to a fifth; None: it never does. `pool`: what a class is
# read from, the mean over positions or the last one.
_LISTOPS: dict[str, Any] = {
    **{"layers": 6, "d_model": 256, "norm": "batch", "norm_first": False, "lr": 1e-3},
    **{"batch_size": 50, "epochs": 50, "weight_decay": 0.01, "patience": 5, "pool": "mean"},
    "feed_forward": True,
}
# Of MNIST S4's for its own model, as Table 9 does not have it.
_IMAGES = _LISTOPS | {"norm": "layer", "epochs": 100, "patience": 10}
_FIRST = _LISTOPS | {"norm_first": True, "weight_decay": 0.0}
# DLR's (Gupta et al., 2022; `dss-sequence1d.yaml`): 12 epochs of 16,000 new rows, one rate for all
# of them, norms after what they belong to.
_ATOMIC = _LISTOPS | {"layers": 2, "d_model": 128, "norm": "layer", "batch_size": 64, "epochs": 1}
_ATOMIC |= {"weight_decay": 0.0, "patience": None, "feed_forward": False}
RECIPES: dict[str, dict[str, Any]] = {
    "listops": _LISTOPS,
    "imdb": _FIRST
    | {"layers": 4, "d_model": 64, "lr": 1e-4, "epochs": 20, "patience": 10, "pool": "last"},
    "aan": _FIRST | {"lr": 2e-3, "batch_size": 64, "epochs": 20, "patience": 20},
    "cifar10": _IMAGES,
    "pathfinder": _FIRST
    | {"lr": 4e-3, "batch_size": 64, "epochs": 100, "patience": 10, "pool": "last"},
    **dict.fromkeys(("smnist", "pmnist"), _IMAGES),
    **dict.fromkeys(("select", "cumsum", "cummax"), _ATOMIC),
}
# The paper's P and B, where they are not those of `mixers.Options`.
_WIDTHS = dict.fromkeys(("cifar10", "pathfinder", "smnist", "pmnist"), 3)
_BOUNDS = {"imdb": 1e-4}


def recipe_of(task: str) -> dict[str, Any]:
    """Return a task's options of a cell by the task's name; ListOps' where the paper has none."""
    return RECIPES.get(task, _LISTOPS)


def with_option(specification: str, option: str) -> str:
    """Return a task's or a mixer's specification with a further option."""
    return f"{specification}{',' if ':' in specification else ':'}{option}"


def fitted(mixer: str, task: str) -> str:
    """Return a mixer with the paper's widths and bounds for a task, unless it gives its own."""
    name, given = parse_specification(mixer)
    options = mixers.VARIANTS.get(name, {}) | given
    if options.get("values", "none") != "none" and task in _WIDTHS and "width" not in given:
        mixer = with_option(mixer, f"width={_WIDTHS[task]}")
    if options.get("decay") == "slow" and task in _BOUNDS and "bound" not in given:
        mixer = with_option(mixer, f"bound={_BOUNDS[task]}")
    return mixer


_RECIPE = "(default: the task's in the paper)"
_ROWS = Option("number of rows to use; default: all of the task", numbers.ROWS)


class CellRecord(Versioned):
    """The schema of the keys that every cell's record has."""

    cell: dict[str, Any]
    metric: str
    value: float
    exchanged: float | None
    data: dict[str, dict[str, Any]]
    provenance: dict[str, Any]
    validation: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Cell(cell.Cell):
    """The options that decide a result, see `eval.lab.cell`; none are stacked.

    Attributes:
        task, mixer: specifications such as `listops:max_length=200`, `las:chunk=128`.
        layers, norm, norm_first, pool, is_causal, feed_forward: options of the model, see model.py.
        patience: epochs without a better validation until the rate falls to a fifth; None: never.
        eval_steps: also validate within epochs; None: after them alone.
        train_rows, validation_rows, test_rows: of the task's, so many chosen by a fixed draw, the
            same for all seeds; None: all.
        is_shuffled: a control: rows are trained with others' inputs, and so with others' labels.
        place: where data lies; no part of what names a result, `check_origins` compares what is
            there.
    """

    shape: ClassVar[type[Versioned]] = CellRecord
    trainer: ClassVar[str] = "eval.long_range.training"
    task: str
    mixer: str
    d_model: Annotated[int, Option(_RECIPE, numbers.SMALL_WIDTH)]
    layers: Annotated[int, Option(_RECIPE, numbers.SMALL_DEPTH)]
    lr: Annotated[float, Option(_RECIPE, numbers.LEARNING_RATE, above=0)]
    batch_size: Annotated[int, Option(_RECIPE, numbers.BATCH)]
    epochs: Annotated[int, Option(_RECIPE, numbers.EPOCHS)]
    norm: Annotated[Literal["layer", "batch"], Option(_RECIPE)] = "layer"
    norm_first: Annotated[bool, Option(_RECIPE)] = True
    pool: Annotated[Literal["mean", "last"], Option(f"what a class is read from {_RECIPE}")] = (
        "mean"
    )
    is_causal: bool = False
    feed_forward: Annotated[bool, Option(_RECIPE)] = True
    weight_decay: Annotated[float, Option(_RECIPE, numbers.WEIGHT_DECAY)] = 0.0
    patience: Annotated[
        int | None,
        Option(
            f"epochs without a better validation until the rate falls {_RECIPE}",
            numbers.EPOCHS,
            word="none",
            metavar="N|none",
        ),
    ] = None
    eval_steps: Annotated[
        int | None,
        Option(
            "steps between validations within an epoch; default: only after epochs",
            numbers.STEPS.at_least(1),
        ),
    ] = None
    train_rows: Annotated[int | None, _ROWS] = None
    validation_rows: Annotated[int | None, _ROWS] = None
    test_rows: Annotated[int | None, _ROWS] = None
    is_shuffled: bool = False
    seed: Annotated[int, Option(range=numbers.SEED)] = 0
    place: Place = field(default=Place(), compare=False, repr=False)

    def key(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["place"]
        return values | cell.code_of_mixer(self.mixer)

    def make_task(self) -> Task:
        return make_task(self.task)

    def make_mixer(self) -> Mixer:
        return mixers.make(self.mixer)

    @property
    def seq_len(self) -> int:
        return self.make_task().length

    def resolved(self) -> dict[str, Any]:
        return {"task": self.make_task().describe(), "mixer": self.make_mixer().describe()}

    def rows_of(self, split: str) -> int:
        """Return the most rows of a split, before data are read."""
        chosen, task = getattr(self, f"{split}_rows"), self.make_task()
        there = getattr(task, split, None) or task.official.get(split)
        # A held-out tenth of the rows is more than enough.
        there = there or task.official.get("test") or 0
        return there if chosen is None else min(chosen, there or chosen)

    def plan(self) -> Iterator[Step]:
        rows = self.rows_of("train")
        return plan_steps(self.epochs, rows, self.batch_size, self.eval_steps)

    @property
    def tested_rows(self) -> float:
        tests = 2 if self.make_task().classes else 1  # The second test has exchanged inputs.
        validations = sum(step.tested for step in self.plan())
        return self.rows_of("validation") * validations + tests * self.rows_of("test")

    def timed(self) -> Cell:
        every = {"train_rows": self.batch_size, "validation_rows": 1, "test_rows": 1}
        fixed = {"lr": 1e-9, "seed": 0, "epochs": 1, "is_shuffled": False, "patience": None}
        return dataclasses.replace(self, **every, **fixed, eval_steps=None, weight_decay=0.0)

    def score(self, record: dict[str, Any]) -> float:
        return record["validation"]["value"]

    def summary(self, record: dict[str, Any]) -> str:
        return f"{record['metric']} {record['value']:.4f}"

    def origins(self) -> dict[str, Any]:
        """Return the current origin of each split, in the form of records."""
        task = self.make_task()
        found = {split: dict(task.load(split, self.place).origin) for split in SPLITS}
        return json.loads(json.dumps(found))


def check_origins(cells: Iterable[Cell], out: Path) -> None:
    """Check that finished cells were trained on the data that is there now.

    Only tasks that read files are compared with what is there; all cells of a task with each other.

    Raises:
        UserError: one was made from other data; or the data is missing.
    """
    known: dict[str, tuple[Any, str]] = {}
    for one in cells:
        if (record := finished(out, one)) is None:
            continue
        if one.task not in known and one.make_task().reads_files:
            place = "the Hub's" if one.place.folder is None else f"that in {one.place.folder}"
            known[one.task] = one.origins(), place
        path, data = cell_path(out, one), {s: x["origin"] for s, x in record["data"].items()}
        wanted, where = known.setdefault(one.task, (data, str(path)))
        if data != wanted:
            raise UserError(
                f"{path}: was made from other data of {one.task} than {where}; give that data or "
                "another --out, or delete it, and the same command makes it again"
            )
