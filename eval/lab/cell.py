"""Cells: the training runs that a study consists of, one cached JSON file each."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from cat_lm import mixers
from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.fields import parse_specification
from cat_lm.core.readers import Versioned
from cat_lm.ops.convolution import kinds
from eval.common.options import check_options
from eval.common.provenance import provenance
from eval.lab.store import CellStore, key_hash

_NAME = 200  # The greatest length of a cell's name, without its hash.


class Step(NamedTuple):
    """One training step: number and epoch from 1, rows, and whether it ends an epoch or is
    validated.
    """

    number: int
    epoch: int
    rows: slice
    tested: bool
    ends_epoch: bool


def plan_steps(
    epochs: int, examples: int, rows: int, eval_steps: int | None = None
) -> Iterator[Step]:
    """Yield all steps without an early stop, in order.

    Args:
        examples: number of training examples.
        rows: rows of a batch; the last batch of an epoch may have fewer.
        eval_steps: steps between validations within an epoch; None for validations only after
            epochs.
    """
    starts, step = range(0, examples, rows), 0
    for epoch in range(1, epochs + 1):
        for start in starts:
            step += 1
            ends = start == starts[-1]
            tested = ends or (eval_steps is not None and step % eval_steps == 0)
            yield Step(step, epoch, slice(start, start + rows), tested, ends)


class Cell:
    """The base class of cells: frozen dataclasses whose fields decide the result and name the file.

    Attributes:
        task, mixer: specifications such as `mqar:keys=8`, `cat:streams=k`.
        d_model, seq_len, lr, seed: in the file's name too.
        batch_size: rows of a step.
        shape: schema of the records.
        trainer: the module whose `Trial` trains it; imported when that is needed, as it needs
            torch. Of cells that are stacked it has `run_stack` and `stacked_step` too.
    """

    task: str
    mixer: str
    d_model: int
    seq_len: int
    lr: float
    seed: int
    batch_size: int | None
    shape: ClassVar[type[Versioned]]
    trainer: ClassVar[str]

    def __post_init__(self) -> None:
        check_options(self)

    def key(self) -> dict[str, Any]:
        """Return all values that decide the result, including the code of a plugin's mixer."""
        return dataclasses.asdict(self) | code_of_mixer(self.mixer)

    def resolved(self) -> dict[str, Any]:
        """Return the task, the mixer and the model with all options, including defaults."""
        raise NotImplementedError

    def plan(self) -> Iterator[Step]:
        """Yield all steps without an early stop, in order."""
        raise NotImplementedError

    @property
    def all_steps(self) -> int:
        """Return the number of steps without an early stop."""
        return sum(1 for _ in self.plan())

    @property
    def rows(self) -> int:
        """Return the number of rows in a step."""
        return self.batch_size

    @property
    def tested_rows(self) -> float:
        """Return the number of training-length rows that cost as much as all tests."""
        raise NotImplementedError

    @property
    def kind(self) -> Self:
        """Return a key that is equal for cells that can be trained as one stack; by default the
        cell.
        """
        return self

    def timed(self) -> Self:
        """Return the shortest cell with equally expensive steps."""
        raise NotImplementedError

    def bytes_needed(self) -> int:
        """Return the estimated peak memory of training in bytes, for cells that can be stacked."""
        raise NotImplementedError

    def trial(self, device: str) -> Any:
        """Build the cell's trainer, see `eval.lab.training.Trial`."""
        return self._trainer.Trial(self, device)

    def step(self, size: int, device: str) -> Callable[[int], object]:
        """Return a function that trains one step of `rows` rows, for `size` stacked cells."""
        return (
            self._trainer.stacked_step(self, size, device)
            if size > 1
            else self.trial(device).try_step
        )

    def run(self, device: str = "cpu", *, quiet: bool = False) -> dict[str, Any]:
        """Train, test and return the record. quiet: no progress.

        Raises:
            UserError: options that do not fit, or missing data.
        """
        return self.trial(device).run(quiet)

    def run_in(self, folder: Path, device: str, *, quiet: bool = False) -> dict[str, Any]:
        """Train as `run` does, with the study's folder for checkpoints to resume from."""
        return self.run(device, quiet=quiet)

    def choosing(self) -> Self:
        """Return the cell that is run to tune the learning rate: no more than `score` needs."""
        return self

    def seconds(self, device: str) -> tuple[float, float] | None:
        """Return the seconds of a step and of a row in it; None if calls of `step` are timed
        instead.
        """
        return None

    @staticmethod
    def run_stack(cells: Sequence[Cell], device: str) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Train and test stacked cells; yield each with its record when it stops."""
        return cells[0]._trainer.run_stack(cells, device)

    @property
    def _trainer(self) -> Any:
        return importlib.import_module(self.trainer)

    def derived(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return values derived from a record, which are stored with it."""
        return {}

    def score(self, record: dict[str, Any]) -> float:
        """Return the tuning score of a record, higher being better; it uses no test set."""
        raise NotImplementedError

    def summary(self, record: dict[str, Any]) -> str:
        """Describe the result in a few words."""
        raise NotImplementedError


def code_of_mixer(specification: str) -> dict[str, str]:
    """Return the source hashes of a plugin's mixer or convolution, which extend a key; else {}."""
    name, options = parse_specification(specification)
    entries: list[object] = [mixers.get(name)] if name in mixers.names() else []
    if (conv_type := options.get("conv_type")) in kinds.names():
        entries.append(kinds.get(conv_type).add_lag)
    codes = sorted(filter(None, map(plugins.hash_plugin_sources, entries)))
    return {"code": " ".join(codes)} if codes else {}


def _store(folder: Path, cell: Cell) -> CellStore:
    return CellStore(folder / "cells", cell.shape)


def _name(cell: Cell) -> str:
    what = re.sub(r"[^A-Za-z0-9.=-]+", "_", f"{cell.task}-{cell.mixer}")
    how = f"-d{cell.d_model}-L{cell.seq_len}-lr{cell.lr:g}-seed{cell.seed}"
    # A file's name has 255 bytes, a picture's and a temporary file's more than this; the hash is
    # of the whole, so that nothing is lost with the end of many options.
    return f"{what[: _NAME - len(how)]}{how}-{key_hash(_key(cell), digits=8)}"


def _key(cell: Cell) -> dict[str, Any]:
    """Return all values that decide a result, with today's meaning of omitted options."""
    return json.loads(json.dumps({"cell": cell.key(), **cell.resolved()}))


def cell_path(folder: Path, cell: Cell) -> Path:
    """Return FOLDER/cells/TASK-MIXER-dD-LT-lrX-seedS-HASH.json."""
    return _store(folder, cell).path(_name(cell))


def finished(folder: Path, cell: Cell) -> dict[str, Any] | None:
    """Return the record of a cell if it is finished, else None.

    Raises:
        UserError: a file that is no such record.
    """
    key = _key(cell)
    return _store(folder, cell).read(_name(cell), lambda record: key.items() <= record.items())


def run(folder: Path, cell: Cell, device: str, *, quiet: bool = False) -> dict[str, Any]:
    """Return the record of a cell, which is trained and tested unless it is finished."""
    record = finished(folder, cell)
    if record is None:
        with _computing([cell], device):
            record = cell.run_in(folder, device, quiet=quiet)
        _keep(folder, cell, record, device)
    return record


def run_together(folder: Path, group: Sequence[Cell], device: str) -> list[dict[str, Any]]:
    """Return the records of stackable cells; unfinished ones are trained as one stack.

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
def _computing(group: Sequence[Cell], device: str) -> Iterator[None]:
    from cat_lm.ops.runtime.cpu import make_process_ready

    make_process_ready(device)
    with out_of_memory_as_error(group, device):
        yield


@contextmanager
def out_of_memory_as_error(group: Sequence[Cell], device: str) -> Iterator[None]:
    """Raise a UserError if a group of cells runs out of the device's memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"{device} has no memory for {len(group)} x {group[0].mixer}, "
            f"d_model={group[0].d_model}, seq_len={group[0].seq_len}; a smaller batch, and in a "
            "grid a smaller --stack or fewer --workers, need less"
        ) from None


def _keep(folder: Path, cell: Cell, record: dict[str, Any], device: str) -> None:
    import torch

    record |= cell.derived(record)
    record["provenance"] = {**provenance(), "device": device, "threads": torch.get_num_threads()}
    _store(folder, cell).write(_name(cell), record)
