"""`submit`, `resume` and `cancel`: queue the job of a configuration, or end it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_text
from cat_lm.training.checkpoint import complete_checkpoints
from launch.slurm import cluster, script, snapshot
from launch.slurm.folder import Job, JobRecord, RunFolder, jobs_of, read_record
from launch.slurm.options import Options, Site, load_site, options_from, warning_where


@dataclass(frozen=True)
class Plan:
    """Everything about a job, after all checks and before anything is written.

    Attributes:
        folder: the run's paths.
        values: the configuration with absolute paths.
        record: the content of job.json, whose options are without the site's values.
        options: the options with the site's values.
        site: the site file.
    """

    folder: RunFolder
    values: dict[str, Any]
    record: JobRecord
    options: Options
    site: Site

    def text(self) -> str:
        return script.render(self.folder, self.options, self.site, self.values)


def submit(arguments: argparse.Namespace) -> None:
    """Submit a run for each configuration, after checking all of them."""
    # Further configurations are among the overrides, which all have an equals sign.
    values = vars(arguments)
    overrides = [text for text in arguments.overrides if "=" in text]
    names = [arguments.config, *(text for text in arguments.overrides if "=" not in text)]
    of_one = [values | {"config": name, "overrides": overrides} for name in names]
    plans = [plan_job(argparse.Namespace(**given)) for given in of_one]
    folders = [plan.folder.run for plan in plans]
    for folder in folders:
        if folders.count(folder) > 1:
            raise UserError(
                f"train.output_dir={folder}: two of the configurations would write to it"
            )
    _submit(arguments, plans)


def resume(arguments: argparse.Namespace) -> None:
    folder = RunFolder(arguments.run)
    _submit(arguments, [plan_job(arguments, folder)], continued=True)


def _submit(arguments: argparse.Namespace, plans: Sequence[Plan], continued: bool = False) -> None:
    """Print the scripts, or check all of them and then submit each."""
    if arguments.print:
        print("\n".join(plan.text() for plan in plans), end="")
        return
    for plan in plans:
        refuse_second_job(plan.folder)
        if not continued:
            refuse_other_run(plan)
    cluster.check(*(plan.text() for plan in plans))
    for plan in plans:
        _submit_one(arguments, plan, continued)


def _submit_one(arguments: argparse.Namespace, plan: Plan, continued: bool) -> None:
    """Copy code and configuration, where they are not the run's own, and submit the script."""
    folder = plan.folder
    if not continued or arguments.new_code or not folder.code.is_dir():
        snapshot.save_code(folder, snapshot.PROJECT)
    verb = "resumed" if continued else "submitted"
    snapshot.save_config(folder, plan.values)
    folder.reset_attempts(verb)
    ranks = f"{plan.options.nodes} x {plan.options.ranks_per_node} ranks"
    submit_script(folder, plan.text(), plan.record, verb, ranks)


def submit_script(folder: RunFolder, text: str, record: JobRecord, verb: str, what: str) -> str:
    """Write and submit a script, record the job and print where its files are; return its id."""
    write_text(folder.script, text)
    job_id, now = cluster.submit(folder.script), datetime.now(UTC).isoformat(timespec="seconds")
    words = ["python", "-m", "launch.slurm", *sys.argv[1:]]
    record.jobs.append(Job(id=job_id, time=now, command=words))
    record.write(folder)
    print(f"{verb} job {job_id}: {what}\nscript {folder.script}\nlog    {folder.log}", flush=True)
    return job_id


def cancel(arguments: argparse.Namespace) -> None:
    folder = RunFolder(arguments.run)
    read_record(folder)
    jobs = cluster.active_jobs([folder.script])
    if not jobs:
        raise UserError(f"{folder.run}: has no queued or running job")
    cluster.command("scancel", jobs[0].id)
    print(f"cancelled job {jobs[0].id} ({jobs[0].state.lower()}) of {folder.run}")


def plan_job(arguments: argparse.Namespace, continued: RunFolder | None = None) -> Plan:
    """Check everything that can be checked before the queue.

    Args:
        arguments: parsed arguments. With --print, the script may be for another machine, so that
            missing folders are warnings.
        continued: the run to resume; None for a new run.

    Raises:
        UserError: the configuration or an option is invalid, or data are missing.
    """
    earlier = read_record(continued) if continued else None
    if earlier and earlier.config is None:
        raise UserError(
            f"{continued.run}: a command of `run`, which begins anew: submit it by `run` again"
        )
    options = options_from(arguments, earlier and earlier.options)
    site, site_file = Site(), None
    if "site" in arguments:  # `local` has no site.
        site, site_file = load_site(arguments.site or (earlier and earlier.site))
    path = continued.config if continued else Path(arguments.config).absolute()
    config = load_config(path, arguments.overrides)
    merged = options.with_site(site)
    config.accumulation_steps(merged.world_size)
    if config.train.resume not in ("auto", "never"):
        raise UserError(
            f"train.resume={config.train.resume}: a job continues the checkpoints of its own run; "
            "train.init_from starts a new one from other weights"
        )
    values = snapshot.resolve_paths(config)
    if merged.container:  # The home folder is another one in a container.
        values["data"]["cache_dir"] = snapshot.cache_of(values)
    folder = RunFolder(values["train"]["output_dir"])
    if continued and continued.run != folder.run:
        raise UserError(
            f"train.output_dir={folder.run}: `resume` continues {continued.run}; "
            "`submit` starts another run"
        )
    is_shown = getattr(arguments, "print", False)
    with warning_where(is_shown):
        folder.check_writable()
    # A container may have other paths.
    for place in [] if merged.container else snapshot.inputs_of(values):
        with warning_where(is_shown):
            if not Path(place).is_dir():
                raise UserError(f"{place}: no such folder (data or initial weights of the run)")
    record = JobRecord(
        format=1,
        config=earlier.config if earlier else str(path),
        overrides=[*(earlier.overrides if earlier else ()), *arguments.overrides],
        options=options,
        site=str(site_file) if site_file else None,
        jobs=jobs_of(folder),
    )
    return Plan(folder, values, record, merged, site)


def refuse_second_job(folder: RunFolder) -> None:
    """Raise UserError if the run has a queued or running job."""
    job = next(iter(cluster.active_jobs([folder.script])), None)
    if job is not None:
        raise UserError(
            f"{folder.run}: job {job.id} of this run is {job.state.lower()}; "
            f"`python -m launch.slurm cancel {shlex.quote(str(folder.run))}` ends it"
        )


def refuse_other_run(plan: Plan) -> None:
    """Raise UserError if a new run would resume checkpoints of an earlier run by accident."""
    found = complete_checkpoints(plan.folder.checkpoints)
    if found and plan.values["train"]["resume"] != "auto":
        raise UserError(
            f"train.output_dir={plan.folder.run}: already holds {found[-1].name}; "
            "train.resume=auto continues it (or `python -m launch.slurm resume` the run), another "
            "train.output_dir starts from scratch"
        )
