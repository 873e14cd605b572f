"""`python -m eval.length_sweep MODEL [MODEL ...]`: perplexity against context length.

The text is a file (`--text`) or the validation split of prepared data (`--data`). Every model is
scored on the same tokens at every length (see eval/perplexity.py for the protocol): their number
is the largest multiple of the largest length that the text (and `--max-tokens`) allows. Models
with another tokenizer than the first one's get the same text in their own tokens; compare those
by bits per byte.

OUT gets length_sweep.json, .csv, .png and .svg, and cells/, one file for each finished
combination, which a later call does not compute again.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.errors import UserError, command
from cat_lm.files import replacing, sha256, write_json
from cat_lm.pretrained import (
    DTYPES,
    load_model,
    load_tokenizer,
    model_folder,
    quiet_transformers,
    weight_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eval.streams import TokenStream

METHODS = {"none": "the model as it was trained"}
COLUMNS = (
    "label",
    "length",
    "method",
    "perplexity",
    "loss",
    "bits_per_byte",
    "standard_error",
    "tokens",
    "bytes",
    "groups",
    "group_kind",
    "training_length",
    "parameters",
    "model",
    "model_sha256",
    "tokens_sha256",
    "dtype",
    "seconds",
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to be swept: where it is, what it is called, and its own tokens of the text."""

    folder: Path
    label: str
    sha256: str
    training_length: int | None
    stream: TokenStream


def sweep(
    models: Sequence[Path | str],
    lengths: Sequence[int],
    out: Path | str,
    *,
    text: Path | str | None = None,
    data: Path | str | None = None,
    methods: Sequence[str] = ("none",),
    max_tokens: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    batch_tokens: int = 8192,
) -> list[dict[str, Any]]:
    """Fills every cell (model, length, method) and writes the result files into `out`.

    Exactly one of `text` and `data` is given. Returns one row per cell, with the keys `COLUMNS`.
    Raises UserError for bad input, before anything is computed where that is possible.
    """
    check_methods(methods)
    lengths = sorted(set(lengths))
    subjects = _subjects(models, max(lengths), text=text, data=data, max_tokens=max_tokens)
    cells = Path(out) / "cells"
    rows = []
    for subject in subjects:
        scorer = _Scorer(subject, dtype, device, batch_tokens)
        for method in methods:
            for length in lengths:
                rows.append(scorer.cell(cells, length, method))
                # After every cell, so that what is finished can be looked at.
                _write_tables(Path(out), rows, subjects[0].stream)
    from eval.figures import length_figure, save_figure

    save_figure(length_figure(rows), Path(out) / "length_sweep")
    return rows


def check_methods(methods: Sequence[str]) -> None:
    """Raises UserError for a method that does not exist, naming those that do."""
    for method in methods:
        if method not in METHODS:
            raise UserError(f"--methods {method}: unknown; known: {', '.join(METHODS)}")


class _Scorer:
    """Computes cells of one model, which is loaded when the first unfinished one is met."""

    def __init__(self, subject: Subject, dtype: str, device: str, batch_tokens: int) -> None:
        self.subject, self.dtype, self.device = subject, dtype, device
        self.batch_tokens = batch_tokens
        self.model = None

    def cell(self, folder: Path, length: int, method: str) -> dict[str, Any]:
        subject = self.subject
        key = {
            "model_sha256": subject.sha256,
            "tokens_sha256": subject.stream.sha256,
            "length": length,
            "method": method,
            "dtype": self.dtype,
            "protocol": "concatenated, non-overlapping windows, every token after the first",
        }
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        path = folder / f"{name}.json"
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
        else:
            values = key | self._compute(length)
            write_json(path, values)
        # Names may change between calls without changing any number.
        return values | {
            "label": subject.label,
            "model": str(subject.folder),
            "training_length": subject.training_length,
        }

    def _compute(self, length: int) -> dict[str, Any]:
        from tqdm import tqdm

        from eval.perplexity import score_tokens

        if self.model is None:
            self.model = load_model(self.subject.folder, dtype=self.dtype, device=self.device)
        stream = self.subject.stream
        begin = time.perf_counter()
        label = f"{self.subject.label}, length {length}"
        with tqdm(total=len(stream.tokens) - 1, unit="tok", desc=label, disable=None) as bar:
            score = score_tokens(
                self.model,
                stream.tokens,
                length,
                num_bytes=stream.num_bytes,
                eod_id=stream.eod_id,
                batch_tokens=self.batch_tokens,
                progress=bar.update,
            )
        seconds = time.perf_counter() - begin
        print(f"{label}: perplexity {score.perplexity:.4g} ({seconds:.1f} s)", file=sys.stderr)
        values = dataclasses.asdict(score) | {
            "loss": score.loss,
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
            "parameters": self.model.num_parameters(),
            "seconds": round(seconds, 3),
        }
        # JSON has no infinities; a diverged model's numbers are absent, not invalid.
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in values.items()
        }


def _subjects(
    models: Sequence[Path | str],
    largest: int,
    *,
    text: Path | str | None,
    data: Path | str | None,
    max_tokens: int | None,
) -> list[Subject]:
    folders = [model_folder(path) for path in models]
    tokenizers = [load_tokenizer(folder) for folder in folders]
    streams = _streams(tokenizers, largest, text=text, data=data, max_tokens=max_tokens)
    return [
        Subject(folder, label, _model_sha256(folder), _training_length(folder), stream)
        for folder, label, stream in zip(folders, _labels(folders), streams, strict=True)
    ]


def _streams(
    tokenizers: Sequence[PreTrainedTokenizerBase],
    largest: int,
    *,
    text: Path | str | None,
    data: Path | str | None,
    max_tokens: int | None,
) -> list[TokenStream]:
    """Each model's tokens of the same text; the range is fixed by the first and `largest`."""
    from eval.streams import read_text, split_stream, text_stream

    first = tokenizers[0]
    if data is not None:
        # Every tokenizer is compared with the data's own.
        streams = [split_stream(data, tokenizer, max_tokens) for tokenizer in tokenizers]
        return [_whole_windows(stream, largest, max_tokens, first) for stream in streams]
    content = read_text(text)
    stream = _whole_windows(text_stream(content, first, str(text)), largest, max_tokens, first)
    streams = []
    for tokenizer in tokenizers:
        if tokenizer.get_vocab() == first.get_vocab():
            streams.append(stream)
        else:
            scored = first.decode(stream.tokens[1:], clean_up_tokenization_spaces=False)
            streams.append(text_stream(scored, tokenizer, str(text)))
    return streams


def _whole_windows(
    stream: TokenStream,
    largest: int,
    max_tokens: int | None,
    tokenizer: PreTrainedTokenizerBase,
) -> TokenStream:
    available = len(stream.tokens) - 1
    limit = min(available, max_tokens or available)
    if limit < largest:
        why = f"--max-tokens is {limit}" if limit < available else f"it has {available} tokens"
        raise UserError(
            f"{stream.source}: too short for length {largest} ({why}); "
            f"use lengths up to {limit} or a longer text"
        )
    return stream.cut(limit // largest * largest, tokenizer)


def _model_sha256(folder: Path) -> str:
    files = [folder / "config.json", *weight_files(folder)]
    return hashlib.sha256("".join(sha256(path) for path in files).encode()).hexdigest()


def _training_length(folder: Path) -> int | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("max_position_embeddings")


def _labels(folders: Sequence[Path]) -> list[str]:
    """Short names: the run's for RUN/model, else the folder's; the path where two agree."""
    resolved = [folder.resolve() for folder in folders]
    names = [path.parent.name if path.name == "model" else path.name for path in resolved]
    return [
        name if names.count(name) == 1 else str(folder)
        for name, folder in zip(names, folders, strict=True)
    ]


def _write_tables(out: Path, rows: list[dict[str, Any]], stream: TokenStream) -> None:
    from eval.provenance import provenance

    rows = [{column: row[column] for column in COLUMNS} for row in rows]
    write_json(
        out / "length_sweep.json",
        {
            "text": stream.source,
            "protocol": {
                "scored": "every token after the first, once; the same ones at every length",
                "windows": "non-overlapping",
                "documents": "concatenated",
            },
            "rows": rows,
            **provenance(),
        },
    )
    with replacing(out / "length_sweep.csv") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _whole_numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers such as 256,512") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every length must be at least 1")
    return values


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.length_sweep", description="Perplexity against context length."
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="transformers or run folder")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="UTF-8 text")
    source.add_argument("--data", metavar="DIR", help="prepared data; its validation split")
    parser.add_argument("--lengths", type=_whole_numbers, required=True, metavar="256,512,...")
    parser.add_argument("--methods", default="none", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="score at most N tokens")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per forward pass")
    arguments = parser.parse_args()
    check_methods(arguments.methods.split(","))
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise UserError(f"--max-tokens {arguments.max_tokens}: must be at least 1")
    quiet_transformers()
    rows = sweep(
        arguments.models,
        arguments.lengths,
        arguments.out,
        text=arguments.text,
        data=arguments.data,
        methods=arguments.methods.split(","),
        max_tokens=arguments.max_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
        batch_tokens=arguments.batch_tokens,
    )
    print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The perplexities as aligned text: a line per model and method, a column per length."""
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["label"], row["method"], row["length"]): row["perplexity"] for row in rows}
    names = list(dict.fromkeys((row["label"], row["method"]) for row in rows))
    width = max(len(f"{label} ({method})") for label, method in names)
    lines = [" " * width + "".join(f"{length:>10}" for length in lengths)]
    for label, method in names:
        values = "".join(
            f"{'n/a' if (value := cells[label, method, length]) is None else f'{value:.4g}':>10}"
            for length in lengths
        )
        lines.append(f"{f'{label} ({method})':<{width}}{values}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
