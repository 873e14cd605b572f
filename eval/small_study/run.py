"""Prepares what the study reads, and runs what is missing of it."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from cat_lm.core.errors import UserError
from cat_lm.core.folders import Lock
from eval.common.library_text import LIBRARY
from eval.small_study.plan import ROOT, Job, Study, check, claim

if TYPE_CHECKING:
    from eval.small_study.execute import Workers
    from eval.small_study.progress import Estimate
    from eval.small_study.tune import Tuned


def run_missing(
    study: Study,
    fingerprints: dict[str, str],
    lock: Lock,
    parallel: int | None,
    estimate_only: bool,
    write: Callable[[Study, dict[str, Tuned]], Path],
) -> None:
    """Runs what is not finished, and writes what was found, also where some runs failed.

    Args:
        fingerprints: of `prepared`.
        lock: of the study's folder.
        parallel: runs at once; None: as suits the study's size.
        write: writes the results of a study with the rates that were chosen; the page's path.

    Raises UserError where the folder is another study's, and where runs failed.
    """
    from eval.small_study.execute import check_precisions, check_rates, unfinished
    from eval.small_study.reuse import check_reuse
    from eval.small_study.tune import known, tuned

    there = check_reuse(study, check(study, fingerprints))
    if not estimate_only:
        claim(study, fingerprints)
    jobs, (tuning, more) = study.jobs(), known(study)
    check_precisions(study, [*tuning, *jobs], {})
    todo = unfinished([*tuning, *jobs])
    choosing = f" and {len(tuning)} that choose rates" if tuning else ""
    models = f"{len(jobs)} runs of {len(study.models)} models{choosing}"
    print(f"{models} in {study.out}, {len(todo)} to do")
    if there:
        of_others = f"{len(there)} trainings of other studies"
        print(f"{of_others} are taken over, where the rates chosen are theirs")
    runner = Runner(study, lock, parallel, there)
    if todo:
        said = runner.estimate.text(todo, runner.parallel, more)
        print(f"{runner.parallel} at a time, {runner.threads} threads each; {said}")
    if estimate_only:
        return
    rates = tuned(study, functools.partial(runner.finish, study)) if study.rates else {}
    chosen = with_rates(study, rates)
    ready = [job for job in jobs if job.model in rates or not study.rates]
    check_rates(chosen, ready)
    runner.finish(chosen, ready)
    if not runner.failed or len(unfinished(ready)) < len(ready):
        print(write(chosen, rates))
    if runner.failed:
        count = f"{len(runner.failed)} of {len(runner.begun)} runs failed"
        raise UserError(f"{count}, the others are kept; the same command tries again")


def with_rates(study: Study, rates: dict[str, Tuned]) -> Study:
    """The study with the rates that were chosen."""
    chosen = {model: found.rate for model, found in rates.items()}
    return dataclasses.replace(study, chosen=chosen)


class Runner:
    """Finishes runs; makes workers, and measures how long runs take, once they are needed.

    Attributes:
        parallel, threads: runs at once, and threads of each.
        begun, failed: runs that this call began, and those that failed twice.
    """

    def __init__(
        self, study: Study, lock: Lock, parallel: int | None, taken_over: Collection[Job]
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        self.study, self._lock, self._taken_over = study, lock, taken_over
        self.parallel = parallel or (cores if study.size.parallel else 1)
        # Of the runs at once that are asked for, not of those that are left: the last run of a
        # study that goes on is as fast as the first.
        self.threads = max(1, cores // self.parallel)
        self.begun: set[Job] = set()
        self.failed: set[Job] = set()

    @functools.cached_property
    def workers(self) -> Workers:
        from eval.small_study.execute import Workers

        return Workers(self.study, self.parallel, self.threads, self._lock)

    @functools.cached_property
    def estimate(self) -> Estimate:
        from eval.small_study.progress import measure

        return measure(self.study, self.workers, self._taken_over)

    def finish(self, study: Study, jobs: list[Job]) -> None:
        """Runs those of the jobs that are not finished; what fails is tried once more at the end.

        Args:
            study: that they are run for; its rates may have been chosen meanwhile.
        """
        from eval.small_study.execute import unfinished
        from eval.small_study.progress import Progress
        from eval.small_study.reuse import taken_over

        todo = [job for job in unfinished(jobs) if job not in self.failed]
        if not todo:
            return
        estimate, self.workers.study = self.estimate, study
        self.begun |= {*todo}
        with Progress(jobs, todo, estimate, study) as progress:
            if self.workers.run(todo, taken_over, progress.finished):
                again = unfinished(todo)
                print(f"once more: {', '.join(job.name for job in again)}", flush=True)
                self.workers.run(again, taken_over, progress.finished)
        self.failed |= {*unfinished(todo)}


def prepared(study: Study, own: bool) -> dict[str, str]:
    """Prepares the text where it is missing; returns the fingerprints of `Study.texts`.

    Args:
        own: the data are the user's and are not made here.

    Raises UserError where a text has too few long documents or another tokenizer than the data.
    """
    import numpy as np

    from cat_lm.data.manifest import read_manifest
    from cat_lm.data.opening import open_verified
    from eval.length_sweep.token_stream import first_document

    for folder in (*study.held_out, *([study.data] if own else [])):
        read_manifest(ROOT / folder)  # an error before any text is prepared
    if not own:
        # Much of the library: without codec tables it has some 300 files that are long enough.
        flags = [*LIBRARY, "--validation-fraction", "0.6"]
        flags += ["--tokenizer", f"train:sentencepiece:{study.size.vocabulary}"]
        call = [sys.executable, "-m", "data_prep.prepare", *flags, "--out", str(study.data)]
        if code := subprocess.run(call, cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(code)
    corpora = {
        name: open_verified(ROOT / data, "validation") for name, data in study.texts().items()
    }
    fingerprints = {name: corpus.fingerprint for name, corpus in corpora.items()}
    fingerprints[""] = open_verified(ROOT / study.data, "train").fingerprint
    ours = corpora[""].manifest["tokenizer"]["sha256"]
    needed, length = study.documents or study.size.documents, max(study.lengths())
    for name, corpus in corpora.items():
        option = "--held-out" if name else "--data"
        if corpus.manifest["tokenizer"]["sha256"] != ours:
            raise UserError(
                f"{option} {study.texts()[name]}: was prepared with another tokenizer than "
                f"{study.data}; prepare it with --tokenizer {study.data / 'tokenizer'}"
            )
        # As the sweep does: of the data's own text, what rates are chosen on is not scored.
        skip = 0 if name else study.skip_tokens
        tokens = corpus.tokens(0, corpus.num_tokens)
        tokens = tokens[first_document(tokens, corpus.eod_id, skip) :]
        ends = np.flatnonzero(tokens == corpus.eod_id) + 1
        long = int((np.diff(ends, prepend=0) >= length).sum())
        if long < needed:
            behind = f" behind the first {skip:,} tokens, which choose rates" if skip else ""
            raise UserError(
                f"{option} {study.texts()[name]}: holds out {long} documents of {length} tokens or "
                f"more{behind}, {needed} are scored; hold out more text, or give --documents"
            )
    return fingerprints
