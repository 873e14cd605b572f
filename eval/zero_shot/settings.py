"""Declare the options of a zero-shot evaluation; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cat_lm.core import numbers
from cat_lm.core.cli import path
from eval.common.options import Option
from eval.common.precision import Dtype


def _folder(what: str) -> Option:
    return Option(what, kind=path, metavar="DIR")


@dataclass(frozen=True)
class Settings:
    """The settings of an evaluation, independent of the model; each field is an option."""

    data_dir: Annotated[Path | None, _folder("rows from DIR/TASK.jsonl, no network")] = None
    include_path: Annotated[Path | None, _folder("custom tasks, as YAML of the harness")] = None
    limit: Annotated[
        int | None, Option("score only the first N rows of every task", numbers.ROWS)
    ] = None
    batch_size: Annotated[
        int | None, Option("rows per batch, or auto (default)", numbers.BATCH, word="auto")
    ] = None
    max_length: Annotated[
        int | None,
        Option("context length; default: that of config.json", numbers.CONTEXT.at_least(2)),
    ] = None
    dtype: Annotated[
        Dtype,
        Option("auto: the file's; on a GPU bfloat16 for exports of bf16 runs in float32"),
    ] = "auto"
    device: Annotated[str, Option("device: auto, cpu, cuda, cuda:1, …")] = "auto"
    samples: Annotated[bool, Option("log every prompt and answer")] = False
    bootstrap_iterations: Annotated[
        int,
        Option(
            "bootstrap iterations for standard errors of perplexities; 0: no standard errors",
            numbers.BOOTSTRAP_ITERATIONS,
        ),
    ] = 1000
