"""Perplexity against what is read: models whose attention reads chosen blocks alone.

Every model, length, selector, block size and number of blocks is a cell, kept in OUT/cells, and so
is dense attention at every length. All cells of a length are scored on the same tokens, by the
protocol of `eval.length_sweep.perplexity`; a difference to dense attention is paired by documents.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write, write_json
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from cat_lm.core.readers import Versioned
from cat_lm.ops.long_filter import filters
from cat_lm.pretrained.loading import choose_device, model_config, model_folder
from eval.common.models import folder_sha256
from eval.common.precision import evaluation_device
from eval.common.text_table import aligned
from eval.lab.contrasts import ratio_error
from eval.lab.store import CellStore, key_hash
from eval.landmark.choices import LEARNED, STATE
from eval.length_sweep.cells import Subject
from eval.length_sweep.sweep import labels, refuse_repeated
from eval.length_sweep.text import sweep_streams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.landmark.cores import Chooser
    from eval.landmark.learn import Lessons
    from eval.length_sweep.token_stream import TokenStream

DENSE = "dense"
COLUMNS = (
    *("label", "length", "select", "block", "top_k", "local", "share", "perplexity", "loss"),
    *("over_dense", "over_dense_error", "selector_bytes", "key_value_bytes", "dense_bytes"),
    *("standard_error", "tokens", "groups", "group_kind", "model", "model_sha256", "tokens_sha256"),
)


class Cell(Versioned):
    """Hold a cell's values besides its key."""

    loss: float
    standard_error: float | None
    tokens: int
    groups: int
    group_kind: str
    document_nlls: list[float] | None
    document_tokens: list[int] | None


@dataclass(frozen=True)
class Grid:
    """Say which cells there are, beside dense attention; `state` is that of the selector `ssm`."""

    lengths: tuple[int, ...]
    select: tuple[str, ...]
    blocks: tuple[int, ...]
    top_k: tuple[int, ...]
    local: int
    state: int = STATE


def sweep(
    models: Sequence[Path | str],
    grid: Grid,
    out: Path | str,
    *,
    text: Path | str | None = None,
    data: Path | str | None = None,
    lessons: tuple[str, int] | None = None,
    max_tokens: int | None = None,
    device: str = "auto",
    batch_tokens: int = 8192,
) -> list[dict[str, Any]]:
    """Fill all cells, and write tables and a picture into `out`.

    Args:
        text, data: a text file, or prepared data; exactly one of them.
        lessons: prepared data that LEARNED selectors are learned from, and how many tokens.

    Returns:
        A row for each cell, with the keys COLUMNS.

    Raises:
        UserError: bad input, before anything is computed where that is possible.
    """
    evaluation_device(device)
    _check(grid, lessons)
    folders = [model_folder(path) for path in models]
    refuse_repeated(folders)
    subjects = [
        Subject(folder, label, model_config(folder), None, ("none",), folder_sha256(folder))
        for folder, label in zip(folders, labels(folders), strict=True)
    ]
    for subject in subjects if lessons is not None else ():
        _check_lesson_length(grid, subject)
    longest = max(grid.lengths)
    streams = sweep_streams(subjects, longest, text, data, None, max_tokens, None)
    names = named("landmark_sweep", ".csv", *PICTURES)
    claim_outputs(out, "landmark_sweep.json", names)
    rows: list[dict[str, Any]] = []
    for subject, stream in zip(subjects, streams, strict=True):
        cells = Cells(Path(out), subject, stream, device, batch_tokens, grid, lessons)
        for length in sorted(grid.lengths):
            dense = cells.row(length, DENSE, None, None)
            rows.append(dense | _compared(dense, dense))
            for select in grid.select:
                for block in grid.blocks:
                    for top_k in grid.top_k:
                        row = cells.row(length, select, block, top_k)
                        rows.append(row | _compared(row, dense))
            _write(Path(out), rows, stream.source)
    _draw(rows, Path(out))
    return rows


def _check(grid: Grid, lessons: tuple[str, int] | None) -> None:
    learned = [name for name in grid.select if name in LEARNED]
    if learned and lessons is None:
        raise UserError(f"--select {learned[0]}: is learned; give --calibrate DATA")
    if lessons is not None and not learned:
        raise UserError(
            f"--calibrate {lessons[0]}: says nothing without --select {' or '.join(LEARNED)}"
        )
    if problem := "ssm" in grid.select and filters.get("ssm").problem(grid.state):
        raise UserError(f"--state {grid.state}: {problem}")
    largest, shortest = max(grid.blocks), min(grid.lengths)
    if largest * (grid.local + 1) > shortest:
        raise UserError(
            f"--blocks {largest}: with --local {grid.local} there is no block to choose at length "
            f"{shortest}; give blocks of at most {shortest // (grid.local + 1)}"
        )


def _lesson_length(grid: Grid, config: Any) -> int:
    """Return the tokens of the rows from which selectors are learned."""
    longest = max(grid.lengths)
    return min(getattr(config, "max_position_embeddings", longest), longest)


def _check_lesson_length(grid: Grid, subject: Subject) -> None:
    length, largest = _lesson_length(grid, subject.config), max(grid.blocks)
    if largest * (grid.local + 1) > length:
        raise UserError(
            f"--blocks {largest}: {subject.label} learns selectors from rows of {length} tokens, "
            f"where with --local {grid.local} there is no block to choose; give blocks of at most "
            f"{length // (grid.local + 1)}"
        )


class Cells:
    """Computes or reads the cells of one model, which is loaded when an unfinished one is met."""

    def __init__(
        self,
        out: Path,
        subject: Subject,
        stream: TokenStream,
        device: str,
        batch_tokens: int,
        grid: Grid,
        lessons: tuple[str, int] | None,
    ) -> None:
        self.store, self.learned_in = CellStore(out / "cells", Cell), out / "learned"
        self.subject, self.stream, self.grid = subject, stream, grid
        self.device, self.batch_tokens, self.lessons = device, batch_tokens, lessons
        self._loaded: tuple[PreTrainedModel, list[Chooser]] | None = None
        self._learned: str | None = None

    def row(self, length: int, select: str, block: int | None, top_k: int | None) -> dict[str, Any]:
        """The row of a cell, computed if it is not finished yet; of dense attention without block.

        Raises:
            UserError: the model can have no landmark attention, or data do not serve.
        """
        key = {
            "model_sha256": self.subject.sha256, "tokens_sha256": self.stream.sha256,
            "length": length, "select": select, "block": block, "top_k": top_k,
            "local": self.grid.local if block else None,
            "learned": self._learn() if select in LEARNED else None,
            "device": choose_device(self.device).type,
        }  # fmt: skip
        name = key_hash(key)
        values = self.store.read_intact(name, lambda values: key.items() <= values.items())
        if values is None:
            values = key | self._compute(length, select, block, top_k)
            self.store.write(name, values)
        read = self._read(length, select, block, top_k)
        loss = values["loss"]
        perplexity = math.exp(loss) if loss < 700 else math.inf
        label, place = self.subject.label, str(self.subject.folder)
        return values | read | {"label": label, "model": place, "perplexity": perplexity}

    def _model(self) -> tuple[PreTrainedModel, list[Chooser]]:
        if self._loaded is None:
            from cat_lm.sparsify import dense_model
            from eval.landmark.cores import add_choosers

            model = dense_model(self.subject.folder).to(choose_device(self.device))
            self._loaded = model, add_choosers(model)
        return self._loaded

    def _learn(self) -> str:
        """Learn what is learned, once, and give the name by which it is known."""
        if self._learned is None:
            from eval.landmark.learn import Lessons, learn

            model, choosers = self._model()
            names = [name for name in self.grid.select if name in LEARNED]
            lessons = Lessons(
                *self.lessons, _lesson_length(self.grid, model.config), self.grid.state
            )
            identity = {"model": self.subject.sha256, "data": _data_identity(lessons)}
            self._learned = learn(
                model, choosers, names, self.grid.blocks, self.grid.local, lessons,
                self.learned_in, identity,
            )  # fmt: skip
        return self._learned

    def _compute(
        self, length: int, select: str, block: int | None, top_k: int | None
    ) -> dict[str, Any]:
        from tqdm import tqdm

        from eval.landmark.cores import Selection
        from eval.length_sweep.perplexity import score_tokens

        model, choosers = self._model()
        for chooser in choosers:
            chooser.selection = (
                None if block is None else Selection(select, block, top_k, self.grid.local)
            )
        stream = self.stream
        label = f"{self.subject.label}, length {length}, {select} {block or ''} {top_k or ''}"
        with tqdm(total=stream.scored, unit="tok", desc=label.rstrip(), disable=None) as bar:
            score = score_tokens(
                model, stream.tokens, length, num_bytes=stream.num_bytes,
                num_words=stream.num_words, eod_id=stream.eod_id, batch_tokens=self.batch_tokens,
                progress=bar.update,
            )  # fmt: skip
        error = score.standard_error
        return {
            "loss": score.loss, "standard_error": error if math.isfinite(error) else None,
            "tokens": score.tokens, "groups": score.groups, "group_kind": score.group_kind,
            "document_nlls": score.document_nlls, "document_tokens": score.document_tokens,
        }  # fmt: skip

    def _read(
        self, length: int, select: str, block: int | None, top_k: int | None
    ) -> dict[str, Any]:
        """What a row of the length reads: its share of keys; and bytes in fp32 for its last."""
        from cat_lm.model.rules import head_width, key_heads
        from eval.landmark.selectors import selector_bytes

        config = self.subject.config
        token = 2 * key_heads(config) * head_width(config) * 4
        if block is None:
            parts = {"share": 1.0, "selector_bytes": 0, "key_value_bytes": length * token}
        else:
            read, every = keys_read(length, block, top_k, self.grid.local)
            last = min(length, (top_k + self.grid.local) * block)
            parts = {
                "share": read / every,
                "selector_bytes": selector_bytes(select, config, length, block, 4),
                "key_value_bytes": last * token,
            }
        return parts | {"dense_bytes": length * token}


def keys_read(length: int, block: int, top_k: int, local: int) -> tuple[int, int]:
    """Count the keys that the queries of a row read, and those that dense attention reads."""
    read = 0
    for position in range(length):
        candidates = max(0, position // block - local + 1)
        read += position + 1 - candidates * block + min(top_k, candidates) * block
    return read, length * (length + 1) // 2


def _data_identity(lessons: Lessons) -> str:
    from cat_lm.data.opening import open_verified

    corpus = open_verified(lessons.data, "train")
    return f"{corpus.num_tokens} tokens of {Path(lessons.data).resolve()}"


def _compared(row: dict[str, Any], dense: dict[str, Any]) -> dict[str, float | None]:
    """How much higher perplexity is than dense attention's, as a part of it, and the error."""
    difference = row["loss"] - dense["loss"]
    over, error = math.expm1(min(difference, 700.0)), None
    own, theirs = row["document_nlls"], dense["document_nlls"]
    if own and theirs and len(own) > 1 and row is not dense:
        sums = [a - b for a, b in zip(own, theirs, strict=True)]
        error = (1 + over) * ratio_error(sums, row["document_tokens"])
    return {"over_dense": over, "over_dense_error": error}


def _write(out: Path, rows: list[dict[str, Any]], source: str) -> None:
    from eval.common.provenance import provenance

    kept = [{name: row[name] for name in COLUMNS} for row in rows]
    record = {"format": 1, "text": source, "rows": kept, **provenance()}
    write_json(out / "landmark_sweep.json", record)
    with atomic_write(out / "landmark_sweep.csv") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(kept)


def _draw(rows: list[dict[str, Any]], out: Path) -> None:
    from eval.common.style import save_figure
    from eval.landmark.figures import sweep_figure

    save_figure(sweep_figure(rows), out / "landmark_sweep")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Show perplexity over dense attention's, and what is read, a line for each cell."""
    lines = []
    for row in rows:
        error = row["over_dense_error"]
        over = f"{row['over_dense']:+.2%}" + ("" if error is None else f" ± {error:.2%}")
        sparse = row["select"] != DENSE
        read = (row["selector_bytes"] + row["key_value_bytes"]) / row["dense_bytes"]
        lines.append(
            (
                row["label"],
                str(row["length"]),
                row["select"],
                str(row["block"] or ""),
                str(row["top_k"] if sparse else ""),
                f"{row['share']:.1%}",
                f"{read:.1%}",
                f"{row['perplexity']:.4g}",
                over if sparse else "",
            )
        )
    header = ("", "length", "select", "block", "top-k", "keys", "bytes", "perplexity", "over dense")
    return aligned(header, lines, left=(0, 2))
