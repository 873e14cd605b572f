"""Take over what another study has trained: the same model, text, budget, rate and seed.

Trainings alone are taken over, and what they were exported to: lengths, documents and what else is
measured may be others there.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from cat_lm.config import RunConfig, load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from cat_lm.core.folders import make_temporary, remove_temporary
from eval.small_study.execute import (
    ORIGIN,
    JobFailed,
    Origin,
    Workers,
    complete_run,
    read_origin,
    read_result,
    unfinished,
)
from eval.small_study.plan import SETTINGS, Job, Study, deciding, read_fingerprint

# What a training and its export leave in a run's folder.
TRAINED = ("checkpoints", "config.yaml", "metrics.jsonl", "model", "train.log")


def check_reuse(study: Study, settings: dict[str, Any]) -> set[Job]:
    """Find what can be taken over of the trainings that are not begun here.

    Those of reported seeds whose rates are yet to be chosen are among them where other studies have
    them at any rate.

    Args:
        settings: of `Study.settings`.

    Raises:
        UserError: a folder of `Study.reuse` is no study, or has nothing of it; or it is damaged.
    """
    jobs = [*study.tuning_jobs(), *study.jobs()]
    found: set[Job] = set()
    for folder in study.reuse:
        if folder.resolve() == study.out.resolve():
            raise UserError(f"--reuse {folder}: is the study's own folder; leave it out")
        if not (folder / SETTINGS).is_file():
            raise UserError(
                f"--reuse {folder}: is no folder of a study, having no {SETTINGS}; leave it out"
            )
        same = settings["data_fingerprint"] == read_fingerprint(folder)
        own = {job for job in jobs if same and _is_trained(study, job, _there(study, job, folder))}
        if not own:
            raise UserError(
                f"--reuse {folder}: has no finished training that is asked for here: its data, "
                f"tokens, rates, seeds, precision or models are others; leave it out"
            )
        found |= own
    return {job for job in found if not job.folder.exists()}


def taken_over(workers: Workers, job: Job) -> dict[str, Any]:
    """Complete a run as `complete_run` does, from another study's training where there is one."""
    if not job.folder.exists():
        try:
            _take_over(workers.study, job)
        except UserError as error:
            raise JobFailed(f"{job.name}: of another study (--reuse): {error}") from None
        except OSError as error:
            reason = error.strerror or "not all of it could be read or written"
            raise JobFailed(f"{job.name}: copying it from another study: {reason}") from None
    return complete_run(workers, job)


def _take_over(study: Study, job: Job) -> None:
    """Copy the job's training from the first folder of `Study.reuse` that has it finished."""
    for folder in study.reuse:
        theirs = _there(study, job, folder)
        same = read_fingerprint(study.out) == read_fingerprint(folder)
        if same and _is_trained(study, job, theirs, at_its_rate=True):
            record = read_result(theirs)
            how = {name: record[name] for name in ("commit", "threads", "parallel", "machine")}
            # Theirs may be a copy, too.
            origin = read_origin(theirs.folder) or Origin(format=1, **how, reused=str(folder))
            return _copy(theirs.folder, job.folder, origin)


def _there(study: Study, job: Job, folder: Path) -> Job:
    """Name the job in another study's folder."""
    return dataclasses.replace(job, folder=folder / job.folder.relative_to(study.out))


def _is_trained(study: Study, job: Job, theirs: Job, at_its_rate: bool = False) -> bool:
    """Return True if another study's run is the job's training, to its last step.

    Args:
        at_its_rate: whether the rate is known; otherwise any is as good.
    """
    from cat_lm.training.checkpoint import complete_checkpoints, step_of

    if unfinished([theirs]) or read_result(theirs)["diverged"]:
        return False
    config, ours = load_config(theirs.folder / "config.yaml"), study.config(job)
    # `auto` is decided in what a training wrote.
    ours = ours.with_precision(_precision(ours))
    values, wanted = deciding(config), deciding(ours)
    if job.rate is None and study.rates and not at_its_rate:
        for one in (values, wanted):
            one["optimizer"] |= {"lr": None, "min_lr": None}
    steps = [step_of(path) for path in complete_checkpoints(theirs.folder / "checkpoints")]
    return values == wanted and config.total_steps in steps


def _precision(config: RunConfig) -> str:
    """Name the precision that a training would have here."""
    import torch

    from cat_lm.training.building import resolve_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return resolve_precision(config, device)[0]


def _copy(source: Path, target: Path, origin: Origin) -> None:
    """Copy a training; a copy that was cut short is not taken for one, and is made again."""
    holder = target.with_name(f"{target.name}.copy")
    remove_temporary(holder)
    make_temporary(holder)
    copy = holder / target.name
    copy.mkdir()
    for name in TRAINED:
        if (source / name).is_dir():
            shutil.copytree(source / name, copy / name)
        elif (source / name).is_file():
            shutil.copy2(source / name, copy / name)
    write_json(copy / ORIGIN, origin.model_dump())
    copy.rename(target)
    remove_temporary(holder)
