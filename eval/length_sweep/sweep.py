"""Fill the cells of a sweep, model by model, and write the tables and pictures of OUT."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json, write_text
from cat_lm.core.outputs import PICTURES, claim_outputs, result_files
from cat_lm.pretrained.loading import (
    model_config,
    model_folder,
    model_label,
    refuse_beyond_positions,
)
from eval.common.models import folder_sha256
from eval.common.precision import evaluation_dtype
from eval.common.result_files import SweepRow
from eval.length_sweep.cells import Cells, Subject
from eval.length_sweep.options import PAGES, Options
from eval.length_sweep.scaling import (
    check_scaling,
    refuse_idle_options,
    resolve_methods,
    trained_length,
)
from eval.length_sweep.text import sweep_streams
from eval.length_sweep.token_stream import REASONS

LISTS = ("positions", "document_nlls", "document_tokens")  # These values are only in the JSON.
# What follows `text_tokens` are the reasons to leave tokens out; with `tokens` they are all.
COLUMNS = tuple(dict.fromkeys(["label", "length", "method", *SweepRow.model_fields]))
COLUMNS = tuple(name for name in COLUMNS if name not in LISTS)
COLUMNS += tuple(f"left_out_{reason}" for reason in REASONS)


def sweep(
    models: Sequence[Path | str], lengths: Sequence[int], out: Path | str, **options: Any
) -> list[dict[str, Any]]:
    """Call `fill_sweep` with the fields of `Options` given as `options`."""
    return fill_sweep(models, Options(lengths=tuple(lengths), **options), Path(out))


def fill_sweep(models: Sequence[Path | str], asked: Options, out: Path) -> list[dict[str, Any]]:
    """Fill every cell (model, length, method) and write the result files into `out`.

    Returns:
        One row per cell, with the keys `COLUMNS` and `LISTS` (see `position_curve` and `Score`).

    Raises:
        UserError: for bad input, before anything is computed where that is possible; and for
            lengths that did not fit into memory, after everything else is done and written.
    """
    from eval.length_sweep.perplexity import NotEnoughMemory

    asked.check()
    # Before anything is read.
    dtype = evaluation_dtype(asked.dtype, [Path(model) for model in models], asked.device)
    asked = dataclasses.replace(asked, dtype=dtype)
    subjects = _subjects(models, asked)
    if asked.reading == PAGES:
        from eval.length_sweep.wikitext import page_streams

        streams = page_streams(subjects, asked)
    else:
        streams = sweep_streams(subjects, asked)
    for account in dict.fromkeys(stream.account for stream in streams):
        print(account, file=sys.stderr)
    names = [
        *result_files("length_sweep", ".csv", *PICTURES),
        *result_files("loss_by_position", *PICTURES),
    ]
    claim_outputs(out, "length_sweep.json", names)
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for subject, stream in zip(subjects, streams, strict=True):
        cells = Cells(out, subject, stream, asked)
        for method, length in itertools.product(subject.methods, sorted(set(asked.lengths))):
            try:
                rows.append(cells.row(length, method))
            except NotEnoughMemory as error:
                print(f"{subject.label}, {method}: {error}", file=sys.stderr)
                missing.append(f"{subject.label} {method} {length}")
            _write_tables(out, rows, streams[0].source, asked)
    if rows:
        _draw(rows, out)
    if missing:
        raise UserError(
            f"did not fit into memory: {', '.join(missing)} (label, method, length); "
            f"the {len(rows)} others are in {out}"
        )
    return rows


def _subjects(models: Sequence[Path | str], asked: Options) -> list[Subject]:
    folders = [model_folder(path) for path in models]
    refuse_repeated(folders)
    found = []
    for folder, label in zip(folders, labels(folders), strict=True):
        config = model_config(folder)
        refuse_beyond_positions(config, asked.largest, f"--lengths {asked.largest}: model {label}")
        methods = resolve_methods(config, tuple(asked.methods), label)
        trained = asked.training_length or trained_length(folder, config)
        check_scaling(config, methods, label, trained, asked.temperature_scope)
        found.append((folder, label, config, trained, methods))
    refuse_idle_options(asked, {method for *_, methods in found for method in methods})
    # Reading the weights takes a while: after everything that can be wrong.
    return [Subject(*values, folder_sha256(values[0])) for values in found]


def refuse_repeated(folders: Sequence[Path]) -> None:
    """Raise UserError for a model that is given twice."""
    places = [folder.resolve() for folder in folders]
    for index, folder in enumerate(folders):
        if places[index] in places[:index]:
            raise UserError(f"model {folder}: given twice; its lines would be the same")


def labels(folders: Sequence[Path]) -> list[str]:
    """Return short names: the run's for RUN/model, else the folder's; the path where two agree."""
    names = [model_label(folder) for folder in folders]
    return [
        name if names.count(name) == 1 else str(folder)
        for name, folder in zip(names, folders, strict=True)
    ]


def _write_tables(out: Path, rows: list[dict[str, Any]], source: str, asked: Options) -> None:
    import pandas as pd

    from eval.common.provenance import provenance

    kept = [{name: row[name] for name in (*COLUMNS, *LISTS)} for row in rows]
    about = {"format": 1, "text": source, "protocol": asked.describe()}
    write_json(out / "length_sweep.json", about | {"rows": kept} | provenance())
    frame = pd.DataFrame(rows, columns=COLUMNS, dtype=object)
    write_text(out / "length_sweep.csv", frame.to_csv(index=False))


def _draw(rows: list[dict[str, Any]], out: Path) -> None:
    from eval.common.style import save_figure
    from eval.length_sweep.figures import length_figure, position_figure

    save_figure(length_figure(rows), out / "length_sweep")
    save_figure(position_figure(rows), out / "loss_by_position")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return perplexities as aligned text: a line per model and method, a column per length."""
    from eval.common.text_table import align_columns

    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["method"], row["length"]): row["perplexity"] for row in rows}
    lines = []
    for label, method in dict.fromkeys((row["label"], row["method"]) for row in rows):
        values = [cells.get((label, method, length)) for length in lengths]
        shown = ("n/a" if value is None else f"{value:.4g}" for value in values)
        lines.append([f"{label} ({method})", *shown])
    return align_columns(["", *map(str, lengths)], lines)
