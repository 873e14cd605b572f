"""`python -m eval.length_sweep MODEL [MODEL ...]`: perplexity against context length.

The text is a file (`--text`) or the validation split of prepared data (`--data`). Every model is
scored on the same tokens at every length (see eval/perplexity.py for the protocol): their number
is the largest multiple of the largest length that the text (and `--max-tokens`) allows; with
`--documents per-document` they are those of all documents that are as long as the largest length.
Models with another tokenizer than the first one's get the same text in their own tokens; compare
those by bits per byte.

Beyond the training length a model can be read as it is (`none`) or with scaled positions and
attention temperature: see cat_lm/model/rope_scaling.py for the methods and what has which.

OUT gets length_sweep.json, .csv, .png and .svg, loss_by_position.png and .svg, and cells/, one
file for each finished combination, which a later call does not compute again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm import limits
from cat_lm.cli import Parser, add_skip_checksums, number, path_name, whole, whole_numbers
from cat_lm.errors import UserError, command
from cat_lm.export_record import comparing_files
from cat_lm.io.files import replacing, write_json
from cat_lm.io.folders import check_output
from cat_lm.pretrained import DTYPES, choose_device, model_config, model_folder, quiet_transformers
from eval.length_sweep_cells import (
    DOCUMENTS,
    Cells,
    Protocol,
    Subject,
    check_scaling,
    folder_sha256,
    refuse_idle_options,
    resolve_methods,
    trained_length,
)
from eval.length_sweep_text import sweep_streams
from eval.memory import NotEnoughMemory
from eval.streams import REASONS

if TYPE_CHECKING:
    from eval.streams import TokenStream

COLUMNS = (
    "label",
    "length",
    "method",
    "perplexity",
    "loss",
    "word_perplexity",
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


def sweep(
    models: Sequence[Path | str],
    lengths: Sequence[int],
    out: Path | str,
    *,
    text: Path | str | None = None,
    data: Path | str | None = None,
    document_separator: str | None = None,
    methods: Sequence[str] = ("none",),
    max_tokens: int | None = None,
    min_document_tokens: int | None = None,
    training_length: int | None = None,
    stride: int | None = None,
    documents: str = "concatenated",
    factor: float | None = None,
    temperature_scope: str = "logits",
    dtype: str = "float32",
    device: str = "auto",
    batch_tokens: int = 8192,
) -> list[dict[str, Any]]:
    """Fills every cell (model, length, method) and writes the result files into `out`.

    Args:
        text, data: a text file or prepared data; exactly one of them.
        document_separator: regular expression between the documents of `text`; None for one.
        methods: see `resolve_methods`, which knows the sets ("all",) and ("paper",).
        max_tokens: to score at most.
        min_document_tokens: of documents="per-document"; default: the largest length.
        training_length: in place of what each model's folder says.
        stride, documents, factor, temperature_scope, dtype, device, batch_tokens: see `Protocol`.

    Returns:
        One row per cell, with the keys `COLUMNS` and `positions` (see `position_curve`).

    Raises:
        UserError: bad input, before anything is computed where that is possible; or lengths that
            did not fit into memory, after everything else is done and written.
    """
    protocol = Protocol(stride, documents, factor, temperature_scope, dtype, device, batch_tokens)
    lengths = sorted(set(lengths))
    choose_device(device)  # an absent one ends the sweep before anything is read
    subjects = _subjects(models, tuple(methods), protocol, training_length)
    streams = sweep_streams(
        subjects,
        lengths[-1],
        text=text,
        data=data,
        separator=document_separator,
        max_tokens=max_tokens,
        document_tokens=(min_document_tokens or lengths[-1]) if documents != DOCUMENTS[0] else None,
    )
    for account in dict.fromkeys(stream.account for stream in streams):
        print(account, file=sys.stderr)
    rows, missing = _fill(subjects, streams, lengths, protocol, Path(out))
    if missing:
        raise UserError(
            f"did not fit into memory: {', '.join(missing)} (label, method, length); "
            f"the {len(rows)} others are in {out}"
        )
    return rows


def _fill(
    subjects: Sequence[Subject],
    streams: Sequence[TokenStream],
    lengths: Sequence[int],
    protocol: Protocol,
    out: Path,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of all cells, written after each one and drawn; and the names of those too large."""
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
    return rows, missing


def _subjects(
    models: Sequence[Path | str],
    methods: tuple[str, ...],
    protocol: Protocol,
    training_length: int | None,
) -> list[Subject]:
    folders = [model_folder(path) for path in models]
    _refuse_repeated(folders)
    configs = [model_config(folder) for folder in folders]
    found = []
    for folder, label, config in zip(folders, _labels(folders), configs, strict=True):
        chosen = resolve_methods(config, methods, label)
        trained = training_length or trained_length(folder, config)
        check_scaling(config, chosen, label, trained, protocol)
        found.append((folder, label, config, trained, chosen))
    refuse_idle_options(protocol, {method for *_, chosen in found for method in chosen})
    # Reading the weights takes a while: after everything that can be wrong.
    return [Subject(*values, folder_sha256(values[0])) for values in found]


def _refuse_repeated(folders: Sequence[Path]) -> None:
    places = [folder.resolve() for folder in folders]
    for index, folder in enumerate(folders):
        if places[index] in places[:index]:
            raise UserError(f"model {folder}: given twice; its lines would be the same")


def _labels(folders: Sequence[Path]) -> list[str]:
    """Short names: the run's for RUN/model, else the folder's; the path where two agree."""
    resolved = [folder.resolve() for folder in folders]
    names = [path.parent.name if path.name == "model" else path.name for path in resolved]
    return [
        name if names.count(name) == 1 else str(folder)
        for name, folder in zip(names, folders, strict=True)
    ]


def _write_tables(
    out: Path, rows: list[dict[str, Any]], stream: TokenStream, protocol: Protocol
) -> None:
    from eval.provenance import provenance

    write_json(
        out / "length_sweep.json",
        {
            "text": stream.source,
            "protocol": protocol.describe(),
            "rows": [{name: row[name] for name in (*COLUMNS, "positions")} for row in rows],
            **provenance(),
        },
    )
    with replacing(out / "length_sweep.csv") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def _draw(rows: list[dict[str, Any]], out: Path) -> None:
    from eval.figures import length_figure, save_figure
    from eval.length_sweep_figures import position_figure

    save_figure(length_figure(rows), out / "length_sweep")
    save_figure(position_figure(rows), out / "loss_by_position")


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m eval.length_sweep", description="Perplexity against context length."
    )
    parser.add_argument(
        "models", nargs="+", type=path_name, metavar="MODEL", help="transformers or run folder"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=path_name, metavar="FILE", help="UTF-8 text")
    source.add_argument(
        "--data", type=path_name, metavar="DIR", help="prepared data; its validation split"
    )
    lengths = whole_numbers(limits.CONTEXT, "256,512")
    parser.add_argument("--lengths", type=lengths, required=True, metavar="256,512,...")
    parser.add_argument(
        "--methods",
        default="none",
        help="of none,pi,pi+temperature,yarn (rotary positions) and none,temperature (without); "
        "all: those that exist for each model; paper: those of the paper's figure (default: none)",
    )
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument(
        "--max-tokens", type=whole(limits.SCORED_TOKENS), metavar="N", help="score at most N tokens"
    )
    group = parser.add_argument_group("protocol")
    group.add_argument(
        "--stride",
        type=whole(limits.CONTEXT),
        metavar="N",
        help="move windows on by N tokens (default: the length)",
    )
    group.add_argument(
        "--documents",
        choices=DOCUMENTS,
        default=DOCUMENTS[0],
        help="whether windows cross the ends of documents (default: they do)",
    )
    group.add_argument(
        "--document-separator", metavar="REGEX", help="between the documents of --text"
    )
    group.add_argument(
        "--min-document-tokens",
        type=whole(limits.SCORED_TOKENS),
        metavar="N",
        help="per-document: leave shorter documents out (default: the largest length)",
    )
    group = parser.add_argument_group("scaling")
    group.add_argument(
        "--factor",
        type=number(limits.SCALING_FACTOR),
        metavar="S",
        help="one scaling factor for all lengths (default: test length / training length, >= 1)",
    )
    group.add_argument(
        "--temperature-scope",
        choices=("logits", "rotary"),
        default="logits",
        help="what the temperature acts on; rotary: the rotated channels, as in transformers",
    )
    group.add_argument(
        "--training-length",
        type=whole(limits.CONTEXT),
        metavar="N",
        help="default: what the model's folder says",
    )
    group = parser.add_argument_group("computing")
    group.add_argument("--dtype", choices=DTYPES, default="float32")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    group.add_argument(
        "--batch-tokens",
        type=whole(limits.BATCH_TOKENS),
        default=8192,
        metavar="N",
        help="tokens per forward pass",
    )
    add_skip_checksums(parser)
    return parser


@command
def main() -> None:
    arguments = parser().parse_args()
    check_output(arguments.out)
    _check(arguments)
    quiet_transformers()
    options = vars(arguments)
    with comparing_files(skip=options.pop("skip_checksums")):
        rows = sweep(
            options.pop("models"),
            options.pop("lengths"),
            options.pop("out"),
            methods=[method.strip() for method in options.pop("methods").split(",")],
            **options,
        )
    print(table(rows))


def _check(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other."""
    largest = max(arguments.lengths)
    if arguments.stride is not None and arguments.stride > largest:
        raise UserError(
            f"--stride {arguments.stride}: does nothing, the largest of --lengths is {largest}"
        )
    if arguments.max_tokens is not None and arguments.max_tokens < largest:
        raise UserError(
            f"--max-tokens {arguments.max_tokens}: must be at least the largest of --lengths, "
            f"{largest}"
        )
    if arguments.min_document_tokens and arguments.documents != "per-document":
        raise UserError("--min-document-tokens: only with --documents per-document")
    if arguments.document_separator is not None and arguments.text is None:
        raise UserError(
            "--document-separator: only with --text; prepared data know their documents"
        )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The perplexities as aligned text: a line per model and method, a column per length."""
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["method"], row["length"]): row["perplexity"] for row in rows}
    names = list(dict.fromkeys((row["label"], row["method"]) for row in rows))
    width = max(len(f"{label} ({method})") for label, method in names)
    lines = [" " * width + "".join(f"{length:>10}" for length in lengths)]
    for label, method in names:
        values = [cells.get((label, method, length)) for length in lengths]
        shown = "".join(f"{'n/a' if value is None else f'{value:.4g}':>10}" for value in values)
        lines.append(f"{f'{label} ({method})':<{width}}{shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
