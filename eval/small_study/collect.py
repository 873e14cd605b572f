"""From the folders of finished runs to one summary."""

from __future__ import annotations

import dataclasses
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.core.files import finite
from eval.common.models import folder_sha256
from eval.common.provenance import provenance
from eval.common.result_files import read_sweep
from eval.common.runs import Run, read_run, unigram_loss
from eval.lab import contrasts as comparison
from eval.small_study.attention import attention_of
from eval.small_study.execute import (
    check_precisions,
    commands,
    read_result,
    result_path,
    sweep_folder,
    unfinished,
)
from eval.small_study.plan import Job, Study, tuning_seeds
from eval.small_study.questions import MODELS, NONE
from eval.small_study.tables import SHARPNESS
from eval.small_study.tune import known

if TYPE_CHECKING:
    from cat_lm.config import RunConfig
    from eval.small_study.tune import Tuned

RULE = " ".join((comparison.__doc__ or "").split("\n\n", 1)[1].split())


def collect(study: Study, rates: Mapping[str, Tuned]) -> dict[str, Any]:
    """Everything that summary.json holds, from the runs that are finished.

    Args:
        rates: model -> the learning rate that was chosen; empty where none was.

    Raises UserError where no run is, or where the runs were trained in different precisions or
    the sweeps made on different tokens.
    """
    missing = {job.name for job in unfinished(study.jobs())}
    # Without its rate a model's runs are of no study.
    missing |= {job.name for job in study.jobs() if study.rates and job.model not in rates}
    jobs = [job for job in study.jobs() if job.name not in missing]
    if not jobs:
        raise UserError(f"--out {study.out}: holds no finished run")
    records = [read_result(job) for job in jobs]
    diverged = [job for job, record in zip(jobs, records, strict=True) if record["diverged"]]
    runs = {job: read_run(job.folder) for job in jobs}
    finished = [job for job in jobs if job not in diverged]
    config = study.config(jobs[0])
    trained = config.data.context_length
    texts = {name: _text(study, name, finished) for name in study.texts()}
    return {
        "size": study.size.name,
        "question": {"name": study.question, "text": study.asked.text},
        "training_length": trained,
        # As planned: a run that diverged has come less far.
        "training_tokens": _tokens(config),
        "tuning_seeds": list(tuning_seeds(study.tuning_seeds)) if study.rates else None,
        "tuning_tokens": _tokens(study.config(study.tuning_jobs()[0])) if study.rates else None,
        "unigram_loss": unigram_loss([runs[jobs[0]]]),
        "data_fingerprint": runs[jobs[0]].data,
        "seeds": list(study.seeds),
        "missing": sorted(missing),
        "diverged": [job.name for job in diverged],
        "trained_with": _trained_with(study, jobs),
        "models": [_model(model, jobs, runs, records, rates) for model in study.models],
        **(_attention(study, finished) if study.asked.attention else {}),
        "rule": RULE,
        **texts.pop(""),
        "held_out": texts,
        "commands": {job.name: _typed(study, job) for job in jobs},
        **provenance(),
    }


def _tokens(config: RunConfig) -> int:
    """Count what a run trains on."""
    return config.total_steps * config.tokens_per_step


def _trained_with(study: Study, jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """The commits, precisions, threads and runs at once that runs were trained with, and where.

    Also those that chose rates.
    """
    every = [*(job for job in known(study)[0] if result_path(job).is_file()), *jobs]
    check_precisions(study, every, {})
    records = [read_result(job) for job in every]
    keys = ("commit", "precision", "threads", "parallel", "reused", "machine")
    return {key: list(dict.fromkeys(record[key] for record in records)) for key in keys}


def _attention(study: Study, jobs: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """Return how sharply each model attends, and the question's differences of it, paired by seed.

    These intervals are corrected for one another: they are a table of their own.
    """
    measured = {job: attention_of(study, job) for job in jobs}
    found, differences = [], []
    runs = {
        model: {job.seed: one for job, one in measured.items() if job.model == model}
        for model in study.models
    }
    for model, own in runs.items():
        if not own:
            continue
        line: dict[str, Any] = {"model": model, "runs": own}
        for key in SHARPNESS:
            summary = comparison.summarise([one[key] for one in own.values()])
            line[key] = dataclasses.asdict(summary) | {"asked": len(study.seeds)}
        found.append(line)
    lost = diverged_rows(study)
    for key in SHARPNESS:
        values = {
            model: dict.fromkeys(lost[model], math.nan)
            | {seed: one[key] for seed, one in own.items()}
            for model, own in runs.items()
        }
        made = len(SHARPNESS) * len(study.contrasts)
        for a, b in study.contrasts:
            if difference := comparison.compare(values[a], values[b], made):
                where = {"model": a, "minus": b, "of": key}
                differences.append(where | finite(dataclasses.asdict(difference)))
    return {"attention": found, "attention_comparisons": differences}


def _text(study: Study, name: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """Return what was measured on one of the study's texts."""
    swept = {job: _sweep(job, name) for job in jobs}
    if len({row["tokens_sha256"] for rows in swept.values() for row in rows}) > 1:
        raise UserError(f"--out {study.out}: the runs were scored on different tokens")
    rows = [
        {**_row(row), "model": job.model, "seed": job.seed}
        for job, found in swept.items()
        for row in found
    ]
    return {
        "data": str(study.texts()[name]),
        "scored_tokens": rows[0]["tokens"] if rows else None,
        "documents": rows[0]["document_count"] if rows else None,
        "cells": _cells(rows, study.models, len(study.seeds)),
        "comparisons": _comparisons(study, swept),
        "rows": rows,
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("length", "method", "loss", "perplexity", "bits_per_byte", "standard_error")
    keys += ("tokens", "tokens_sha256", "document_count", "groups", "group_kind")
    return {key: row[key] for key in keys}


def _sweep(job: Job, name: str) -> list[dict[str, Any]]:
    """The rows of a run's sweep over one of the study's texts, of the weights that it exported."""
    file, record = sweep_folder(job, name) / "length_sweep.json", result_path(job)
    found = read_sweep(file).get("rows", [])
    if not found or {row["model_sha256"] for row in found} != {folder_sha256(job.folder / "model")}:
        what = "is of other weights than the export's" if found else "is absent"
        raise UserError(f"{file}: {what}; remove {record} and start the study again")
    return found


def _typed(study: Study, job: Job) -> list[str]:
    return [shlex.join(["python", *arguments]) for arguments in commands(study, job).values()]


def _model(
    model: str,
    jobs: Sequence[Job],
    runs: dict[Job, Run],
    records: Sequence[dict[str, Any]],
    rates: Mapping[str, Tuned],
) -> dict[str, Any]:
    """Describe a model and its trainings."""
    own = [job for job in jobs if job.model == model]
    speeds = [runs[job].tokens_per_second for job in own if runs[job].tokens_per_second]
    measured = [r for j, r in zip(jobs, records, strict=True) if j in own and not r["reused"]]
    seconds = [r["seconds"] for r in measured]
    config = runs[own[0]].config if own else None
    return {
        "model": model,
        "label": MODELS[model],
        "rate": config.optimizer.lr if config else None,
        "tuned": _tuned(rates[model]) if model in rates else None,
        "seeds": [job.seed for job in own],
        # A run that diverged has no export.
        "parameters": next(filter(None, (runs[job].export.get("parameters") for job in own)), None),
        "precision": config.train.precision if config else None,
        "position_embedding": config
        and config.architecture.summary(config.model).facts.get("position_embedding"),
        "skipped_steps": sum(runs[job].skipped for job in own),
        "validation": {job.seed: runs[job].validation for job in own},
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds_per_run": statistics.median(seconds) if seconds else None,
    }


def _cells(
    rows: Sequence[dict[str, Any]], models: Sequence[str], asked: int
) -> list[dict[str, Any]]:
    """Mean and spread over seeds of every model, method and length; `asked` says of how many."""
    cells = []
    for model in models:
        own = [row for row in rows if row["model"] == model]
        for method, length in dict.fromkeys((row["method"], row["length"]) for row in own):
            found = [r for r in own if (r["method"], r["length"]) == (method, length)]
            cell: dict[str, Any] = {"model": model, "method": method, "length": length}
            for key in ("loss", "perplexity", "bits_per_byte"):
                values = [row[key] for row in found if row[key] is not None]
                summary = comparison.summarise(values) if values else None
                cell[key] = dataclasses.asdict(summary) | {"asked": asked} if summary else None
            cells.append(cell)
    return cells


def _tuned(found: Tuned) -> dict[str, Any]:
    runs = {f"{rate:g}": finite(losses) for rate, losses in found.runs.items()}
    losses = {f"{rate:g}": finite(loss) for rate, loss in found.losses.items()}
    return {"rate": found.rate, "edge": found.edge, "losses": losses, "runs": runs}


def _comparisons(
    study: Study, swept: Mapping[Job, Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The question's differences, at the lengths and by the methods that it is compared by."""
    cells: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}  # by seed
    for job, rows in swept.items():
        for row in rows:
            place = (job.model, row["length"], row["method"])
            cells.setdefault(place, {})[job.seed] = row
    found, lost = [], diverged_rows(study)

    def at(model: str, length: int, method: str) -> dict[int, dict[str, Any]]:
        # Models without positions to scale are read as they are.
        read = method if (model, length, method) in cells else NONE
        return lost[model] | cells.get((model, length, read), {})

    made = study.comparisons()
    for models, length, method in study.places():
        rows = [at(model, length, method) for model in models]
        match models:
            case (a,):
                names, sides = (a, a), (*rows, at(a, study.trained_length, NONE))
            case (a, b):
                names, sides = (a, b), rows
            case (a, b, c, d):
                # (a − b) − (c − d) is (a + d) − (c + b): sums of two models' losses, paired alike.
                names = f"{a} − {b}", f"{c} − {d}"
                sides = _sums(rows[0], rows[3]), _sums(rows[2], rows[1])
        if difference := compared(*sides, made):
            where = {"model": names[0], "minus": names[1], "length": length, "method": method}
            found.append(where | difference)
    return found


def compared(
    ours: Mapping[int, dict[str, Any]], theirs: Mapping[int, dict[str, Any]], made: int
) -> dict[str, Any] | None:
    """The difference of two models' losses, paired by seed and by document; None without one.

    Args:
        ours, theirs: seed -> row with `loss`, `document_nlls` and `document_tokens`; the loss of
            a run that diverged is None, and leaves no interval.
        made: comparisons that are made together.
    """
    losses = (
        {seed: math.nan if row["loss"] is None else row["loss"] for seed, row in side.items()}
        for side in (ours, theirs)
    )
    difference = comparison.compare(*losses, made, *_document_error(ours, theirs))
    return finite(dataclasses.asdict(difference)) if difference else None


def diverged_rows(study: Study) -> dict[str, dict[int, dict[str, Any]]]:
    """Return rows without a loss for the runs that diverged: model -> seed -> row."""
    found: dict[str, dict[int, dict[str, Any]]] = {model: {} for model in study.models}
    for job in study.jobs():
        if result_path(job).is_file() and read_result(job)["diverged"]:
            found[job.model][job.seed] = {"loss": None}
    return found


def _sums(a: Mapping[int, dict[str, Any]], b: Mapping[int, dict[str, Any]]) -> dict[int, Any]:
    """Add the losses of two models, of seeds that both have, as of one row.

    A seed that one of them has lost is lost, whatever the other's is.
    """
    lost = {seed for side in (a, b) for seed, row in side.items() if row["loss"] is None}
    found = {seed: {"loss": None} for seed in lost}
    for seed in (a.keys() & b.keys()) - lost:
        row = dict(a[seed], loss=a[seed]["loss"] + b[seed]["loss"])
        both = a[seed].get("document_nlls"), b[seed].get("document_nlls")
        row["document_nlls"] = None if None in both else [x + y for x, y in zip(*both, strict=True)]
        found[seed] = row
    return found


def _document_error(
    a: Mapping[int, dict[str, Any]], b: Mapping[int, dict[str, Any]]
) -> tuple[float | None, int | None]:
    """The standard error over documents of the difference of two models, mean over seeds.

    Returns it and the number of documents that have a scored token; None for each where a row
    does not say what its documents' losses are.

    Args:
        a, b: seed -> row of a sweep over the same documents.
    """
    pairs = [(a[seed], b[seed]) for seed in a.keys() & b.keys()]
    if not pairs or any(row.get("document_nlls") is None for pair in pairs for row in pair):
        return None, None
    differences = [
        statistics.fmean(ours - theirs for ours, theirs in values)
        for values in zip(
            *(zip(x["document_nlls"], y["document_nlls"], strict=True) for x, y in pairs),
            strict=True,
        )
    ]
    tokens = pairs[0][0]["document_tokens"]
    return comparison.ratio_error(differences, tokens), sum(map(bool, tokens))
