"""Read finished runs: what train.py, the export and the evaluations left in a run folder."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.core.readers import read_bytes
from cat_lm.data.corpus import block_counts, joint_fingerprint
from cat_lm.data.manifest import parse_manifest
from cat_lm.pretrained.loading import weight_files
from cat_lm.training.checkpoint import is_complete, read_run_state, step_folders
from eval.common.filters import Filters, read_filters
from eval.common.models import folder_sha256
from eval.common.result_files import (
    EVALUATION,
    ZERO_SHOT,
    Samples,
    Sweep,
    ZeroShot,
    read_export,
    read_metrics,
    read_result,
)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        label: the folder's name.
        train: (tokens, nats per token) of every step with a finite loss.
        validation: (tokens, nats per token) of every validation with a finite loss.
        final: the last validation's record, finite or not; empty without one.
        tokens, steps: progress of the run.
        skipped: steps whose loss or gradient was not finite.
        tokens_per_second: median over the steps.
        data: the fingerprint of the data that it was trained on; None where it is not known.
        manifests: of these data by their folders; empty where the folders hold other data now, or
            none.
        export: the record of the exported model, empty without one.
        sweep, zero_shot, samples: what eval.length_sweep, eval.zero_shot and eval.samples measured
            of the weights that are exported now; empty without it. A sweep may be of several runs
            and lie in a folder beside this one.
        outdated: those of "sweep", "zero_shot", "samples" that are there, of other weights only.
        strangers: labels of rows in the run's sweep that are of other weights than its own.
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
    data: str | None
    manifests: dict[str, dict[str, Any]]
    export: dict[str, Any]
    sweep: dict[str, Any]
    zero_shot: dict[str, Any]
    samples: dict[str, Any]
    outdated: tuple[str, ...]
    strangers: tuple[str, ...]
    filters: Filters | None = field(repr=False)

    @property
    def parameters(self) -> int | None:
        """Return the exported model's parameter count; None without an export."""
        return self.export.get("parameters")

    @property
    def diverged(self) -> bool:
        """Return True if the last validation loss is not finite."""
        return bool(self.final) and not _finite(self.final["val_loss"])


def read_run(folder: Path | str) -> Run:
    """Read the run at `folder`.

    Raises:
        UserError: it is no run folder, has no steps, or holds a damaged file of results.
    """
    folder = Path(folder)
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise UserError(f"run {folder}: has no {name}; give the folder of a run of train.py")
    records = read_metrics(folder / "metrics.jsonl")
    steps = [r for r in records if "val_loss" not in r]
    validations = [r for r in records if "val_loss" in r]
    if not steps:
        raise UserError(f"run {folder}: its metrics.jsonl holds no training step")
    config = load_config(folder / "config.yaml")
    export = read_export(folder / "model" / "export.json")
    data, manifests = _trained_on(folder, config, export)
    speeds = [r["tokens_per_second"] for r in steps if r.get("tokens_per_second")]
    return Run(
        folder=folder,
        label=folder.resolve().name,
        config=config,
        train=[(r["tokens"], r["loss"]) for r in steps if _finite(r.get("loss"))],
        validation=[(r["tokens"], r["val_loss"]) for r in validations if _finite(r["val_loss"])],
        final=validations[-1] if validations else {},
        tokens=steps[-1]["tokens"],
        steps=steps[-1]["step"],
        skipped=sum(bool(r.get("skipped")) for r in steps),
        tokens_per_second=statistics.median(speeds) if speeds else None,
        data=data,
        manifests=manifests,
        export=export,
        filters=read_filters(folder / "model"),
        **_evaluations(folder),
    )


def _trained_on(
    folder: Path, config: RunConfig, export: dict[str, Any]
) -> tuple[str | None, dict[str, dict[str, Any]]]:
    """Find the fingerprint of a run's data, and their manifests where they are still there.

    What export or checkpoint recorded counts: the folders may have been prepared again since.
    """
    paths = {name: Path(name) / "manifest.json" for name in config.data.folders}
    manifests = {
        name: parse_manifest(read_bytes(path), str(path)) if path.is_file() else {}
        for name, path in paths.items()
    }
    present = _fingerprint(config, manifests) if all(manifests.values()) else None
    data = export.get("data_fingerprint") or _checkpoint_data(folder) or present
    return data, manifests if present and present == data else {}


def _checkpoint_data(folder: Path) -> str | None:
    for path in reversed(step_folders(folder / "checkpoints")):
        # One manifest may be damaged or removed meanwhile; the others have the same content.
        with contextlib.suppress(UserError, OSError):
            if is_complete(path):
                return read_run_state(path).data.fingerprint
    return None


def _fingerprint(config: RunConfig, manifests: dict[str, dict[str, Any]]) -> str:
    mixture = config.data.mixture
    if mixture is None:
        return manifests[config.data.path]["fingerprint"]
    parts = sorted((manifests[name]["fingerprint"], name) for name in mixture)
    fingerprints, names = zip(*parts, strict=True)
    return joint_fingerprint(fingerprints, block_counts(names, [mixture[name] for name in names]))


def _evaluations(folder: Path) -> dict[str, Any]:
    """Read the evaluations of a run, without those of other weights than its export's."""
    found = {
        "sweep": read_result(folder / EVALUATION / "length_sweep.json", Sweep),
        "zero_shot": read_result(folder / ZERO_SHOT / "zero_shot.json", ZeroShot),
        "samples": read_result(folder / EVALUATION / "samples.json", Samples),
    }
    shared = _shared_sweeps(folder)
    exported, own = folder / "model", "no weights"
    is_exported = (exported / "config.json").is_file() and weight_files(exported)
    # Hash the weights only if something was measured of them.
    if is_exported and (shared or any(found.values())):
        own = folder_sha256(exported)
    rows = found["sweep"].get("rows", [])
    kept = [row for row in rows if row["model_sha256"] == own]
    # The run's own sweep comes first; then the newest of several runs that has it.
    for sweep in [] if kept else shared:
        if kept := [row for row in sweep["rows"] if row["model_sha256"] == own]:
            found["sweep"], rows = sweep, kept
            break
    is_own = {
        "sweep": bool(kept),
        "zero_shot": found["zero_shot"].get("model", {}).get("sha256") == own,
        "samples": found["samples"].get("model_sha256") == own,
    }
    shown = {name: values if is_own[name] else {} for name, values in found.items()}
    if kept:
        shown["sweep"] = {**found["sweep"], "rows": kept}
    strangers = tuple(dict.fromkeys(row["label"] for row in rows if row not in kept))
    outdated = tuple(name for name in found if found[name] and not is_own[name])
    return {**shown, "outdated": outdated, "strangers": strangers}


def _shared_sweeps(folder: Path) -> list[dict[str, Any]]:
    """Read the sweeps that lie beside a run, or in runs beside it, the newest first."""
    parent, name = folder.resolve().parent, "length_sweep.json"
    paths = [path for place in ("*", f"*/{EVALUATION}") for path in parent.glob(f"{place}/{name}")]
    paths = [path for path in paths if folder.resolve() not in path.parents]
    sweeps = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        # A damaged one is reported by the report of its own run.
        with contextlib.suppress(UserError):
            sweeps.append(read_result(path, Sweep))
    return sweeps


def curves(runs: Sequence[Run]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the losses that `loss_figure` draws, by the runs' labels."""
    return {run.label: {"train": run.train, "validation": run.validation} for run in runs}


def sweep_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the rows of all length sweeps, under the runs' labels."""
    return [{**row, "label": run.label} for run in runs for row in run.sweep.get("rows", [])]


def unigram_loss(runs: Sequence[Run]) -> float | None:
    """Return the unigram model's loss on the held-out text.

    None where no run has its data still, or they were trained on different data.
    """
    found = [manifest for run in runs for manifest in run.manifests.values()]
    if len({run.data for run in runs}) > 1 or len({m["fingerprint"] for m in found}) != 1:
        return None
    return found[0]["unigram_loss"]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
