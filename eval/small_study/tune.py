"""Choose each model's learning rate, on seeds that no table reports.

Each model is trained at every rate, with each of `tuning_seeds`; the lowest validation loss at the
end of training, mean over them, wins.
Where that is at the smallest or largest rate tried, the next one beyond is tried too, by the factor
between the two outermost, at most `WIDENINGS` times; a best rate that is still the outermost is
marked. The loss is of the beginning of the held-out text (`validation.max_tokens`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

from eval.small_study.execute import read_result, unfinished
from eval.small_study.plan import Job, Study

WIDENINGS = 2


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A model's rate, and what it was chosen from.

    Attributes:
        edge: whether the best rate is the smallest ("<=") or largest (">=") tried; "" for neither.
        runs: rate -> nats per token of each seed; inf where training diverged.
    """

    rate: float
    edge: str
    runs: dict[float, list[float]]

    @property
    def losses(self) -> dict[float, float]:
        """Rate -> nats per token, mean over seeds; inf where one of them diverged."""
        return _means(self.runs)


def tuned(study: Study, run: Callable[[list[Job]], object]) -> dict[str, Tuned]:
    """The rate of each model, with the runs that this needs.

    Args:
        run: finishes jobs that are not finished; a model of which some fail has no rate.
    """
    tried = {model: study.rates for model in study.models}
    for _ in range(WIDENINGS + 1):
        run(study.tuning_jobs(tried))
        found = read(study, tried)
        wider = tried | {model: _wider(tried[model], own) for model, own in found.items()}
        if wider == tried:
            break
        tried = wider
    return found


def known(study: Study) -> tuple[list[Job], list[str]]:
    """The tuning runs that are known to be needed, from those that are finished.

    Returns them, and the model of each further one that a best rate at the edge might need.
    """
    jobs: list[Job] = []
    more: list[str] = []
    for model in study.models if study.rates else ():
        alone = dataclasses.replace(study, models=(model,))
        tried = {model: study.rates}
        for left in range(WIDENINGS, -1, -1):
            if unfinished(alone.tuning_jobs(tried)):
                more += [model] * left * study.tuning_seeds
                break
            wider = _wider(tried[model], read(alone, tried)[model])
            if wider == tried[model] or not left:
                break
            tried = {model: wider}
        jobs += alone.tuning_jobs(tried)
    return jobs, more


def read(study: Study, tried: dict[str, tuple[float, ...]]) -> dict[str, Tuned]:
    """What the runs at the rates tried say of each model; nothing where some are not finished."""
    jobs = study.tuning_jobs(tried)
    waiting = {job.model for job in unfinished(jobs)}
    runs: dict[str, dict[float, list[float]]] = {}
    for job in jobs:
        if job.model not in waiting:
            loss = read_result(job)["loss"]
            at_rate = runs.setdefault(job.model, {}).setdefault(job.rate, [])
            at_rate.append(math.inf if loss is None else loss)
    found = {}
    for model, own in runs.items():
        values = _means(own)
        rate = min(values, key=lambda rate: (values[rate], rate))
        edge = {min(values): "<=", max(values): ">="}.get(rate, "") if len(values) > 1 else ""
        found[model] = Tuned(rate, edge, dict(sorted(own.items())))
    return found


def _means(runs: dict[float, list[float]]) -> dict[float, float]:
    return {rate: statistics.fmean(losses) for rate, losses in runs.items()}


def _wider(tried: tuple[float, ...], found: Tuned) -> tuple[float, ...]:
    rates = sorted(tried)
    if found.edge == "<=":
        return (_rounded(rates[0] ** 2 / rates[1]), *rates)
    if found.edge == ">=":
        return (*rates, _rounded(rates[-1] ** 2 / rates[-2]))
    return tried


def _rounded(rate: float) -> float:
    """To three digits."""
    return float(f"{rate:.3g}")
