"""Whether finished cells were made from the data that is there, and all from the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from eval.lab.cell import cell_path, finished
from eval.long_range.cell import Cell
from eval.long_range.tasks import SPLITS


def check_origins(out: Path, cells: Iterable[Cell]) -> None:
    """Check that what is finished of these cells was made from the data of their place.

    Only tasks that read files are compared with what is there; all cells of a task with each other.

    Raises:
        UserError: one was made from other data; or the data is missing.
    """
    there: dict[str, dict[str, Any]] = {}
    first: dict[str, tuple[Any, Path]] = {}
    for cell in cells:
        record, path = finished(out, cell), cell_path(out, cell)
        if record is None:
            continue
        data = origins_of(record)
        known, where = first.setdefault(cell.task, (data, path))
        if data != known:
            raise UserError(
                f"{path}: was made from other data of {cell.task} than {where}; delete one of "
                "them, and the same command makes it again"
            )
        if not cell.make_task().reads_files:
            continue
        if cell.task not in there:
            there[cell.task] = _origins(cell)
        if data != there[cell.task]:
            place = "the Hub's" if cell.place.folder is None else f"that in {cell.place.folder}"
            raise UserError(
                f"{path}: was made from other data of {cell.task} than {place}; give that data or "
                "another --out, or delete it and all that was made with it"
            )


def origins_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return what a record says of where each split is from."""
    return {split: found["origin"] for split, found in record["data"].items()}


def _origins(cell: Cell) -> dict[str, Any]:
    """Return where each split is from today, as a record would say it."""
    task = cell.make_task()
    found = {split: dict(task.load(split, cell.place).origin) for split in SPLITS}
    return json.loads(json.dumps(found))
