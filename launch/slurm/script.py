"""Renders RUN/slurm/job.sbatch: what SLURM is asked for, this run's values, and the fixed body."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.slurm import sbatch
from launch.slurm.folder import RunFolder
from launch.slurm.options import CORES_OF_A_GPU, Options
from launch.slurm.site import Site

BODY = Path(__file__).with_name("body.sh")
# SLURM takes one of them, not two.
CORES_ASKED = ("cpus-per-task", "cpus-per-gpu")
# What the script itself sets for its ranks, beside `environment`.
EXPORTED = ("GIT_CEILING_DIRECTORIES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def render(
    folder: RunFolder,
    options: Options,
    site: Site,
    inputs: Sequence[str],
    cache: str | None = None,
) -> str:
    """The text of the batch script.

    Args:
        options: joined with the site's (`Options.with_site`).
        inputs: local folders that the run reads; a container gets them mounted.
        cache: the run's `data.cache_dir`, mounted likewise; it may still have to be made.
    """
    lines = sbatch_lines(folder, options, site)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            *comment(folder, lines),
            "",
            *setup_lines(site),
            *values(folder, options, site, inputs, cache),
            BODY.read_text(encoding="utf-8"),
        ]
    )


def sbatch_lines(folder: RunFolder, options: Options, site: Site) -> list[str]:
    lines = [
        f"--job-name={job_name(folder)}",
        f"--nodes={options.nodes}",
        f"--ntasks-per-node={options.ranks_per_node}",
    ]
    if options.gpus_per_node:
        lines.append(gpu_request(options.gpus_per_node, site))
        options = replace(options, cpus_per_task=cores_of_a_gpu(options, site))
    return [
        *lines,
        *common_lines(options),
        f"--signal=USR1@{options.lead}",
        "--requeue",
        "--open-mode=append",
        # SLURM replaces % in names of logs.
        f'--output="{str(folder.log).replace("%", "%%")}"',
        *site.sbatch,
    ]


def gpu_request(gpus: int, site: Site) -> str:
    return f"--gres=gpu:{gpus}" if site.gpu_request == "gres" else f"--gpus-per-node={gpus}"


def cores_of_a_gpu(options: Options, site: Site) -> int | None:
    """Return --cpus-per-task of a GPU's rank; None where the site's own lines ask for cores."""
    asked = any(sbatch.asks_for(line, CORES_ASKED) for line in site.sbatch)
    if options.cpus_per_task is None and not asked:
        return CORES_OF_A_GPU
    return options.cpus_per_task


def common_lines(options: Options) -> list[str]:
    """The options that SLURM knows by the same name."""
    names = ("cpus_per_task", "mem", "partition", "account", "qos", "constraint", "reservation")
    given = [(name, getattr(options, name)) for name in (*names, "time")]
    # Quoted as a shell would, which is how SLURM reads these lines: `a100&nvlink` is one value.
    lines = [
        f"--{name.replace('_', '-')}={shlex.quote(str(value))}"
        for name, value in given
        if value is not None
    ]
    return lines + (["--exclusive"] if options.exclusive else [])


def job_name(folder: RunFolder) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", folder.run.name) or "cat_lm"


def comment(folder: RunFolder, lines: Sequence[str]) -> list[str]:
    without = " ".join(f"-u {name}" for name in sbatch.overriding(lines))
    return [
        "#",
        "# One training run of cat_lm, rendered by `python -m launch.slurm`. By hand:",
        f"#     {f'env {without} ' if without else ''}sbatch {shlex.quote(str(folder.script))}",
        "# It continues from the newest checkpoint, and requeues itself until the run is finished.",
        "# Variables such as SBATCH_TIMELIMIT win over the lines above: unset those of your shell.",
    ]


def setup_lines(site: Site) -> list[str]:
    return ["# The site's own lines.", *site.setup, ""] if site.setup else []


def values(
    folder: RunFolder, options: Options, site: Site, inputs: Sequence[str], cache: str | None
) -> list[str]:
    run = shlex.quote(str(folder.run))
    places = [str(folder.run), *inputs, *([cache] if cache else [])]
    container = container_arguments(options, places, folder.code, EXPORTED)
    made = [cache] if container and cache in not_held(options, places) else []
    resume = f"python -m launch.slurm resume {run}"
    environment = [f"{name}={value}" for name, value in options.env.items()]
    return [
        f"run={run}",
        "code=$run/slurm/code",
        # The code is a copy: git must not take a checkout around it for its version.
        "export GIT_CEILING_DIRECTORIES=$run/slurm",
        f"python={shlex.quote(python_of(options, site))}",
        f"lead={options.lead}",
        f"max_restarts={options.max_restarts}",
        f"resume={shlex.quote(resume)}",
        array("environment", environment),
        array("made", made),
        array("srun_options", [*site.srun, *container]),
    ]


def array(name: str, items: Sequence[str]) -> str:
    """An assignment to a bash array, an item a line."""
    lines = "".join(f"\n    {quoted(item)}" for item in items)
    return f"{name}=({lines}\n)" if items else f"{name}=()"


def python_of(options: Options, site: Site) -> str:
    """The site's, or this one; where a container or setup lines bring another, the one on PATH."""
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
    # An image's own values come before the job's, but for variables that are named here.
    names = dict.fromkeys([*exported, *options.env])
    return [
        f"--container-image={options.container}",
        f"--container-mounts={','.join(mounts(options, places))}",
        f"--container-env={','.join(names)}",
        f"--container-workdir={workdir}",
    ]


def mounts(options: Options, needed: Sequence[str]) -> list[str]:
    """The mounts asked for, and the folders needed that none of these holds."""
    return [*_asked(options), *(f"{path}:{path}" for path in not_held(options, needed))]


def not_held(options: Options, needed: Sequence[str]) -> list[str]:
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


def quoted(item: str) -> str:
    """As shlex, and commas too: in an array of bash they look like a mistake (to shellcheck)."""
    return f"'{item}'" if "," in item and shlex.quote(item) == item else shlex.quote(item)
