"""`prepare`: run data_prep.prepare on many nodes, by an array of jobs and a final job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_text
from launch.slurm import cluster, script, snapshot
from launch.slurm.folder import RunFolder
from launch.slurm.options import load_site, options_from, warning_where

# Flags that this command sets itself, or with which simultaneous tasks would conflict.
_OWN_FLAGS = ("--stage", "--task", "--estimate", "--workers", "--overwrite")
ABOUT = "{} of data_prep.prepare, rendered by `python -m launch.slurm prepare`."
AGAIN = "What is finished stays finished: it may be submitted again."


def prepare(arguments: argparse.Namespace) -> None:
    parsed = check_flags(arguments.words)
    site, _ = load_site(arguments.site)
    options = options_from(arguments).with_site(site)
    if not options.container:  # A container may have other paths.
        with warning_where(arguments.print):
            check_inputs(parsed)
    # The jobs' files are beside the data folder, which has only data.
    folder = RunFolder(parsed.out)
    folder = RunFolder(parsed.out, folder.run.with_name(f"{folder.run.name}.slurm"))
    places = [str(folder.run.parent), *script.places_in(arguments.words)]
    words = [script.python_of(options, site), "-m", "data_prep.prepare", *arguments.words]
    texts = {}
    for stage, tasks in (("encode", arguments.tasks), ("assemble", None)):
        more = f' --workers "$cores" --stage {stage}'
        more += f' --task "$SLURM_ARRAY_TASK_ID/{tasks}"' if tasks else ""
        about = ABOUT.format(stage), AGAIN
        program = script.Program(words, about, places, stage, tasks, more)
        text = script.render_program(folder, options, site, program)
        texts[folder.slurm / f"{stage}.sbatch"] = text
    if arguments.print:
        print("\n".join(texts.values()), end="")
        return
    if active := cluster.active_jobs(list(texts)):
        jobs = " ".join(sorted({job.id.partition("_")[0] for job in active}))
        raise UserError(
            f"--out {parsed.out}: is being prepared by SLURM jobs; `scancel {jobs}` ends them"
        )
    cluster.check(*texts.values())
    snapshot.save_code(folder, snapshot.PROJECT)
    for path, text in texts.items():
        write_text(path, text)
    encode, assemble = texts
    first = cluster.submit(encode)
    # Without the second option it would wait forever after a failed first job.
    then = cluster.submit(assemble, f"--dependency=afterok:{first}", "--kill-on-invalid-dep=yes")
    print(f"submitted job {first}: {arguments.tasks} tasks that encode, then job {then}: assembles")
    print(f"logs {folder.slurm}/*.log; where a task fails, the same command continues")


def check_flags(flags: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of data_prep.prepare by its own parser."""
    for flag in flags:
        name = flag.partition("=")[0]
        # argparse also accepts prefixes of names.
        if len(name) > 3 and any(own.startswith(name) for own in _OWN_FLAGS):
            raise UserError(f"{flag}: does not go with `launch.slurm prepare`; leave it out")
    from data_prep.prepare import parse_arguments

    return parse_arguments(list(flags))


def check_inputs(parsed: argparse.Namespace) -> None:
    """Raise UserError for a missing source or tokenizer before the job waits in a queue."""
    from cat_lm.data.tokenizers import check_spec
    from data_prep.sources.local import matches

    check_spec(parsed.tokenizer)
    for name in ("path", "validation_path"):
        path = getattr(parsed, name)
        if not path or path.startswith("hub:") or os.path.exists(path):
            continue
        if next(matches(path), None) is None:
            raise UserError(f"--{name.replace('_', '-')} {path}: no such file or folder")
