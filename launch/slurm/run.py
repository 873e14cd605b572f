"""`run`: one job on one node that runs any command of this project, such as an evaluation."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cat_lm.core.errors import UserError
from launch.slurm import cluster, script, snapshot, torchrun
from launch.slurm.folder import JobRecord, RunFolder, jobs_of
from launch.slurm.options import Options, Site, load_site, options_from, warning_where
from launch.slurm.submit import refuse_second_job, submit_script

# Commands that run in the project's interpreter, and what it is called with. torchrun's own port
# may be used by another job on the node.
PROGRAMS = {"python": (), "python3": (), "torchrun": ("-c", torchrun.START, *torchrun.ONE_MACHINE)}
# The parent of the jobs' folders.
JOBS = Path("runs/jobs")
ABOUT = (
    "One command, rendered by `python -m launch.slurm run`. Where it fails it is not started again."
)
LINES_SHOWN = 20


def run(arguments: argparse.Namespace) -> None:
    """Submit the job; with --wait, wait for it and exit with its code."""
    site, site_file = load_site(arguments.site)
    given = options_from(arguments)
    options = given.with_site(site)
    words = with_interpreter(arguments.words, options, site)
    folder = RunFolder(JOBS / (arguments.name or free_name(arguments.words)))
    with warning_where(arguments.print):
        folder.check_writable("--name")
    program = script.Program(words, [ABOUT], script.places_in(arguments.words[1:]))
    text = script.render_program(folder, options, site, program)
    if arguments.print:
        print(text, end="")
        return
    refuse_second_job(folder)
    cluster.check(text)
    record = JobRecord(
        format=1,
        config=None,
        overrides=[],
        options=given,
        site=str(site_file) if site_file else None,
        jobs=jobs_of(folder),
    )
    snapshot.save_code(folder, snapshot.PROJECT)
    job_id = submit_script(folder, text, record, "submitted", folder.run.name)
    if arguments.wait and (code := wait(folder, job_id)):
        raise SystemExit(code)


def with_interpreter(words: Sequence[str], options: Options, site: Site) -> list[str]:
    """Return the command with the project's interpreter as its `python` or `torchrun`.

    Raises:
        UserError: its program is not installed here, and no container or setup of the site could
            provide it.
    """
    if words[0] in PROGRAMS:
        return [script.python_of(options, site), *PROGRAMS[words[0]], *words[1:]]
    if not (options.container or site.setup) and shutil.which(words[0]) is None:
        raise UserError(
            f"run: {words[0]!r} is no program here; give a command after --, such as "
            "`-- python -m eval.zero_shot MODEL`"
        )
    return list(words)


def free_name(words: Sequence[str]) -> str:
    """Return the name of the command's module or program, with the first unused number."""
    has_module = "-m" in words[:-1]
    program = words[words.index("-m") + 1] if has_module else Path(words[0]).name
    names = (f"{script.plain_name(program)}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(JOBS / name))


def wait(folder: RunFolder, job_id: str) -> int:
    """Wait for the job's end, print the end of its log if it failed, and return its exit code."""
    try:
        job = cluster.wait_until_over(job_id, folder.script)
    except KeyboardInterrupt:
        print(f"job {job_id} goes on; `python -m launch.slurm cancel` ends it", file=sys.stderr)
        raise
    if job is not None and job.state == "COMPLETED":
        return 0
    state = job.state.lower() if job else "over, and SLURM has forgotten how it ended"
    code = job.exit_code if job and job.exit_code else 1
    print(f"job {job_id}: {state}, exit code {code}; the end of {folder.log}:", file=sys.stderr)
    # A job that never began has no log.
    with suppress(FileNotFoundError), open(folder.log, "rb") as log:
        sys.stderr.write(b"".join(deque(log, LINES_SHOWN)).decode("utf-8", "replace"))
    return code
