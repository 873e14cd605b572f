"""Choose each model's learning rate, on a seed that no table reports.

Each model is trained once at every rate; the lowest validation loss at the end of training wins.
Where that is at the smallest or largest rate tried, the next one beyond is tried too, by the factor
between the two outermost, at most `WIDENINGS` times; a best rate that is still the outermost is
marked. The loss is of the beginning of the held-out text (`validation.max_tokens`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from eval.small_study.execute import read_result
from eval.small_study.plan import Job, Study

WIDENINGS = 2


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A model's rate, and what it was chosen from.

    Attributes:
        edge: whether the best rate is the smallest ("<=") or largest (">=") tried; "" for neither.
        losses: rate -> nats per token; inf where training diverged.
    """

    rate: float
    edge: str
    losses: dict[float, float]


def tuned(study: Study, run: Callable[[list[Job]], object]) -> dict[str, Tuned]:
    """The rate of each model, with the runs that this needs.

    Args:
        run: finishes jobs that are not finished.
    """
    tried = {model: study.rates for model in study.models}
    for _ in range(WIDENINGS + 1):
        run(study.tuning_jobs(tried))
        found = read(study, tried)
        wider = {model: _wider(tried[model], found[model]) for model in study.models}
        if wider == tried:
            break
        tried = wider
    return found


def read(study: Study, tried: dict[str, tuple[float, ...]]) -> dict[str, Tuned]:
    """What the finished runs at the rates tried say of each model."""
    losses: dict[str, dict[float, float]] = {model: {} for model in study.models}
    for job in study.tuning_jobs(tried):
        loss = read_result(job)["loss"]
        losses[job.model][job.rate] = math.inf if loss is None else loss
    found = {}
    for model, values in losses.items():
        rate = min(values, key=lambda rate: (values[rate], rate))
        edge = {min(values): "<=", max(values): ">="}.get(rate, "") if len(values) > 1 else ""
        found[model] = Tuned(rate, edge, dict(sorted(values.items())))
    return found


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
