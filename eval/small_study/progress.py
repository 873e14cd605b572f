"""Tell how long the study will take: measured before it runs, corrected meanwhile."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.folders import make_temporary, remove_temporary
from cat_lm.counts import flops_per_token
from cat_lm.training.estimate import meta_model
from eval.common.result_files import read_metrics
from eval.small_study.execute import (
    JobFailed,
    Workers,
    check_precisions,
    last_line,
    last_loss,
    precision_of,
    steps_done,
)
from eval.small_study.plan import TUNING_SEED, Job, Study
from eval.small_study.questions import MODELS
from eval.small_study.tune import known

STEPS = 12  # of a trial training
FORWARD = 1 / 3  # of the work of training on a token: a forward pass alone


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of each model's run when as many run at once as will.

    Attributes:
        seconds: of a whole run.
        training: of one that is trained alone, to choose a rate.
        measuring: of a whole run whose training is taken over from another study.
        starting: of one that is trained alone and taken over: its training program finds it done.
        taken_over: the runs of which this is expected.
    """

    seconds: dict[str, float]
    training: dict[str, float]
    measuring: dict[str, float]
    starting: dict[str, float]
    taken_over: frozenset[Job] = frozenset()

    def of(self, job: Job) -> float:
        """Return a run's seconds, as far as is known before it is begun."""
        return self.seconds_of(job, job in self.taken_over)

    def seconds_of(self, job: Job, taken_over: bool) -> float:
        """Return a run's seconds with and without its training."""
        if job.rate is not None:
            return (self.starting if taken_over else self.training)[job.model]
        return (self.measuring if taken_over else self.seconds)[job.model]

    def text(self, jobs: Sequence[Job], parallel: int, more: Sequence[str] = ()) -> str:
        """Return how long the jobs take.

        Args:
            more: the model of each further run that choosing rates might need.
        """
        total = sum(map(self.of, jobs)) / min(parallel, max(1, len(jobs)))
        said = f"by {STEPS} trial steps of each kind of model, about {duration(total)} for all"
        if more:
            widened = sum(self.training[model] for model in more) / min(parallel, len(more))
            said += f", up to {duration(widened)} more where best rates are at the end of the list"
        return said


def measure(study: Study, workers: Workers, taken_over: Collection[Job] = ()) -> Estimate:
    """Trains one model of each kind for a few steps, as many at once as later.

    Args:
        taken_over: runs whose trainings other studies have.

    Raises UserError where one of them cannot be trained at all.
    """
    kinds: dict[tuple[str, str], Job] = {}
    folder = study.out / "trial"
    for model in study.models:
        job = Job(model, 0, folder / model)
        kinds.setdefault(_kind(study.config(job)), job)
    remove_temporary(folder)
    make_temporary(folder)
    print(
        f"measuring the speed of {', '.join(MODELS[j.model] for j in kinds.values())}", flush=True
    )
    rates: dict[str, tuple[float, float]] = {}
    failures = workers.run(
        list(kinds.values()), _trial, lambda job, rate: rates.update({job.model: rate})
    )
    if failures:
        raise UserError(f"{len(failures)} of {len(kinds)} trial trainings failed: {failures[0]}")
    seconds, training, measuring, starting = {}, {}, {}, {}
    for model in study.models:
        config = study.config(Job(model, 0, folder))
        choosing = study.config(Job(model, TUNING_SEED, folder, config.optimizer.lr))
        rate, start = rates[kinds[_kind(config)].model]
        starting[model] = start
        training[model] = _work(choosing) / rate + start
        # Besides training: its program, the export, and a process for each sweep.
        scored = FORWARD * study.scored_tokens() * reading_cost(study, config)
        measuring[model] = scored / rate + (2 + len(study.texts())) * start
        seconds[model] = measuring[model] + _work(config) / rate
    # Before hours of training here, whose runs could not be compared with those of elsewhere.
    here = {f"a trial of {job.model}": precision_of(job) for job in kinds.values()}
    check_precisions(study, [*known(study)[0], *study.jobs()], here)
    remove_temporary(folder)
    return Estimate(seconds, training, measuring, starting, frozenset(taken_over))


def _work(config: RunConfig) -> float:
    """Count the tokens of a training, those of its validations as far as they take as long."""
    validations = config.total_steps / config.validation.every_steps
    trained = config.total_steps * config.tokens_per_step
    return trained + FORWARD * validations * (config.validation.max_tokens or 0)


def reading_cost(study: Study, config: RunConfig) -> float:
    """Return a scored token's FLOPs, mean over a sweep's cells, in those at the trained length.

    Long windows cost attention more. The cells of scaled positions stand evenly over the lengths
    beyond the trained one.
    """
    trained = config.data.context_length

    def cost(length: int) -> float:
        return flops_per_token(meta_model(config, study.size.vocabulary), length)

    def cost_of_cell(length: int) -> float:
        try:
            return cost(length)
        except UserError:  # A pattern of attention may read no rows of this length.
            return cost(trained)

    lengths = study.lengths()
    scaled = study.cells() - len(lengths)
    each = scaled / max(1, sum(length > trained for length in lengths))
    flops = sum(cost_of_cell(n) * (1 + (each if n > trained else 0)) for n in lengths)
    return flops / study.cells() / cost(trained)


def _kind(config: RunConfig) -> tuple[str, str]:
    """Name what sets the speed of models of one size apart."""
    return config.model.architecture, config.architecture.summary(config.model).variant


def _trial(workers: Workers, job: Job) -> tuple[float, float]:
    """A short training of the job's model: its tokens a second, and the seconds around it."""
    study = workers.study
    begin = time.perf_counter()
    steps = [f"train.max_steps={STEPS}", "train.max_tokens=null", "train.resume=never"]
    steps += ["optimizer.warmup_steps=0", "optimizer.warmup_tokens=null"]
    steps += ["validation.every_steps=1000", "validation.max_tokens=4096"]
    arguments = ["train.py", str(study.config_file(job.model)), *study.overrides(job), *steps]
    # Beside the training's own folder: where it fails, it stays until the next call.
    log = job.folder.with_name(f"{job.model}.log")
    if code := workers.process(arguments, log):
        raise JobFailed(
            f"{job.model}: trial training ended with code {code}, see {log}: {last_line(log)}"
        )
    wall = time.perf_counter() - begin
    metrics = job.folder / "metrics.jsonl"
    records = [r for r in read_metrics(metrics) if r.get("step_seconds")]
    rates = [r["tokens_per_second"] for r in records if r.get("tokens_per_second")]
    if not rates:
        raise JobFailed(f"{job.model}: {metrics}: its trial steps have no speed")
    training = sum(record["step_seconds"] for record in records)
    return statistics.median(rates), max(0.0, wall - training)


class Progress:
    """Tells how far the study is: a line for each finished run, on a terminal a bar of steps."""

    def __init__(self, jobs: Sequence[Job], todo: Sequence[Job], estimate: Estimate, study: Study):
        self.total, self.todo, self.estimate = len(jobs), list(todo), estimate
        self.study = study
        self.done: dict[Job, float] = {}  # with the seconds that were to be expected
        self.begin = time.perf_counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        steps = {job: self.study.config(job).total_steps for job in self.todo}
        self.bar = tqdm(total=sum(steps.values()), unit="step", disable=None)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if not self.bar.disable:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.bar.close()

    def finished(self, job: Job, result: dict[str, Any]) -> None:
        """A line about a finished run, and about the time that the others will take."""
        with self._lock:
            self.done[job] = self.estimate.seconds_of(job, bool(result["reused"]))
            number = self.total - len(self.todo) + len(self.done)
            what = "diverged" if result["diverged"] else _loss(job)
            self.bar.write(
                f"[{number}/{self.total}] {job.name}: {what}, {duration(result['seconds'])}; "
                f"about {duration(self.remaining())} left",
                file=sys.stdout,
            )
            sys.stdout.flush()

    def remaining(self) -> float:
        """Seconds: the estimate of what is left, corrected by how it did so far."""
        expected = sum(self.done.values())
        left = sum(self.estimate.of(job) for job in self.todo if job not in self.done)
        return left / expected * (time.perf_counter() - self.begin) if expected else left

    def _watch(self) -> None:
        start = sum(steps_done(job) for job in self.todo)
        while not self._ended.wait(2):
            self.bar.n = sum(steps_done(job) for job in self.todo) - start
            self.bar.refresh()


def duration(seconds: float) -> str:
    """75 -> 75 s, 600 -> 10 min, 20000 -> 5.6 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _loss(job: Job) -> str:
    loss = last_loss(job)
    return "no finite held-out loss" if loss is None else f"held-out loss {loss:.3f}"
