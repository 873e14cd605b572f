"""Fills the cells of a sweep, model by model, and writes the tables and pictures of OUT."""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import atomic_write, write_json
from cat_lm.core.outputs import PICTURES, claim_outputs, named
from cat_lm.pretrained.loading import (
    model_config,
    model_folder,
    model_label,
    refuse_beyond_positions,
)
from eval.common.models import folder_sha256
from eval.common.precision import evaluation_dtype
from eval.common.text_table import aligned
from eval.length_sweep.cells import (
    DOCUMENTS,
    PAGES,
    Cells,
    Protocol,
    Subject,
    check_scaling,
    refuse_idle_options,
    resolve_methods,
    trained_length,
)
from eval.length_sweep.memory import NotEnoughMemory
from eval.length_sweep.text import WIKITEXT, sweep_streams
from eval.length_sweep.token_stream import REASONS, Documents

if TYPE_CHECKING:
    from eval.length_sweep.token_stream import TokenStream

COLUMNS = (
    "label",
    "length",
    "method",
    "perplexity",
    "loss",
    "word_perplexity",
    "byte_perplexity",
    "bits_per_byte",
    "standard_error",
    "tokens",
    "words",
    "bytes",
    "groups",
    "group_kind",
    "stride",
    "documents",
    "document_count",
    "skip_tokens",
    "training_length",
    "factor",
    "temperature_scope",
    "rope_type",
    "rope_factor",
    "original_length",
    "attention_factor",
    "attention_temperature",
    "parameters",
    "model",
    "model_sha256",
    "tokens_sha256",
    "dtype",
    "device",
    "seconds",
    # Of the text: those of `tokens` and those of the reasons to leave one out are all of them.
    "text_tokens",
    *(f"left_out_{reason}" for reason in REASONS),
)
# In the JSON alone.
LISTS = ("positions", "document_nlls", "document_tokens")


def sweep(
    models: Sequence[Path | str],
    lengths: Sequence[int],
    out: Path | str,
    *,
    text: Path | str | None = None,
    data: Path | str | None = None,
    split: str = "validation",
    data_dir: Path | str | None = None,
    document_separator: str | None = None,
    methods: Sequence[str] = ("none",),
    max_tokens: int | None = None,
    min_document_tokens: int | None = None,
    max_document_tokens: int | None = None,
    skip_tokens: int = 0,
    training_length: int | None = None,
    stride: int | None = None,
    documents: str = "concatenated",
    factor: float | None = None,
    temperature_scope: str = "logits",
    dtype: str = "auto",
    device: str = "auto",
    batch_tokens: int = 8192,
) -> list[dict[str, Any]]:
    """Fills every cell (model, length, method) and writes the result files into `out`.

    Args:
        text, data: a text file (or `WIKITEXT`), or prepared data; exactly one of them.
        split: of `data`: validation, or test where the data have one.
        data_dir: with WIKITEXT, the folder that holds its rows; None: the Hub.
        document_separator: regular expression between the documents of `text`; None for one.
        methods: see `resolve_methods`, which knows the sets ("all",) and ("paper",).
        max_tokens: to score at most.
        min_document_tokens: of documents="per-document"; default: the largest length.
        max_document_tokens: of the same; longer documents are scored up to there.
        skip_tokens: at the beginning of the split of `data`, see `split_stream`.
        training_length: in place of what each model's folder says.
        stride, documents, factor, temperature_scope, device, batch_tokens: see `Protocol`.
        dtype: see `eval.common.precision`.

    Returns one row per cell, with the keys `COLUMNS` and `LISTS` (see `position_curve` and
    `Score`). Raises UserError for bad input, before anything is computed where that is possible;
    and for lengths that did not fit into memory, after everything else is done and written.
    """
    if text == WIKITEXT:
        documents = PAGES
    lengths = sorted(set(lengths))
    dtype = evaluation_dtype(dtype, models, device)  # before anything is read
    scaling, computing = (factor, temperature_scope), (dtype, device, batch_tokens)
    protocol = Protocol(stride, documents, *scaling, *computing, max_document_tokens, skip_tokens)
    subjects = _subjects(models, lengths[-1], tuple(methods), protocol, training_length)
    if documents == PAGES:
        from eval.length_sweep.wikitext import page_streams

        streams = page_streams(subjects, lengths[-1], data_dir)
    else:
        chosen = Documents(min_document_tokens or lengths[-1], max_document_tokens)
        choice = None if documents == DOCUMENTS[0] else chosen
        part = (max_tokens, choice, split, skip_tokens)
        streams = sweep_streams(subjects, lengths[-1], text, data, document_separator, *part)
    return _fill(subjects, streams, lengths, protocol, Path(out))


def _fill(
    subjects: Sequence[Subject],
    streams: Sequence[TokenStream],
    lengths: Sequence[int],
    protocol: Protocol,
    out: Path,
) -> list[dict[str, Any]]:
    """The rows of all cells, written after each one and drawn.

    Raises UserError, at the end, for those that were too large.
    """
    for account in dict.fromkeys(stream.account for stream in streams):
        print(account, file=sys.stderr)
    names = [*named("length_sweep", ".csv", *PICTURES), *named("loss_by_position", *PICTURES)]
    claim_outputs(out, "length_sweep.json", names)
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for subject, stream in zip(subjects, streams, strict=True):
        cells = Cells(out / "cells", subject, stream, protocol)
        for method, length in itertools.product(subject.methods, lengths):
            try:
                rows.append(cells.row(length, method))
            except NotEnoughMemory as error:
                print(f"{subject.label}, {method}: {error}", file=sys.stderr)
                missing.append(f"{subject.label} {method} {length}")
            _write_tables(out, rows, streams[0], protocol)
    if rows:
        _draw(rows, out)
    if missing:
        raise UserError(
            f"did not fit into memory: {', '.join(missing)} (label, method, length); "
            f"the {len(rows)} others are in {out}"
        )
    return rows


def _subjects(
    models: Sequence[Path | str],
    largest: int,
    methods: tuple[str, ...],
    protocol: Protocol,
    training_length: int | None,
) -> list[Subject]:
    folders = [model_folder(path) for path in models]
    refuse_repeated(folders)
    configs = [model_config(folder) for folder in folders]
    found = []
    for folder, label, config in zip(folders, labels(folders), configs, strict=True):
        refuse_beyond_positions(config, largest, f"--lengths {largest}: model {label}")
        chosen = resolve_methods(config, methods, label)
        trained = training_length or trained_length(folder, config)
        check_scaling(config, chosen, label, trained, protocol)
        found.append((folder, label, config, trained, chosen))
    refuse_idle_options(protocol, {method for *_, chosen in found for method in chosen})
    # Reading the weights takes a while: after everything that can be wrong.
    return [Subject(*values, folder_sha256(values[0])) for values in found]


def refuse_repeated(folders: Sequence[Path]) -> None:
    places = [folder.resolve() for folder in folders]
    for index, folder in enumerate(folders):
        if places[index] in places[:index]:
            raise UserError(f"model {folder}: given twice; its lines would be the same")


def labels(folders: Sequence[Path]) -> list[str]:
    """Short names: the run's for RUN/model, else the folder's; the path where two agree."""
    names = [model_label(folder) for folder in folders]
    return [
        name if names.count(name) == 1 else str(folder)
        for name, folder in zip(names, folders, strict=True)
    ]


def _write_tables(
    out: Path, rows: list[dict[str, Any]], stream: TokenStream, protocol: Protocol
) -> None:
    from eval.common.provenance import provenance

    write_json(
        out / "length_sweep.json",
        {
            "format": 1,
            "text": stream.source,
            "protocol": protocol.describe(),
            "rows": [{name: row[name] for name in (*COLUMNS, *LISTS)} for row in rows],
            **provenance(),
        },
    )
    with atomic_write(out / "length_sweep.csv") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _draw(rows: list[dict[str, Any]], out: Path) -> None:
    from eval.common.style import save_figure
    from eval.length_sweep.figures import length_figure, position_figure

    save_figure(length_figure(rows), out / "length_sweep")
    save_figure(position_figure(rows), out / "loss_by_position")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The perplexities as aligned text: a line per model and method, a column per length."""
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["method"], row["length"]): row["perplexity"] for row in rows}
    names = list(dict.fromkeys((row["label"], row["method"]) for row in rows))
    lines = []
    for label, method in names:
        values = [cells.get((label, method, length)) for length in lengths]
        shown = ("n/a" if value is None else f"{value:.4g}" for value in values)
        lines.append([f"{label} ({method})", *shown])
    return aligned(["", *map(str, lengths)], lines)
