"""A cell of the long-range tasks: settings, and what trains a model by them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from cat_lm.core.readers import Versioned
from eval.long_range.settings import Settings


class CellRecord(Versioned):
    """Hold what every cell's record has."""

    cell: dict[str, Any]
    metric: str
    value: float
    exchanged: float | None
    data: dict[str, dict[str, Any]]
    provenance: dict[str, Any]
    validation: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Cell(Settings):
    """A model's settings as a cell, see `eval.lab.cell`; none are stacked."""

    shape: ClassVar[type[Versioned]] = CellRecord
    trainer: ClassVar[str] = "eval.long_range.training"

    def timed(self) -> Cell:
        every = {"train_rows": self.batch_size, "validation_rows": 1, "test_rows": 1}
        fixed = {"lr": 1e-9, "seed": 0, "epochs": 1, "is_shuffled": False, "patience": None}
        return dataclasses.replace(self, **every, **fixed, eval_steps=None, weight_decay=0.0)

    def score(self, record: dict[str, Any]) -> float:
        return record["validation"]["value"]

    def summary(self, record: dict[str, Any]) -> str:
        return f"{record['metric']} {record['value']:.4f}"
