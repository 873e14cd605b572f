"""Runs the study: train, export and sweep for each run, several at once, restartable."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import finite
from cat_lm.core.folders import Lock
from cat_lm.core.plugins import commit
from cat_lm.core.readers import Versioned, read_json
from eval.common.interrupts import terminated_as_interrupt
from eval.common.provenance import machine
from eval.common.result_files import read_metrics
from eval.common.runs import EVALUATION
from eval.lab.store import CellStore
from eval.small_study.plan import ROOT, Job, Study

_SWEEP = ("-m", "eval.length_sweep")
ORIGIN = "origin.json"  # in a run's folder whose training was copied: an `Origin`
_CELL = "study"  # in a run's folder once all that is asked of it is done


def commands(study: Study, job: Job) -> dict[str, list[str]]:
    """The commands that make one run, by what they are for; a person can type the same."""
    folder = str(job.folder)
    config = str(study.config_file(job.model))
    found = {"train": ["train.py", config, *study.overrides(job), "train.resume=auto"]}
    if job.rate is not None:
        return found
    found["export"] = ["-m", "cat_lm.export", folder, f"{folder}/model"]
    largest = max(study.lengths())
    sweep = ["--lengths", ",".join(map(str, study.lengths())), "--methods", study.methods_of(job)]
    # As much of every document, so that many of them can be scored.
    sweep += ["--documents", "per-document", "--max-document-tokens", str(largest)]
    sweep += ["--max-tokens", str(study.sweep_tokens())]
    for name, data in study.texts().items():
        out = sweep_folder(job, name)
        # Rates are chosen on the beginning of the data's own text, on nothing of the others.
        skip = [] if name else ["--skip-tokens", str(study.skip_tokens)]
        options = ["--data", str(data), *skip, *sweep, "--out", str(out)]
        found[f"sweep of {name}" if name else "sweep"] = [*_SWEEP, folder, *options]
    return found


def sweep_folder(job: Job, text: str) -> Path:
    """Name the folder of a run's sweep over one of `Study.texts`."""
    return job.folder / (f"{EVALUATION}-{text}" if text else EVALUATION)


class Workers:
    """Runs jobs on several threads, each of which waits for the processes of one job at a time.

    The processes are sessions of their own: a Ctrl-C reaches this program only, which then asks
    them to stop, once, and waits until they have saved.
    """

    def __init__(self, study: Study, parallel: int, threads: int, lock: Lock | None = None) -> None:
        self.study, self.parallel, self.threads = study, parallel, threads
        self._lock_file = (
            lock  # of the study's folder, which the processes hold as long as they live
        )
        self.environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            # A thread that waits by spinning would take the core of another run.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        self._processes: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def run(
        self,
        jobs: Sequence[Job],
        task: Callable[[Workers, Job], Any],
        finished: Callable[[Job, Any], None],
    ) -> list[str]:
        """Does `task` for all jobs and hands what it returns to `finished`, in worker threads.

        Returns one line for each job that failed; the others go on. On Ctrl-C or SIGTERM, the
        running processes are stopped first.
        """
        failures: list[str] = []

        def work(job: Job) -> None:
            if self._stopping:
                return
            try:
                finished(job, task(self, job))
            except JobFailed as error:
                if not self._stopping:
                    failures.append(str(error))
                    print(f"error: {error}", file=sys.stderr, flush=True)

        with terminated_as_interrupt(), ThreadPoolExecutor(self.parallel) as pool:
            futures = [pool.submit(work, job) for job in jobs]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self._stop()
                raise
        return failures

    def process(self, arguments: list[str], log: Path) -> int:
        """Runs `python ARGUMENTS` with its output at the end of `log`; its exit code."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as stream:
            stream.write(f"$ {shlex.join(['python', *arguments])}\n")
            stream.flush()
            with self._lock:
                if self._stopping:
                    raise JobFailed("stopped")
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=ROOT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[self._lock_file.fileno()] if self._lock_file else [],
                )
                self._processes.add(process)
            code = process.wait()
            with self._lock:
                self._processes.discard(process)
        if self._stopping and code:
            raise JobFailed("stopped")
        return code

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            for process in self._processes:
                process.terminate()
        if self._processes:
            print("stopping: the running trainings save first", file=sys.stderr, flush=True)


class JobFailed(Exception):
    """A job whose command did not do what it should."""


def complete_run(workers: Workers, job: Job) -> dict[str, Any]:
    """One run from its first command to its result, which is also written into its folder.

    A training that ends because its steps were not finite is a result as well. Raises JobFailed
    where a command fails.
    """
    import torch  # noqa: F401  (without it the machine's name has no GPU)

    begin = time.perf_counter()
    result: dict[str, Any] = {"model": job.model, "seed": job.seed, "diverged": False}
    # What a study that goes on elsewhere, or with other code, may mix.
    result |= {"commit": commit(), "threads": workers.threads, "parallel": workers.parallel}
    result |= {"machine": machine(), "reused": None}
    if origin := read_origin(job.folder):
        result |= origin.model_dump(exclude={"format"})
    log = job.folder / "study.log"
    for stage, arguments in commands(workers.study, job).items():
        code = workers.process(arguments, log)
        if code and stage == "train" and diverged(job.folder):
            result["diverged"] = True
            break
        if code:
            raise JobFailed(
                f"{job.name}: {stage} ended with code {code}, see {log}: {last_line(log)}"
            )
    if job.rate is not None:
        result |= {"rate": job.rate, "loss": None if result["diverged"] else last_loss(job)}
    result["precision"] = precision_of(job)
    result["seconds"] = round(time.perf_counter() - begin, 1)
    _store(job).write(_CELL, result)
    return result


class Origin(Versioned):
    """Say of a copied training how it was made, and in which study's folder."""

    commit: str | None
    threads: int
    parallel: int
    machine: str
    reused: str


def read_origin(run: Path) -> Origin | None:
    """Read where a run's training is from; None where it was made here.

    Raises:
        UserError: the file is damaged.
    """
    path = run / ORIGIN
    return read_json(path, Origin) if path.is_file() else None


def _store(job: Job) -> CellStore:
    return CellStore(job.folder, _Result)


def result_path(job: Job) -> Path:
    """FOLDER/study.json, which is there once the job is finished."""
    return _store(job).path(_CELL)


def unfinished(jobs: list[Job]) -> list[Job]:
    """Choose the jobs that are not finished."""
    return [job for job in jobs if not result_path(job).is_file()]


def read_result(job: Job) -> dict[str, Any]:
    """Read the record of a finished job. Raises UserError where it is damaged."""
    result = _store(job).read(_CELL)
    if result is None:
        raise UserError(f"{result_path(job)}: no such file; start the study again")
    return result


class _Result(Versioned):
    """Hold what is used of a finished job's record."""

    diverged: bool
    seconds: float
    loss: float | None = None  # of a run that chooses a rate
    commit: str | None
    precision: str | None
    threads: int
    parallel: int
    machine: str
    reused: str | None


def precision_of(job: Job) -> str | None:
    """Read what `auto` was for a run; None where its training did not come so far as to say."""
    path = job.folder / "config.yaml"
    found = load_config(path).train.precision if path.is_file() else "auto"
    return None if found == "auto" else found


def check_precisions(study: Study, jobs: Sequence[Job], others: Mapping[str, str | None]) -> None:
    """Check that runs that are compared were trained in one precision.

    Args:
        jobs: those of them that are finished are looked at.
        others: name -> precision of what else is compared with them; None where it is unknown.

    Raises:
        UserError: two of them were not, which it names; or a record is damaged.
    """
    done = [job for job in jobs if result_path(job).is_file()]
    found = {job.name: read_result(job)["precision"] for job in done}
    first: dict[str, str] = {}
    for name, precision in (found | others).items():
        if precision is not None:
            first.setdefault(precision, name)
    if len(first) > 1:
        (one, a), (other, b), *_ = first.items()
        raise UserError(
            f"--out {study.out}: {a} is trained in {one}, {b} in {other}, which are not compared; "
            f"remove the runs of one of them, or give another folder"
        )


def check_rates(study: Study, jobs: Sequence[Job]) -> None:
    """Check that runs that are finished were trained at their models' rates.

    Those may be chosen anew, where the runs that chose them were removed and made again.

    Raises:
        UserError: one was not, which it names.
    """
    for job in jobs:
        path = job.folder / "config.yaml"
        if not result_path(job).is_file() or not path.is_file():
            continue
        trained, chosen = (c.optimizer.lr for c in (load_config(path), study.config(job)))
        if trained != chosen:
            raise UserError(
                f"--out {study.out}: {job.name} is trained at a rate of {trained:g}, and "
                f"{chosen:g} is the one that is chosen now; remove {job.folder}, so that all seeds "
                "have one rate"
            )


def last_loss(job: Job) -> float | None:
    """Read the last validation of a run: nats per token; None where it is not finite or absent.

    One before it says nothing of a training that diverged since.
    """
    records = read_metrics(job.folder / "metrics.jsonl")
    losses = [r["val_loss"] for r in records if "val_loss" in r]
    return finite(losses[-1]) if losses else None


def last_line(log: Path) -> str:
    """Of a failed command's log, which mostly says why; the command where it wrote nothing."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def diverged(run: Path) -> bool:
    """Return True if training ended because its last steps were not finite."""
    metrics = run / "metrics.jsonl"
    steps = [r for r in read_metrics(metrics) if "val_loss" not in r] if metrics.is_file() else []
    return bool(steps) and bool(steps[-1].get("skipped"))


def steps_done(job: Job) -> int:
    """Read how far a run has come from the end of its metrics."""
    try:
        with open(job.folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().splitlines()
        return json.loads(lines[-2])["step"]
    except (OSError, ValueError, IndexError, KeyError, TypeError, RecursionError):
        return 0
