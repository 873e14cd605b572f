"""Perplexity against what is read: models whose attention reads chosen blocks alone.

Every model, length, selector, block size and number of blocks is a cell, kept in OUT/cells, and so
is dense attention at every length. All cells of a length are scored on the same tokens, by the
protocol of `eval.length_sweep.perplexity`; a difference to dense attention is paired by documents.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, result_files
from cat_lm.core.readers import Versioned
from cat_lm.ops.long_filter import filters
from cat_lm.pretrained.loading import choose_device, model_config, model_folder
from eval.common.models import folder_sha256
from eval.common.precision import evaluation_device
from eval.common.text_table import align_columns
from eval.lab.contrasts import ratio_error
from eval.lab.store import CellStore
from eval.landmark.options import LEARNED, STATE, Grid, Selection
from eval.length_sweep.cells import Subject, score_stream
from eval.length_sweep.options import Options
from eval.length_sweep.sweep import labels, refuse_repeated
from eval.length_sweep.text import sweep_streams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.landmark.choosers import Chooser
    from eval.length_sweep.token_stream import TokenStream

DENSE = "dense"
COLUMNS = (
    *("label", "length", "select", "block", "top_k", "local", "share", "perplexity", "loss"),
    *("over_dense", "over_dense_error", "selector_bytes", "key_value_bytes", "dense_bytes"),
    *("standard_error", "tokens", "groups", "group_kind", "model", "model_sha256", "tokens_sha256"),
)


class _Cell(Versioned):
    """The values of a cell besides its key."""

    loss: float
    standard_error: float | None
    tokens: int
    groups: int
    group_kind: str
    document_nlls: list[float] | None
    document_tokens: list[int] | None


def sweep(
    models: Sequence[Path | str],
    grid: Grid,
    out: Path | str,
    *,
    text: Path | str | None = None,
    data: Path | str | None = None,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Fill all cells, and write tables and a picture into `out`.

    Args:
        text, data: a text file, or prepared data; exactly one of them.

    Returns:
        A row for each cell, with the keys COLUMNS.

    Raises:
        UserError: bad input, before anything is computed where that is possible.
    """
    evaluation_device(device)
    _check(grid)
    folders = [model_folder(path) for path in models]
    refuse_repeated(folders)
    subjects = [
        Subject(folder, label, model_config(folder), None, ("none",), folder_sha256(folder))
        for folder, label in zip(folders, labels(folders), strict=True)
    ]
    for subject in subjects if grid.calibrate is not None else ():
        length = _lesson_length(grid, subject.config)
        grid.check(length, f"in rows of {length} tokens, from which {subject.label} learns")
    longest = max(grid.lengths)
    asked = Options(text=text, data=data, lengths=(longest,), max_tokens=grid.max_tokens)
    streams = sweep_streams(subjects, asked)
    out = Path(out)
    claim_outputs(out, "landmark_sweep.json", result_files("landmark_sweep", ".csv", *PICTURES))
    rows: list[dict[str, Any]] = []
    for subject, stream in zip(subjects, streams, strict=True):
        cells = Cells(out, subject, stream, device, grid)
        for length in sorted(grid.lengths):
            dense = cells.row(length, None)
            rows.append(dense | _relative_perplexity(dense, dense))
            for choice in grid.choices:
                row = cells.row(length, choice)
                rows.append(row | _relative_perplexity(row, dense))
        _write(out, rows, stream.source)
    _draw(rows, out)
    return rows


def _check(grid: Grid) -> None:
    learned = [name for name in grid.select if name in LEARNED]
    if learned and grid.calibrate is None:
        raise UserError(f"--select {learned[0]}: is learned; give --calibrate DATA")
    if grid.calibrate is not None and not learned:
        raise UserError(
            f"--calibrate {grid.calibrate}: has no effect without --select {' or '.join(LEARNED)}"
        )
    if grid.tokens is not None and grid.calibrate is None:
        raise UserError(f"--tokens {grid.tokens}: has no effect without --calibrate")
    if grid.state is not None and "ssm" not in grid.select:
        raise UserError(f"--state {grid.state}: has no effect without --select ssm")
    if problem := "ssm" in grid.select and filters.get("ssm").problem(grid.state or STATE):
        raise UserError(f"--state {grid.state}: {problem}")
    grid.check(min(grid.lengths), f"at length {min(grid.lengths)}")


def _lesson_length(grid: Grid, config: Any) -> int:
    """Return the length of the rows from which selectors are trained."""
    longest = max(grid.lengths)
    return min(getattr(config, "max_position_embeddings", longest), longest)


class Cells:
    """Compute or read the cells of one model, which is loaded when an unfinished one is met."""

    def __init__(
        self, out: Path, subject: Subject, stream: TokenStream, device: str, grid: Grid
    ) -> None:
        self.store, self.learned_in = CellStore(out / "cells", _Cell), out / "learned"
        self.subject, self.stream, self.device, self.grid = subject, stream, device, grid

    def row(self, length: int, choice: Selection | None) -> dict[str, Any]:
        """Return a cell, computed if it is not finished yet; of dense attention without a choice.

        Raises:
            UserError: the model can have no landmark attention, or data do not serve.
        """
        subject = self.subject
        chosen = dict.fromkeys(("block", "top_k", "local")) | {"select": DENSE}
        if choice is not None:
            chosen = dataclasses.asdict(choice)
        key = {
            "model_sha256": subject.sha256,
            "tokens_sha256": self.stream.sha256,
            "length": length,
            **chosen,
            "learned": self._learned if chosen["select"] in LEARNED else None,
            "device": choose_device(self.device).type,
        }
        values = self.store.computed(key, lambda: self._compute(length, choice))
        loss = values["loss"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        told = {"label": subject.label, "model": str(subject.folder), "perplexity": perplexity}
        return values | told | self._read(length, choice)

    @functools.cached_property
    def _loaded(self) -> tuple[PreTrainedModel, list[Chooser]]:
        from cat_lm.sparsify import dense_model
        from eval.landmark.choosers import add_choosers

        model = dense_model(self.subject.folder).to(choose_device(self.device))
        return model, add_choosers(model)

    @functools.cached_property
    def _learned(self) -> str:
        """Train the selectors, and return the hash of their training."""
        from cat_lm.data.opening import open_verified
        from eval.landmark.choosers import learn

        model, choosers = self._loaded
        data, length = self.grid.calibrate, _lesson_length(self.grid, model.config)
        tokens = open_verified(data, "train").num_tokens
        identity = {
            "model": self.subject.sha256,
            "data": f"{tokens} tokens of {Path(data).resolve()}",
        }
        return learn(model, choosers, self.grid, length, self.learned_in, identity)

    def _compute(self, length: int, choice: Selection | None) -> dict[str, Any]:
        model, choosers = self._loaded
        for chooser in choosers:
            chooser.selection = choice
        label = f"{self.subject.label}, length {length}, "
        label += f"{choice.select} {choice.block} {choice.top_k}" if choice else DENSE
        batch = self.grid.batch_tokens
        score = score_stream(model, self.stream, length, label, batch_tokens=batch)
        found = {name: getattr(score, name) for name in _Cell.model_fields if name != "format"}
        error = found["standard_error"]
        return found | {"standard_error": error if math.isfinite(error) else None}

    def _read(self, length: int, choice: Selection | None) -> dict[str, Any]:
        """Return the share of keys that a row reads, and the bytes that its last token reads."""
        from cat_lm.model.rules import head_width, key_heads
        from eval.landmark.choosers import selector_bytes

        config = self.subject.config
        token = 2 * key_heads(config) * head_width(config) * 4
        share, chosen, last = 1.0, 0, length
        if choice is not None:
            block, top_k, local = choice.block, choice.top_k, choice.local
            read, every = keys_read(length, block, top_k, local)
            share, chosen = read / every, selector_bytes(choice.select, config, length, block, 4)
            last = min(length, (top_k + local) * block)
        parts = {"selector_bytes": chosen, "key_value_bytes": last * token}
        return {"share": share, **parts, "dense_bytes": length * token}


def keys_read(length: int, block: int, top_k: int, local: int) -> tuple[int, int]:
    """Return the keys that the queries of a row read, and those that dense attention reads."""
    read = 0
    for position in range(length):
        candidates = max(0, position // block - local + 1)
        read += position + 1 - candidates * block + min(top_k, candidates) * block
    return read, length * (length + 1) // 2


def _relative_perplexity(row: dict[str, Any], dense: dict[str, Any]) -> dict[str, float | None]:
    """Return the relative increase of perplexity over dense attention, and its standard error.

    The error is over documents, of the difference.
    """
    difference = row["loss"] - dense["loss"]
    over, error = math.expm1(min(difference, 700.0)), None
    own, theirs = row["document_nlls"], dense["document_nlls"]
    if own and theirs and len(own) > 1 and row is not dense:
        sums = [a - b for a, b in zip(own, theirs, strict=True)]
        error = (1 + over) * ratio_error(sums, row["document_tokens"])
    return {"over_dense": over, "over_dense_error": error}


def _write(out: Path, rows: list[dict[str, Any]], source: str) -> None:
    import pandas as pd

    from eval.common.provenance import provenance

    kept = [{name: row[name] for name in COLUMNS} for row in rows]
    record = {"format": 1, "text": source, "rows": kept, **provenance()}
    write_json(out / "landmark_sweep.json", record)
    frame = pd.DataFrame(kept, columns=COLUMNS, dtype=object)  # Keep whole numbers whole.
    write_text(out / "landmark_sweep.csv", frame.to_csv(index=False))


def _draw(rows: list[dict[str, Any]], out: Path) -> None:
    from eval.common.style import save_figure
    from eval.landmark.figures import sweep_figure

    save_figure(sweep_figure(rows), out / "landmark_sweep")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format perplexity relative to dense attention and the amount read, one line for each cell."""
    lines = []
    for row in rows:
        error, sparse = row["over_dense_error"], row["select"] != DENSE
        over = f"{row['over_dense']:+.2%}" + ("" if error is None else f" ± {error:.2%}")
        read = (row["selector_bytes"] + row["key_value_bytes"]) / row["dense_bytes"]
        what = (row["select"], row["block"] or "", row["top_k"] if sparse else "")
        parts = (f"{row['share']:.1%}", f"{read:.1%}", f"{row['perplexity']:.4g}")
        lines.append([row["label"], *map(str, (row["length"], *what)), *parts, over * sparse])
    header = ("", "length", "select", "block", "top-k", "keys", "bytes", "perplexity", "over dense")
    return align_columns(header, lines, left=(0, 2))
