"""From finished runs to summary.json: the study's summary, and recall and cost beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cat_lm.counts import state_bytes
from cat_lm.training.estimate import flops_per_token, meta_model
from eval.common.precision import evaluation_dtype
from eval.lab import contrasts as comparison
from eval.rivals.measure import HeldOut, held_out, measured
from eval.rivals.rows import BASE, Comparison
from eval.rivals.text_recall import RECALL, SLICES
from eval.small_study.collect import collect, compared, diverged_rows
from eval.small_study.execute import read_result
from eval.small_study.plan import ROOT, Job

if TYPE_CHECKING:
    from eval.small_study.tune import Tuned

STATE_DTYPE = torch.bfloat16  # of the decoding state, where it need not be fp32


def summarise(study: Comparison, rates: Mapping[str, Tuned]) -> dict[str, Any]:
    """Everything that summary.json holds.

    Raises UserError where no run is finished, or a run's files are damaged.
    """
    summary = collect(study, rates)
    jobs = [job for job in study.jobs() if job.name not in summary["missing"]]
    scored = [job for job in jobs if not read_result(job)["diverged"]]
    folders = [ROOT / job.folder / "model" for job in scored]
    dtype = evaluation_dtype("auto", folders, "auto")
    documents = study.documents or study.size.documents
    lengths = max(study.lengths()), [study.recall_length]
    text = held_out(ROOT / study.data, documents, *lengths, study.skip_tokens)
    found = {job: measured(ROOT / job.folder, text, dtype) for job in scored}
    for model in summary["models"]:
        model |= costs(study, model["model"], text.counts.vocabulary)
    return summary | {
        "base": BASE,
        "recall": recall_summary(study, text, found),
    }


def costs(study: Comparison, model: str, vocabulary: int) -> dict[str, Any]:
    """Return what a row costs: FLOPs of a token in training, bytes of its state in decoding."""
    config = study.config(Job(model, 0, study.out))
    trained = config.data.context_length
    return {
        "flops_per_token": flops_per_token(config, vocabulary),
        "state_bytes": {
            str(n): round(state_bytes(meta_model(config, vocabulary), n, STATE_DTYPE))
            for n in (trained, max(study.lengths()))
        },
    }


def recall_summary(
    study: Comparison, text: HeldOut, found: Mapping[Job, Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """The losses of every slice, those of counts alone, and the comparisons of recall.

    Args:
        found: run -> rows of `measured`.
    """
    rows = [
        {"model": job.model, "seed": job.seed, **_short(row)}
        for job, own in found.items()
        for row in own
    ]
    counted = text.counts.bigram_nlls()
    return {
        "length": study.recall_length,
        "slices": list(SLICES),
        "training_split_tokens": text.counts.total + 1,
        "bigram": [_short(row) for length in text.lengths for row in text.rows(length, counted)],
        "cells": _cells(study, rows),
        "comparisons": _comparisons(study, text, found),
        "rows": rows,
    }


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("length", "slice", "loss", "tokens")}


def _cells(study: Comparison, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over seeds of every model, length and slice."""
    losses: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        if row["loss"] is not None:
            losses.setdefault((row["model"], row["length"], row["slice"]), []).append(row["loss"])
    return [
        {"model": model, "length": length, "slice": name}
        | {"loss": dataclasses.asdict(comparison.summarise(values)) | {"asked": len(study.seeds)}}
        for (model, length, name), values in sorted(
            losses.items(), key=lambda item: study.models.index(item[0][0])
        )
    ]


def _comparisons(
    study: Comparison, text: HeldOut, found: Mapping[Job, Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The rows' differences in the loss of recalled tokens, at each window."""
    made, lost = [], diverged_rows(study)
    for length in text.lengths:
        at = {model: dict(lost[model]) for model in study.models}
        for job, own in found.items():
            for row in own:
                # Without tokens nothing was lost.
                if (row["length"], row["slice"]) == (length, RECALL) and row["tokens"]:
                    at[job.model][job.seed] = row
        for a, b in study.contrasts:
            if difference := compared(at[a], at[b], study.comparisons()):
                made.append({"model": a, "minus": b, "length": length, **difference})
    return made
