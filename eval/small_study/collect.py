"""From the folders of finished runs to one summary."""

from __future__ import annotations

import dataclasses
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from cat_lm.errors import UserError
from eval.common import comparison
from eval.common.provenance import provenance
from eval.common.runs import EVALUATION, Run, read_run, unigram_loss
from eval.small_study.execute import commands, read_result, result_path, unfinished
from eval.small_study.plan import BASELINE, MODELS, Job, Study

RULE = " ".join((comparison.__doc__ or "").split("\n\n", 1)[1].split())


def collect(study: Study) -> dict[str, Any]:
    """Everything that summary.json holds, from the runs that are finished.

    Raises UserError where no run is, or where the sweeps were made on different tokens.
    """
    missing = {job.name for job in unfinished(study.jobs())}
    jobs = [job for job in study.jobs() if job.name not in missing]
    if not jobs:
        raise UserError(f"--out {study.out}: holds no finished run")
    records = [read_result(job) for job in jobs]
    diverged = [job for job, record in zip(jobs, records, strict=True) if record["diverged"]]
    runs = {job: read_run(job.folder) for job in jobs}
    rows = [
        {**_row(row), "model": job.model, "seed": job.seed}
        for job in jobs
        if job not in diverged
        for row in _sweep(job, runs[job])
    ]
    if len({row["tokens_sha256"] for row in rows}) > 1:
        raise UserError(f"--out {study.out}: the runs were scored on different tokens")
    config = study.config(jobs[0])
    trained = config.data.context_length
    return {
        "size": study.size.name,
        "training_length": trained,
        # As planned: a run that diverged has come less far.
        "training_tokens": config.total_steps * config.tokens_per_step,
        "scored_tokens": rows[0]["tokens"] if rows else None,
        "documents": rows[0]["document_count"] if rows else None,
        "unigram_loss": unigram_loss([runs[jobs[0]]]),
        "data_fingerprint": next(iter(runs[jobs[0]].data), None),
        "seeds": list(study.seeds),
        "missing": sorted(missing),
        "diverged": [job.name for job in diverged],
        "models": [_model(model, jobs, runs, records) for model in study.models],
        "cells": _cells(rows, study.models),
        "rule": RULE,
        "baseline": BASELINE,
        "comparisons": _comparisons(rows, trained, study.models),
        "rows": rows,
        "commands": {job.name: _typed(study, job) for job in jobs},
        **provenance(),
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("length", "method", "loss", "perplexity", "bits_per_byte", "standard_error")
    keys += ("tokens", "tokens_sha256", "document_count")
    return {key: row.get(key) for key in keys}


def _sweep(job: Job, run: Run) -> list[dict[str, Any]]:
    if not run.sweep:
        file, record = run.folder / EVALUATION / "length_sweep.json", result_path(job)
        what = "is of other weights than the export's" if "sweep" in run.outdated else "is absent"
        raise UserError(f"{file}: {what}; remove {record} and start the study again")
    return run.sweep["rows"]


def _typed(study: Study, job: Job) -> list[str]:
    return [shlex.join(["python", *arguments]) for arguments in commands(study, job).values()]


def _model(
    model: str, jobs: Sequence[Job], runs: dict[Job, Run], records: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Describe a model and its trainings."""
    own = [job for job in jobs if job.model == model]
    speeds = [runs[job].tokens_per_second for job in own if runs[job].tokens_per_second]
    seconds = [
        r["seconds"] for j, r in zip(jobs, records, strict=True) if j in own and "seconds" in r
    ]
    config = runs[own[0]].config if own else None
    return {
        "model": model,
        "label": MODELS[model],
        "seeds": [job.seed for job in own],
        "parameters": runs[own[0]].export.get("parameters") if own else None,
        "precision": config.train.precision if config else None,
        "position_embedding": config.architecture.facts(config.model).get("position_embedding")
        if config
        else None,
        "skipped_steps": sum(runs[job].skipped for job in own),
        "validation": {job.seed: runs[job].validation for job in own},
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds_per_run": statistics.median(seconds) if seconds else None,
    }


def _cells(rows: Sequence[dict[str, Any]], models: Sequence[str]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of every model, method and length."""
    cells = []
    for model in models:
        own = [row for row in rows if row["model"] == model]
        for method, length in dict.fromkeys((row["method"], row["length"]) for row in own):
            found = [r for r in own if (r["method"], r["length"]) == (method, length)]
            cell: dict[str, Any] = {"model": model, "method": method, "length": length}
            for key in ("loss", "perplexity", "bits_per_byte"):
                values = [row[key] for row in found if row[key] is not None]
                summary = comparison.summarise(values) if values else None
                cell[key] = dataclasses.asdict(summary) if summary else None
            cells.append(cell)
    return cells


def _comparisons(
    rows: Sequence[dict[str, Any]], trained: int, models: Sequence[str]
) -> list[dict[str, Any]]:
    """Every pair of models at every length, both as they were trained (method none)."""
    losses: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if row["method"] == "none" and row["loss"] is not None:
            losses.setdefault((row["model"], row["length"]), {})[row["seed"]] = row["loss"]
    found = []
    for length in sorted({length for _, length in losses}):
        for index, a in enumerate(models):
            for b in models[:index]:
                difference = comparison.compare(
                    losses.get((a, length), {}), losses.get((b, length), {})
                )
                if difference:
                    pair = {"model": a, "minus": b, "length": length}
                    found.append(pair | dataclasses.asdict(difference))
    return found
