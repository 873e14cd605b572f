"""Render the batch scripts of training runs (with the fixed body.sh) and of other programs."""

from __future__ import annotations

import glob
import itertools
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.slurm import cluster, snapshot
from launch.slurm.folder import RunFolder
from launch.slurm.options import CORES_OF_A_GPU, Options, Site, asks_for

BODY = Path(__file__).with_name("body.sh")
# Variables that a training run's script sets for its ranks, in addition to `environment`.
EXPORTED = ("GIT_CEILING_DIRECTORIES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
# Variables that the script of another program sets.
OF_PROGRAM = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")


def render(folder: RunFolder, options: Options, site: Site, values: dict[str, Any]) -> str:
    """Return the text of the batch script.

    Args:
        options: options with the site's values (`Options.with_site`).
        values: the configuration with absolute paths. A container mounts its inputs and its cache,
            which the script makes if necessary.
    """
    cache = snapshot.cache_of(values)
    places = [str(folder.run), *snapshot.inputs_of(values), cache]
    container = container_arguments(options, places, folder.code, EXPORTED)
    lines = [
        *_size_lines(job_name(folder), options, site, options.ranks_per_node),
        f"--signal=USR1@{options.lead}",
        *_closing_lines(site, folder, "job"),
    ]
    without = " ".join(f"-u {name}" for name in cluster.overriding_variables(lines))
    by_hand = f"{f'env {without} ' if without else ''}sbatch {shlex.quote(str(folder.script))}"
    run = shlex.quote(str(folder.run))
    made = [cache] if container and cache in _unmounted_folders(options, places) else []
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "#",
            "# One training run of cat_lm, rendered by `python -m launch.slurm`. By hand:",
            f"#     {by_hand}",
            "# It continues from the newest checkpoint, and requeues itself until the run is "
            "finished.",
            "# Variables such as SBATCH_TIMELIMIT win over the lines above: unset those of your "
            "shell.",
            "",
            *setup_lines(site),
            f"run={run}",
            "code=$run/slurm/code",
            # git must not describe the copy of the code by a checkout around it.
            "export GIT_CEILING_DIRECTORIES=$run/slurm",
            f"python={shlex.quote(python_of(options, site))}",
            f"lead={options.lead}",
            f"max_restarts={options.max_restarts}",
            f"resume={shlex.quote(f'python -m launch.slurm resume {run}')}",
            bash_array("environment", [f"{name}={value}" for name, value in options.env.items()]),
            bash_array("made", made),
            bash_array("srun_options", [*site.srun, *container]),
            BODY.read_text(encoding="utf-8"),
        ]
    )


@dataclass(frozen=True)
class Program:
    """The program of a job with one task, which runs in the folder where it is submitted.

    Attributes:
        words: the words of the command, which are passed without expansion.
        about: comments at the top of the script.
        places: paths that a container mounts besides the job's folder and the current one.
        stage: suffix of the names of job and log, if several jobs share a folder.
        tasks: number of jobs of an array; None for a single job.
        more: further words of the command, which the job's shell expands.
    """

    words: Sequence[str]
    about: Sequence[str]
    places: Sequence[str]
    stage: str = ""
    tasks: int | None = None
    more: str = ""


def render_program(folder: RunFolder, options: Options, site: Site, program: Program) -> str:
    """Return the text of a batch script that runs a program with the copy of the code."""
    # The job runs in the current folder, so that relative paths stay valid.
    here, stage, tasks = os.getcwd(), program.stage, program.tasks
    lines = [
        *_size_lines(f"{job_name(folder)}{stage and f'-{stage}'}", options, site, 1),
        *([f"--array=0-{tasks - 1}"] if tasks else []),
        *_closing_lines(site, folder, f"{stage or 'job'}{'-%a' if tasks else ''}"),
    ]
    places = [str(folder.slurm), *program.places, here]
    srun = [*site.srun, *container_arguments(options, places, here, OF_PROGRAM)]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "#",
            *(f"# {line}" for line in program.about),
            "",
            *setup_lines(site),
            "set -euo pipefail",
            f"cd {shlex.quote(here)}",
            "# The code as it was when this was submitted, also where this folder is a checkout.",
            f"export PYTHONPATH={shlex.quote(str(folder.code))}",
            "export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1",
            "cores=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}",
            'if [ -z "${SLURM_CPUS_PER_GPU:-}" ]; then export SRUN_CPUS_PER_TASK=$cores; fi',
            bash_array("environment", [f"{n}={v}" for n, v in options.env.items()]),
            'if [ "${#environment[@]}" -gt 0 ]; then export "${environment[@]}"; fi',
            bash_array("srun_options", srun),
            bash_array("command", program.words),
            'exec srun "${srun_options[@]}" --ntasks=1 --export=ALL "${command[@]}"' + program.more,
            "",
        ]
    )


def places_in(words: Sequence[str]) -> list[str]:
    """Return the existing paths in a command, for a container; the parent folder of a pattern."""
    found = []
    for word in words:
        # The word may be a path, --path=/data or data.path=/data.
        path = Path(word.rpartition("=")[2])
        if not os.path.exists(path):
            path = Path(*itertools.takewhile(lambda piece: not glob.has_magic(piece), path.parts))
        if os.path.exists(path) and path != Path("/"):  # The image has a root of its own.
            found.append(os.path.abspath(path))
    return found


def _size_lines(name: str, options: Options, site: Site, tasks: int) -> list[str]:
    """Return the #SBATCH options for the size of a job with `tasks` tasks per node.

    A single task gets the cores of all ranks that would share its GPUs.
    """
    lines = [f"--job-name={name}", f"--nodes={options.nodes}", f"--ntasks-per-node={tasks}"]
    cores = options.cpus_per_task
    if options.gpus_per_node:
        gres = site.gpu_request == "gres"
        lines.append(f"--{'gres=gpu:' if gres else 'gpus-per-node='}{options.gpus_per_node}")
        # SLURM accepts only one of these options.
        asked = any(asks_for(line, ("cpus-per-task", "cpus-per-gpu")) for line in site.sbatch)
        cores = cores or (None if asked else CORES_OF_A_GPU)
    cores = cores and cores * options.ranks_per_node // tasks
    names = ("mem", "partition", "account", "qos", "constraint", "reservation", "time")
    given = {"cpus-per-task": cores} | {name: getattr(options, name) for name in names}
    # SLURM parses these lines as a shell does; `a100&nvlink` must be quoted.
    lines += [f"--{n}={shlex.quote(str(value))}" for n, value in given.items() if value is not None]
    return lines + (["--exclusive"] if options.exclusive else [])


def _closing_lines(site: Site, folder: RunFolder, log: str) -> list[str]:
    """Return the #SBATCH lines that every job has, and the site's lines."""
    place = str(folder.slurm).replace("%", "%%")  # SLURM replaces % in the names of logs.
    return ["--requeue", "--open-mode=append", f'--output="{place}/{log}.log"', *site.sbatch]


def job_name(folder: RunFolder) -> str:
    return plain_name(folder.run.name) or "cat_lm"


def plain_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)


def setup_lines(site: Site) -> list[str]:
    return ["# The site's own lines.", *site.setup, ""] if site.setup else []


def bash_array(name: str, items: Sequence[str]) -> str:
    """Return an assignment to a bash array, with one item per line."""
    lines = []
    for item in items:
        quoted = shlex.quote(item)
        # shellcheck warns about an unquoted comma in a bash array.
        lines.append(f"\n    '{item}'" if "," in item and quoted == item else f"\n    {quoted}")
    return f"{name}=({''.join(lines)}\n)" if items else f"{name}=()"


def python_of(options: Options, site: Site) -> str:
    """Return the site's Python, or that on PATH with a container or setup, or else this one."""
    if site.python:
        return site.python
    return "python" if options.container or site.setup else sys.executable


def container_arguments(
    options: Options, places: Sequence[str], workdir: Path | str, exported: Sequence[str]
) -> list[str]:
    """Return srun's arguments for the container, if there is one.

    Args:
        places: folders to mount.
        exported: variables that the batch script sets, in addition to those of the options.
    """
    if not options.container:
        return []
    mounts = [
        *_requested_mounts(options),
        *(f"{path}:{path}" for path in _unmounted_folders(options, places)),
    ]
    # Variables of an image override those of the job, unless they are named here.
    names = dict.fromkeys([*exported, *options.env])
    return [
        f"--container-image={options.container}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-env={','.join(names)}",
        f"--container-workdir={workdir}",
    ]


def _unmounted_folders(options: Options, needed: Sequence[str]) -> list[str]:
    """Return the folders that are in no requested mount, and in no earlier folder of the list."""
    inside = [Path(m.split(":")[1] if ":" in m else m) for m in _requested_mounts(options)]
    result = []
    for path in dict.fromkeys(needed):
        if not any(Path(path).is_relative_to(place) for place in inside):
            result.append(path)
            inside.append(Path(path))
    return result


def _requested_mounts(options: Options) -> list[str]:
    return options.container_mounts.split(",") if options.container_mounts else []
