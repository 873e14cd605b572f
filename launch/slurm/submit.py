"""`submit`, `resume` and `cancel`: from a configuration to a queued job."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_text
from cat_lm.training.checkpoint import complete_checkpoints
from launch.slurm import cluster, script, snapshot
from launch.slurm.cluster import JobState
from launch.slurm.folder import Job, JobRecord, RunFolder, earlier_jobs, read_record
from launch.slurm.options import Options, options_from, warning_where
from launch.slurm.site import Site, load_site


@dataclass(frozen=True)
class Plan:
    """Everything about a job, checked, with nothing written yet."""

    folder: RunFolder
    values: dict[str, Any]  # the resolved configuration
    record: JobRecord
    options: Options  # with the site's values
    site: Site

    def text(self) -> str:
        inputs, cache = snapshot.inputs_of(self.values), snapshot.cache_of(self.values)
        return script.render(self.folder, self.options, self.site, inputs, cache)


def submit(arguments: argparse.Namespace) -> None:
    site = load_site(arguments.site)
    options = options_from(arguments)
    plan = plan_of(
        arguments.config, arguments.overrides, options, *site, only_shown=arguments.print
    )
    if arguments.print:
        print(plan.text(), end="")
        return
    refuse_second_job(plan.folder, cluster.active_job(plan.folder))
    refuse_other_run(plan)
    cluster.check(plan.text())
    snapshot.save_code(plan.folder, snapshot.PROJECT)
    start(plan, "submitted")


def resume(arguments: argparse.Namespace) -> None:
    folder = RunFolder(arguments.run)
    record = read_record(folder)
    options = options_from(arguments, record.options)
    site = load_site(arguments.site or record.site)
    plan = plan_of(
        folder.config,
        arguments.overrides,
        options,
        *site,
        earlier=record,
        continued=folder,
        only_shown=arguments.print,
    )
    if arguments.print:
        print(plan.text(), end="")
        return
    refuse_second_job(folder, cluster.active_job(folder))
    cluster.check(plan.text())
    if arguments.new_code or not folder.code.is_dir():
        snapshot.save_code(folder, snapshot.PROJECT)
    start(plan, "resumed")


def cancel(arguments: argparse.Namespace) -> None:
    folder = RunFolder(arguments.run)
    read_record(folder)
    job = cluster.active_job(folder)
    if job is None:
        raise UserError(f"{folder.run}: has no queued or running job")
    cluster.cancel(job.id)
    print(f"cancelled job {job.id} ({job.state.lower()}) of {folder.run}")


def plan_of(
    config_path: Path | str,
    overrides: list[str],
    options: Options,
    site: Site | None = None,
    site_file: Path | None = None,
    earlier: JobRecord | None = None,
    continued: RunFolder | None = None,
    only_shown: bool = False,
) -> Plan:
    """Check everything that can be checked before the queue.

    Args:
        continued: the run that goes on; none for a new one.
        only_shown: the script is printed, perhaps on another machine than it will run on: folders
            that are missing here are warnings.

    Raises:
        UserError: the configuration or an option is wrong, or the data is not there.
    """
    config = load_config(config_path, overrides)
    site = site or Site()
    merged = options.with_site(site).check()
    config.accumulation_steps(merged.world_size)
    if config.train.resume not in ("auto", "never"):
        raise UserError(
            f"train.resume={config.train.resume}: a job continues the checkpoints of its own run; "
            "train.init_from starts a new one from other weights"
        )
    values = snapshot.resolved(config)
    if merged.container:  # the ranks' home is another there
        values["data"]["cache_dir"] = snapshot.cache_of(values)
    folder = RunFolder(Path(values["train"]["output_dir"]))
    if continued not in (None, folder):
        raise UserError(
            f"train.output_dir={folder.run}: `resume` continues {continued.run}; "
            "`submit` starts another run"
        )
    with warning_where(only_shown):
        folder.check_writable()
    # A container may know other paths.
    for path in [] if merged.container else snapshot.inputs_of(values):
        with warning_where(only_shown):
            if not Path(path).is_dir():
                raise UserError(f"{path}: no such folder (data or initial weights of the run)")
    record = JobRecord(
        format=1,
        config=str(Path(config_path).absolute()) if earlier is None else earlier.config,
        overrides=[*(earlier.overrides if earlier else ()), *overrides],
        options=options,
        site=str(site_file) if site_file else None,
        jobs=earlier_jobs(folder),
    )
    return Plan(folder, values, record, merged, site)


def refuse_second_job(folder: RunFolder, job: JobState | None) -> None:
    """Raises UserError where `job`, the run's queued or running one, is there."""
    if job is not None:
        raise UserError(
            f"{folder.run}: job {job.id} of this run is {job.state.lower()}; "
            f"`python -m launch.slurm cancel {shlex.quote(str(folder.run))}` ends it"
        )


def refuse_other_run(plan: Plan) -> None:
    """A new run must not continue an old one's checkpoints by accident: the job resumes them."""
    found = complete_checkpoints(plan.folder.checkpoints)
    if found and plan.values["train"]["resume"] != "auto":
        raise UserError(
            f"train.output_dir={plan.folder.run}: already holds {found[-1].name}; "
            "train.resume=auto continues it (or `python -m launch.slurm resume` the run), another "
            "train.output_dir starts anew"
        )


def start(plan: Plan, verb: str) -> None:
    """Writes the script beside its snapshot, submits it and remembers the job."""
    folder = plan.folder
    snapshot.save_config(folder, plan.values)
    write_text(folder.script, plan.text())
    folder.reset_attempts(verb)
    job_id = cluster.submit(folder.script)
    job = Job(
        id=job_id,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        command=["python", "-m", "launch.slurm", *sys.argv[1:]],
    )
    plan.record.jobs.append(job)
    plan.record.write(folder)
    print(f"{verb} job {job_id}: {plan.options.nodes} x {plan.options.ranks_per_node} ranks")
    print(f"script {folder.script}")
    print(f"log    {folder.log}")
