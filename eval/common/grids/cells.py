"""Cells on disk: one JSON file each, named by its options; finished ones are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from eval.common.cell_store import CellStore, key_hash
from eval.common.provenance import provenance

if TYPE_CHECKING:
    from eval.common.grids.cell import AnyCell

_NAME = 200  # characters of a cell's name at most, without its hash


def _store(folder: Path, cell: AnyCell) -> CellStore:
    return CellStore(folder / "cells", cell.shape)


def _name(cell: AnyCell) -> str:
    what = re.sub(r"[^A-Za-z0-9.=-]+", "_", f"{cell.task}-{cell.mixer}")
    how = f"-d{cell.d_model}-L{cell.seq_len}-lr{cell.lr:g}-seed{cell.seed}"
    # A file's name has 255 bytes, a picture's and a temporary file's more than this; the hash is
    # of the whole, so that nothing is lost with the end of many options.
    return f"{what[: _NAME - len(how)]}{how}-{key_hash(_key(cell), digits=8)}"


def _key(cell: AnyCell) -> dict[str, Any]:
    """Return all that decides a result, with what options that were left out mean today."""
    return json.loads(json.dumps({"cell": cell.key(), **cell.resolved()}))


def cell_path(folder: Path, cell: AnyCell) -> Path:
    """FOLDER/cells/TASK-MIXER-dD-LT-lrX-seedS-HASH.json."""
    return _store(folder, cell).path(_name(cell))


def finished(folder: Path, cell: AnyCell) -> dict[str, Any] | None:
    """Read the record of a finished cell, if it is there.

    Raises:
        UserError: a file that is no such record.
    """
    key = _key(cell)
    return _store(folder, cell).read(_name(cell), lambda record: key.items() <= record.items())


def run(folder: Path, cell: AnyCell, device: str, *, quiet: bool = False) -> dict[str, Any]:
    """The record of a cell: read if it is finished, else trained, tested and written."""
    record = finished(folder, cell)
    if record is None:
        with _computing([cell], device):
            record = cell.run(device, quiet=quiet)
        _keep(folder, cell, record, device)
    return record


def run_together(folder: Path, group: Sequence[AnyCell], device: str) -> list[dict[str, Any]]:
    """The records of cells of one kind; unfinished ones are trained as one stack.

    A cell's file is written when it has stopped, so that a kill loses those still in the stack.

    Raises:
        UserError: the stack does not fit into the device's memory.
    """
    todo = [cell for cell in group if finished(folder, cell) is None]
    if len(todo) > 1:
        with _computing(todo, device):
            for cell, record in todo[0].run_stack(todo, device):
                _keep(folder, cell, record, device)
    return [run(folder, cell, device, quiet=True) for cell in group]


@contextmanager
def _computing(group: Sequence[AnyCell], device: str) -> Iterator[None]:
    from cat_lm.ops.runtime.cpu import make_process_ready

    make_process_ready(device)
    with told_out_of_memory(group, device):
        yield


@contextmanager
def told_out_of_memory(group: Sequence[AnyCell], device: str) -> Iterator[None]:
    """Turns the device's lack of memory for a group of cells into a UserError."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} has no memory for {len(group)} x {group[0].mixer}, "
            f"d_model={group[0].d_model}, seq_len={group[0].seq_len}; a smaller batch, and in a "
            "grid a smaller --stack or fewer --workers, need less"
        ) from None


def _keep(folder: Path, cell: AnyCell, record: dict[str, Any], device: str) -> None:
    import torch

    record |= cell.derived(record)
    record["provenance"] = {**provenance(), "device": device, "threads": torch.get_num_threads()}
    _store(folder, cell).write(_name(cell), record)
