"""Calls of the small study whose trainings are imitated."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import ClassVar

from cat_lm.config import load_config
from cat_lm.core.readers import Versioned
from eval.lab.store import CellStore
from eval.small_study.__main__ import main
from tests.unit.imitated_study import Imitation, run_command

run_study = functools.partial(run_command, main)


class Shifted(Imitation):
    """Has a model of another question."""

    LOSS: ClassVar = Imitation.LOSS | {"kv_shift": 3.9}


def change_result(run: Path, **changes: object) -> None:
    """Change the record of a finished run."""
    store = CellStore(run, Versioned)
    store.write("study", store.read("study") | changes)


def last_loss_of(run: Path) -> float:
    """Give a loss that the imitation of no training has, with the same best rate."""
    return 3 + abs(math.log10(load_config(run / "config.yaml").optimizer.lr / 3e-3))
