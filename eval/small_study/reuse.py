"""Take over what another question's study has trained: the same model, text, budget, rate, seed.

Trainings alone are taken over, and what they were exported to: lengths, documents and what else is
measured may be others there.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from cat_lm.config import load_config
from cat_lm.errors import UserError
from cat_lm.io.own_files import make_marked, remove_marked
from cat_lm.io.readers import read_object
from eval.small_study.execute import Workers, complete_run, read_result, unfinished
from eval.small_study.plan import SETTINGS, Job, Study

# What a training and its export leave in a run's folder.
TRAINED = ("checkpoints", "config.yaml", "metrics.jsonl", "model", "train.log")
COPIES = "a training on its way from another study"  # the mark of their folder
# Of a study's settings: what decides a training, beside the model's configuration.
_DECIDING = ("size", "data_fingerprint", "tuning_share")
# Of a finished run's record: how it was trained.
_KEPT = ("commit", "threads", "parallel")


def check_reuse(study: Study, settings: dict[str, Any]) -> None:
    """Check that every folder of `Study.reuse` is a study that has one of the same trainings.

    Args:
        settings: of `Study.settings`.

    Raises:
        UserError: one is not, or has none.
    """
    for folder in study.reuse:
        if folder.resolve() == study.out.resolve():
            raise UserError(f"--reuse {folder}: is the study's own folder; leave it out")
        theirs = _settings_of(folder)
        same = [model for model in study.models if _same(settings, theirs, model)]
        # Settings name all models of the question, also those that nobody trained.
        if not any(found for model in same for found in folder.glob(f"*/{model}-*")):
            raise UserError(
                f"--reuse {folder}: has no training that is asked for here: its data, tokens, "
                f"rates or models are others; leave it out"
            )


def taken_over(workers: Workers, job: Job) -> dict[str, Any]:
    """Complete a run as `complete_run` does, from another study's training where there is one."""
    trained = _take_over(workers.study, job) if not job.folder.exists() else None
    return complete_run(workers, job, trained)


def _take_over(study: Study, job: Job) -> dict[str, Any] | None:
    """Copy the job's training from the first folder of `Study.reuse` that has it finished.

    Returns what its record says of how it was trained; None where no folder has it.
    """
    for folder in study.reuse:
        theirs = dataclasses.replace(job, folder=folder / job.folder.relative_to(study.out))
        if unfinished([theirs]):
            continue
        record = read_result(theirs)
        same = _same(_settings_of(study.out), _settings_of(folder), job.model)
        if not same or record["diverged"] or _rate(theirs.folder) != study.config(job).optimizer.lr:
            continue
        _copy(theirs.folder, job.folder)
        return {name: record.get(name) for name in _KEPT} | {"reused": str(folder)}
    return None


def _rate(run: Path) -> float:
    return load_config(run / "config.yaml").optimizer.lr


def _copy(source: Path, target: Path) -> None:
    """Copy a training; a copy that was cut short is not taken for one, and is made again."""
    holder = target.with_name(f"{target.name}.copy")
    remove_marked(holder, COPIES)
    make_marked(holder, COPIES)
    copy = holder / target.name
    copy.mkdir()
    for name in TRAINED:
        if (source / name).is_dir():
            shutil.copytree(source / name, copy / name)
        elif (source / name).is_file():
            shutil.copy2(source / name, copy / name)
    copy.rename(target)
    remove_marked(holder, COPIES)


def _settings_of(folder: Path) -> dict[str, Any]:
    return read_object(folder / SETTINGS, "give the folder of a study, or leave it out")


def _same(ours: dict[str, Any], theirs: dict[str, Any], model: str) -> bool:
    """Tell whether two studies train a model in the same way."""
    configs = [values.get("configs") for values in (ours, theirs)]
    if not all(isinstance(values, dict) and model in values for values in configs):
        return False
    same = all(ours.get(name) == theirs.get(name) for name in _DECIDING)
    return same and configs[0][model] == configs[1][model]
