"""`python -m eval.small_study`: runs what is missing of the study, then writes what it found."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from cat_lm import limits
from cat_lm.cli import Parser, path, whole, whole_numbers
from cat_lm.config_sections import parse_count
from cat_lm.errors import UserError, command
from cat_lm.io.files import write_json
from cat_lm.io.folders import check_output
from cat_lm.io.locks import Lock
from cat_lm.io.readers import clipped
from eval.common.outputs import PICTURES, claim_outputs, named
from eval.small_study.plan import MODELS, ROOT, SEEDS, SIZES, Study, check, claim


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="bash eval/small_study.sh",
        description="Trains nine models at the same size, data, seeds and budget, sweeps their "
        "context length, and compares them. A stopped study goes on where it was.",
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="cpu", help="cpu: under an hour on two cores; gpu: larger")
    add("--out", type=path, metavar="DIR", help="default: runs/small_study-SIZE")
    add(
        "--data",
        type=path,
        metavar="DIR",
        help="prepared text of your own (default: the standard library's source, prepared in "
        "data/small_study-SIZE)",
    )
    add("--models", default=",".join(MODELS), help="some of: %(default)s")
    add(
        "--seeds",
        type=whole_numbers(limits.SEED, "0,1,2", distinct=True),
        default=SEEDS,
        metavar="N,N,…",
        help=f"default: {','.join(map(str, SEEDS))}",
    )
    add(
        "--tokens",
        type=_tokens,
        metavar="N",
        help="training tokens of a run, such as 1B (default: the config's)",
    )
    add(
        "--parallel",
        type=whole(limits.WORKERS),
        metavar="N",
        help="runs at once (default: cpu: the cores; gpu: 1)",
    )
    add("--estimate", action="store_true", help="measure how long it would take, and stop")
    return parser.parse_args(argv)


def _tokens(text: str) -> int:
    try:
        # The tables print 20K, whose lower case is as clear.
        count = parse_count(text.upper())
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{clipped(text)!r} {error}") from None
    if problem := limits.TOKENS.at_least(1).problem(count):
        raise argparse.ArgumentTypeError(f"{clipped(text)!r} {problem}")
    return count


@command
def main() -> None:
    arguments = parse_arguments()
    if arguments.out is not None:
        check_output(arguments.out)
    study = study_of(arguments)
    os.chdir(ROOT)
    # Only now: what follows needs the libraries that --help and wrong arguments do without.
    from eval.small_study.execute import held

    fingerprint = prepared(study, own=arguments.data is not None)
    with held(study) as lock:
        if not arguments.estimate:
            claim_outputs(study.out, "summary.json", named("small_study", ".md", ".csv", *PICTURES))
        if run_missing(study, fingerprint, lock, arguments.parallel, arguments.estimate):
            print(write_results(study))


def run_missing(
    study: Study, fingerprint: str, lock: Lock, parallel: int | None, estimate_only: bool
) -> bool:
    """Runs what is not finished; whether there may be results to write.

    Args:
        lock: of the study's folder.
        parallel: runs at once; None: as suits the study's size.

    Raises UserError where the folder is another study's, and where runs failed.
    """
    from eval.small_study.execute import Workers, complete_run, unfinished
    from eval.small_study.progress import Progress, measure

    (check if estimate_only else claim)(study, fingerprint)
    jobs = study.jobs()
    todo = unfinished(jobs)
    print(f"{len(jobs)} runs of {len(study.models)} models in {study.out}, {len(todo)} to do")
    if not todo:
        return not estimate_only
    cores = len(os.sched_getaffinity(0))
    parallel = min(parallel or (cores if study.size.parallel else 1), len(todo))
    threads = max(1, cores // parallel)
    workers = Workers(study, parallel, threads, lock)
    estimate = measure(study, workers)
    print(f"{parallel} at a time, {threads} threads each; {estimate.text(todo, parallel)}")
    if estimate_only:
        return False
    with Progress(jobs, todo, estimate, study) as progress:
        failures = workers.run(todo, complete_run, progress.finished)
    if failures:
        count = f"{len(failures)} of {len(todo)} runs failed"
        raise UserError(f"{count}, the others are kept; the same command tries again")
    return True


def study_of(arguments: argparse.Namespace) -> Study:
    """The study that the command line asks for. Raises UserError where it makes no sense."""
    size = SIZES[arguments.size]
    models = tuple(arguments.models.split(","))
    for model in models:
        if model not in MODELS:
            raise UserError(f"--models {clipped(model)}: unknown; known: {', '.join(MODELS)}")
    return Study(
        size=size,
        models=tuple(model for model in MODELS if model in models),
        seeds=arguments.seeds,
        out=_from_root(arguments.out or ROOT / f"runs/small_study-{size.name}"),
        data=_from_root(arguments.data or ROOT / f"data/small_study-{size.name}"),
        tokens=arguments.tokens,
    )


def prepared(study: Study, own: bool) -> str:
    """Prepares the text where it is missing; returns the data's fingerprint.

    Args:
        own: the data are the user's and are not made here.
    """
    from cat_lm.data.opening import open_verified

    if not own:
        flags = ["--source", "python-stdlib", "--validation-fraction", "0.04"]
        flags += ["--tokenizer", f"train:sentencepiece:{study.size.vocabulary}"]
        call = [sys.executable, "-m", "data_prep.prepare", *flags, "--out", str(study.data)]
        if code := subprocess.run(call, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(code)
    corpus = open_verified(ROOT / study.data, "train")
    held_out = open_verified(ROOT / study.data, "validation")
    if held_out.num_tokens <= max(study.lengths()):
        raise UserError(
            f"--data {study.data}: {held_out.num_tokens} held-out tokens are too few for length "
            f"{max(study.lengths())}"
        )
    return corpus.fingerprint


def write_results(study: Study) -> Path:
    """summary.json, the tables, the figure and a page of the first seed's runs."""
    from eval.common.style import save_figure
    from eval.report.write import report
    from eval.small_study.collect import collect
    from eval.small_study.figure import study_figure
    from eval.small_study.tables import markdown, write_tables

    summary = collect(study)
    write_json(study.out / "summary.json", summary)
    write_tables(summary, study.out)
    save_figure(study_figure(summary), study.out / "small_study")
    first = [job.folder for job in study.jobs() if job.seed == study.seeds[0]]
    found = [folder for folder in first if (folder / "model").is_dir()]
    if found:
        report(found, study.out / "report", f"Small study: the runs of seed {study.seeds[0]}")
    print(markdown(summary))
    return study.out / "small_study.md"


def _from_root(path: Path) -> Path:
    """Short where it lies in the checkout, where all commands run; absolute elsewhere."""
    path = path.absolute()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


if __name__ == "__main__":
    main()
