"""Reading finished runs: what train.py, the export and the evaluations left in a run folder."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cat_lm.config import RunConfig, load_config
from cat_lm.errors import UserError
from eval.filters import Filters, read_filters

EVALUATION = "eval"  # folder in a run that holds what eval commands measured of it
ZERO_SHOT = "zero_shot"  # folder in a run where eval.zero_shot writes


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        label: the folder's name.
        train: (tokens, nats per token) of every step with a finite loss.
        validation: (tokens, nats per token) of every validation with a finite loss.
        final: the last validation's record.
        tokens, steps: how far the run has come.
        skipped: steps whose loss or gradient was not finite.
        tokens_per_second: median over the steps.
        manifest: of the prepared data, empty where the data are no longer there.
        export: the record of the exported model, empty without one.
        sweep: of eval.length_sweep, empty without one.
        zero_shot: of eval.zero_shot, empty without one.
        samples: of eval.samples, None without them.
        filters: None without convolutions or export.
    """

    folder: Path
    label: str
    config: RunConfig
    train: list[tuple[int, float]]
    validation: list[tuple[int, float]]
    final: dict[str, Any]
    tokens: int
    steps: int
    skipped: int
    tokens_per_second: float | None
    manifest: dict[str, Any]
    export: dict[str, Any]
    sweep: dict[str, Any]
    zero_shot: dict[str, Any]
    samples: dict[str, Any] | None
    filters: Filters | None = field(repr=False)

    @property
    def parameters(self) -> int | None:
        """Of the exported model; None without an export."""
        return self.export.get("parameters")


def read_run(folder: Path | str) -> Run:
    """Reads the run at `folder`. Raises UserError where it is no run folder or has no steps."""
    folder = Path(folder)
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"run {folder}: has no {name}; give the folder of a run of train.py")
    records = read_metrics(folder / "metrics.jsonl")
    steps = [r for r in records if "val_loss" not in r]
    validations = [r for r in records if _finite(r.get("val_loss"))]
    if not steps:
        raise UserError(f"run {folder}: its metrics.jsonl holds no training step")
    config = load_config(folder / "config.yaml")
    speeds = [r["tokens_per_second"] for r in steps if r.get("tokens_per_second")]
    return Run(
        folder=folder,
        label=folder.resolve().name,
        config=config,
        train=[(r["tokens"], r["loss"]) for r in steps if _finite(r.get("loss"))],
        validation=[(r["tokens"], r["val_loss"]) for r in validations],
        final=validations[-1] if validations else {},
        tokens=steps[-1]["tokens"],
        steps=steps[-1]["step"],
        skipped=sum(bool(r.get("skipped")) for r in steps),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        manifest=_json(Path(config.data.path) / "manifest.json") or {},
        export=_json(folder / "model" / "export.json") or {},
        sweep=_json(folder / EVALUATION / "length_sweep.json", "rows") or {},
        zero_shot=_json(folder / ZERO_SHOT / "zero_shot.json", "tasks") or {},
        samples=_json(folder / EVALUATION / "samples.json", "samples"),
        filters=read_filters(folder / "model"),
    )


def curves(runs: Sequence[Run]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """What `loss_figure` draws, for each run by its label."""
    return {run.label: {"train": run.train, "validation": run.validation} for run in runs}


def sweep_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The rows of all length sweeps, under the runs' labels."""
    return [{**row, "label": run.label} for run in runs for row in run.sweep.get("rows", [])]


def unigram_loss(runs: Sequence[Run]) -> float | None:
    """The unigram model's loss on the held-out text, where all runs have the same data."""
    fingerprints = {run.manifest.get("fingerprint") for run in runs}
    return runs[0].manifest.get("unigram_loss") if len(fingerprints) == 1 else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a kill has cut is left out."""
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number}: is not JSON") from None
    return records


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _json(path: Path, *keys: str) -> dict[str, Any] | None:
    """A file of results, None where there is none. Raises UserError where it is damaged.

    Args:
        keys: that it has to have.
    """
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from None
    if not isinstance(values, dict) or any(key not in values for key in keys):
        raise UserError(f"{path}: holds no {' and '.join(keys) or 'object'}; make it again")
    return values
