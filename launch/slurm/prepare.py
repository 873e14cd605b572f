"""`prepare`: data_prep.prepare on many nodes, an array that encodes and a job that assembles."""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_text
from launch.slurm import cluster, script, snapshot
from launch.slurm.folder import RunFolder
from launch.slurm.options import Options, options_from, warning_where
from launch.slurm.site import Site, load_site

# What this command decides itself, or what tasks at the same time would do to each other.
_OWN_FLAGS = ("--stage", "--task", "--estimate", "--workers", "--overwrite")
_PATH_FLAGS = ("path", "validation_path", "tokenizer", "scratch")
# What the scripts themselves set for data_prep.prepare.
EXPORTED = ("PYTHONPATH", "PYTHONSAFEPATH")


class PrepareFolder(RunFolder):
    """The jobs' files lie beside the data, DIR.slurm: a data folder holds nothing else."""

    def _slurm(self) -> Path:
        return self.run.with_name(f"{self.run.name}.slurm")


@dataclass(frozen=True)
class Stage:
    """One of the two batch scripts: its name, its array if it has one, and its own flags."""

    name: str
    log: str
    flags: tuple[str, ...]
    tasks: int | None = None


def prepare(arguments: argparse.Namespace) -> None:
    flags = arguments.flags
    parsed = check_flags(flags)
    site, _ = load_site(arguments.site)
    options = options_from(arguments, Options(nodes=1)).with_site(site).check()
    if not options.container:  # which may know other paths
        with warning_where(arguments.print):
            check_inputs(parsed)
    folder = PrepareFolder(parsed.out)
    places = map(_place, _values(parsed))
    inputs = [os.path.abspath(place) for place in places if os.path.exists(place)]
    stages = (
        Stage("encode", "encode-%a.log", ("--stage", "encode", "--task"), arguments.tasks),
        Stage("assemble", "assemble.log", ("--stage", "assemble")),
    )
    texts = {
        folder.slurm / f"{stage.name}.sbatch": render(folder, options, site, stage, flags, inputs)
        for stage in stages
    }
    if arguments.print:
        print("\n".join(texts.values()), end="")
        return
    active = cluster.active_jobs(list(texts))
    if active:
        jobs = " ".join(sorted({job.id.partition("_")[0] for job in active}))
        raise UserError(
            f"--out {parsed.out}: is being prepared by SLURM jobs; `scancel {jobs}` ends them"
        )
    cluster.check(*texts.values())
    snapshot.save_code(folder, snapshot.PROJECT)
    encode, assemble = texts
    for path, text in texts.items():
        write_text(path, text)
    first = cluster.submit(encode)
    # Without the second option it would wait for ever where the first job has failed.
    then = cluster.submit(assemble, f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes")
    print(f"submitted job {first}: {arguments.tasks} tasks that encode, then job {then}: assembles")
    print(f"logs {folder.slurm}/*.log; where a task fails, the same command continues")


def check_flags(flags: Sequence[str]) -> argparse.Namespace:
    """The flags of data_prep.prepare, checked by its own rules."""
    for flag in flags:
        name = flag.partition("=")[0]
        # argparse takes beginnings of names too.
        if len(name) > 3 and any(own.startswith(name) for own in _OWN_FLAGS):
            raise UserError(f"{flag}: does not go with `launch.slurm prepare`; leave it out")
    if not flags:
        raise UserError("prepare: give the flags of data_prep.prepare after --")
    from data_prep.prepare import parse_arguments

    return parse_arguments(list(flags))


def check_inputs(parsed: argparse.Namespace) -> None:
    """Raises UserError for a source or tokenizer that is not there, before it has queued."""
    from cat_lm.data.tokenizers import check_spec
    from data_prep.sources.local import matches

    check_spec(parsed.tokenizer)
    for name in ("path", "validation_path"):
        path = getattr(parsed, name)
        if not path or path.startswith("hub:") or os.path.exists(path):
            continue
        if next(matches(path), None) is None:
            raise UserError(f"--{name.replace('_', '-')} {path}: no such file or folder")


def _place(path: str) -> str:
    """Return what a container needs of a path: of a glob the folder before its first wildcard."""
    if os.path.exists(path):
        return path
    pieces = itertools.takewhile(lambda piece: not glob.has_magic(piece), Path(path).parts)
    folder = Path(*pieces)
    return path if folder == Path("/") else str(folder)  # the image has a root of its own


def _values(parsed: argparse.Namespace) -> list[str]:
    return [str(getattr(parsed, name)) for name in _PATH_FLAGS if getattr(parsed, name)]


def render(
    folder: PrepareFolder,
    options: Options,
    site: Site,
    stage: Stage,
    flags: Sequence[str],
    inputs: Sequence[str],
) -> str:
    """The text of one stage's batch script."""
    # Relative names mean what they mean where this is submitted.
    here = os.getcwd()
    own = [*stage.flags, f'"$SLURM_ARRAY_TASK_ID/{stage.tasks}"'] if stage.tasks else stage.flags
    python = shlex.quote(script.python_of(options, site))
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in sbatch_lines(folder, options, site, stage)),
            "#",
            f"# {stage.name} of data_prep.prepare, rendered by `python -m launch.slurm prepare`.",
            "# What is finished stays finished: it may be submitted again.",
            "",
            *script.setup_lines(site),
            "set -euo pipefail",
            f"cd {shlex.quote(here)}",
            "# The code as it was when this was submitted, also where this folder is a checkout.",
            f"export PYTHONPATH={shlex.quote(str(folder.code))} PYTHONSAFEPATH=1",
            "workers=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}",
            "export SRUN_CPUS_PER_TASK=$workers",
            script.array("environment", [f"{n}={v}" for n, v in options.env.items()]),
            'if [ "${#environment[@]}" -gt 0 ]; then export "${environment[@]}"; fi',
            script.array("srun_options", srun_arguments(folder, options, site, [here, *inputs])),
            script.array("flags", flags),
            'exec srun "${srun_options[@]}" --ntasks=1 --export=ALL \\',
            f"    {python} -u -m data_prep.prepare \\",
            f'    "${{flags[@]}}" --workers "$workers" {" ".join(own)}',
            "",
        ]
    )


def sbatch_lines(folder: PrepareFolder, options: Options, site: Site, stage: Stage) -> list[str]:
    # SLURM replaces % in names of logs; %a at the end is the number of the array's task.
    log = f"{str(folder.slurm).replace('%', '%%')}/{stage.log}"
    return [
        f"--job-name={script.job_name(folder)}-{stage.name}",
        *([f"--array=0-{stage.tasks - 1}"] if stage.tasks else []),
        "--nodes=1",
        "--ntasks=1",
        *script.common_lines(options),
        "--requeue",
        "--open-mode=append",
        f'--output="{log}"',
        *site.sbatch,
    ]


def srun_arguments(
    folder: PrepareFolder, options: Options, site: Site, inputs: Sequence[str]
) -> list[str]:
    places = [str(folder.slurm), str(folder.run.parent), *inputs]
    return [*site.srun, *script.container_arguments(options, places, inputs[0], EXPORTED)]
