"""Render RUN/slurm/job.sbatch: what SLURM is asked for, this run's values, and the fixed body."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.slurm import cluster, snapshot
from launch.slurm.folder import RunFolder
from launch.slurm.options import CORES_OF_A_GPU, Options, Site, asks_for

BODY = Path(__file__).with_name("body.sh")
# What the script itself sets for its ranks, beside `environment`.
EXPORTED = ("GIT_CEILING_DIRECTORIES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def render(folder: RunFolder, options: Options, site: Site, values: dict[str, Any]) -> str:
    """Return the text of the batch script.

    Args:
        options: joined with the site's (`Options.with_site`).
        values: the configuration with absolute paths; a container gets its inputs mounted, and
            its cache, which may still have to be made.
    """
    cache = snapshot.cache_of(values)
    places = [str(folder.run), *snapshot.inputs_of(values), cache]
    container = container_arguments(options, places, folder.code, EXPORTED)
    lines = [
        *_ranks_lines(folder, options, site),
        f"--signal=USR1@{options.lead}",
        *closing_lines(site, folder, "job.log"),
    ]
    without = " ".join(f"-u {name}" for name in cluster.overriding(lines))
    by_hand = f"{f'env {without} ' if without else ''}sbatch {shlex.quote(str(folder.script))}"
    run = shlex.quote(str(folder.run))
    made = [cache] if container and cache in _not_held(options, places) else []
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
            # The code is a copy: git must not take a checkout around it for its version.
            "export GIT_CEILING_DIRECTORIES=$run/slurm",
            f"python={shlex.quote(python_of(options, site))}",
            f"lead={options.lead}",
            f"max_restarts={options.max_restarts}",
            f"resume={shlex.quote(f'python -m launch.slurm resume {run}')}",
            array("environment", [f"{name}={value}" for name, value in options.env.items()]),
            array("made", made),
            array("srun_options", [*site.srun, *container]),
            BODY.read_text(encoding="utf-8"),
        ]
    )


def _ranks_lines(folder: RunFolder, options: Options, site: Site) -> list[str]:
    lines = [
        f"--job-name={job_name(folder)}",
        f"--nodes={options.nodes}",
        f"--ntasks-per-node={options.ranks_per_node}",
    ]
    if options.gpus_per_node:
        gres = site.gpu_request == "gres"
        lines.append(f"--{'gres=gpu:' if gres else 'gpus-per-node='}{options.gpus_per_node}")
        # SLURM takes one of these, not two.
        asked = any(asks_for(line, ("cpus-per-task", "cpus-per-gpu")) for line in site.sbatch)
        if options.cpus_per_task is None and not asked:
            options = options.model_copy(update={"cpus_per_task": CORES_OF_A_GPU})
    return lines + resource_lines(options)


def resource_lines(options: Options) -> list[str]:
    """Return the options that SLURM knows by the same name."""
    names = ("cpus_per_task", "mem", "partition", "account", "qos", "constraint", "reservation")
    given = [(name.replace("_", "-"), getattr(options, name)) for name in (*names, "time")]
    # Quoted as a shell would, which is how SLURM reads these lines: `a100&nvlink` is one value.
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in given if value is not None]
    return lines + (["--exclusive"] if options.exclusive else [])


def closing_lines(site: Site, folder: RunFolder, log: str) -> list[str]:
    """Return what every job asks for, with its log, and the site's own lines."""
    place = str(folder.slurm).replace("%", "%%")  # SLURM replaces % in names of logs
    return ["--requeue", "--open-mode=append", f'--output="{place}/{log}"', *site.sbatch]


def job_name(folder: RunFolder) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", folder.run.name) or "cat_lm"


def setup_lines(site: Site) -> list[str]:
    return ["# The site's own lines.", *site.setup, ""] if site.setup else []


def array(name: str, items: Sequence[str]) -> str:
    """Return an assignment to a bash array, an item a line."""
    lines = []
    for item in items:
        quoted = shlex.quote(item)
        # In an array of bash, a comma without quotes looks like a mistake (to shellcheck).
        lines.append(f"\n    '{item}'" if "," in item and quoted == item else f"\n    {quoted}")
    return f"{name}=({''.join(lines)}\n)" if items else f"{name}=()"


def python_of(options: Options, site: Site) -> str:
    """Return the site's, or this one; where a container or setup brings another, that on PATH."""
    if site.python:
        return site.python
    return "python" if options.container or site.setup else sys.executable


def container_arguments(
    options: Options, places: Sequence[str], workdir: Path | str, exported: Sequence[str]
) -> list[str]:
    """Return srun's arguments for the container, if there is one.

    Args:
        places: folders that it sees.
        exported: variables that the batch script sets beside the options'.
    """
    if not options.container:
        return []
    mounts = [*_asked(options), *(f"{path}:{path}" for path in _not_held(options, places))]
    # An image's own values come before the job's, but for variables that are named here.
    names = dict.fromkeys([*exported, *options.env])
    return [
        f"--container-image={options.container}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-env={','.join(names)}",
        f"--container-workdir={workdir}",
    ]


def _not_held(options: Options, needed: Sequence[str]) -> list[str]:
    """Return the folders that lie in no mount asked for, nor in another folder before them."""
    inside = [Path(m.split(":")[1] if ":" in m else m) for m in _asked(options)]
    result = []
    for path in dict.fromkeys(needed):
        if not any(Path(path).is_relative_to(place) for place in inside):
            result.append(path)
            inside.append(Path(path))
    return result


def _asked(options: Options) -> list[str]:
    return options.container_mounts.split(",") if options.container_mounts else []
