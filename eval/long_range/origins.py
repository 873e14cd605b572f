"""Whether finished cells were made from the data that is there, and all from the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from eval.common.grids.cells import cell_path, finished
from eval.long_range.cell import Cell
from eval.long_range.controls import Rows
from eval.long_range.tasks import SPLITS


def check_data_there(out: Path, cells: Iterable[Cell]) -> None:
    """Check that what is finished of these cells was made from the data of their place.

    Only tasks that read files, and of which something is finished, are looked at.

    Raises:
        UserError: one was made from other data; or the data is missing.
    """
    there: dict[str, dict[str, Any]] = {}
    for cell in cells:
        record = finished(out, cell) if cell.make_task().reads_files else None
        if record is None:
            continue
        if cell.task not in there:
            there[cell.task] = _origins(cell)
        if origins_of(record) != there[cell.task]:
            where = "the Hub's" if cell.place.folder is None else f"that in {cell.place.folder}"
            raise UserError(
                f"{cell_path(out, cell)}: was made from other data of {cell.task} than {where}; "
                "give that data or another --out, or delete it and all that was made with it"
            )


def check_same_data(rows: Rows, out: Path) -> None:
    """Check that all runs of a task had the same rows.

    Raises:
        UserError: some were made from other data.
    """
    first: dict[str, tuple[Any, Path]] = {}
    for run, record in rows:
        data, task, path = origins_of(record), run.cell.task, cell_path(out, run.cell)
        known, where = first.setdefault(task, (data, path))
        if data != known:
            raise UserError(
                f"{path}: was made from other data of {task} than {where}; delete one of them, and "
                "the same command makes it again"
            )


def origins_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a record says of where each split is from."""
    return {split: found["origin"] for split, found in record["data"].items()}


def _origins(cell: Cell) -> dict[str, Any]:
    """Return where each split is from today, as a record would say it."""
    task = cell.make_task()
    found = {split: dict(task.load(split, cell.place).origin) for split in SPLITS}
    return json.loads(json.dumps(found))
