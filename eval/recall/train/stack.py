"""Training many small models as one: cells of one kind with different learning rates and seeds.

Each step is one computation for all S models (torch.func over stacked parameters), which takes
little longer than that of one where a model alone leaves a GPU idle. Every model keeps its own
rows, loss, optimiser, schedule, tests and early stop, and the result is that of a cell trained by
itself, up to rounding; only dropout draws other numbers, as one generator serves all. A model that
has stopped leaves the stack, so that no time goes into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from eval.lab.training import own_loss
from eval.recall.model import RecallModel
from eval.recall.tasks import Examples, generate
from eval.recall.train.measuring import free_running_stack, measure_stack
from eval.recall.train.trial import Trial

if TYPE_CHECKING:
    from eval.recall.train.cell import Cell


class Stack:
    """S models of one architecture that compute as one.

    The models' parameters are views of the stacked ones: what an optimiser does to a model's is
    done to the stack's.

    Args:
        models: on one device; they are changed in place.
    """

    def __init__(self, models: Sequence[RecallModel]) -> None:
        self.models = list(models)
        self.parameters, self.buffers = stack_module_state(self.models)
        for name, stacked in self.parameters.items():
            for model, part in zip(self.models, stacked.detach().unbind(), strict=True):
                model.get_parameter(name).data = part
        first = self.models[0]

        def one(
            parameters: Any, buffers: Any, tokens: Tensor, positions: Tensor
        ) -> tuple[Tensor, Tensor]:
            own: list[Tensor] = []
            # Layers may share a module, which is then found under two names. It is
            # to be exchanged once: after a second time torch leaves it without its parameters.
            logits = functional_call(
                first, (parameters, buffers), (tokens, positions, own), tie_weights=False
            )
            return logits, logits.new_zeros(()) + own_loss(own)

        self._all = torch.vmap(one, randomness="different")

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [S, B·n, vocabulary] for tokens [S, B, T] at positions [S, B, n]."""
        return self.with_losses(tokens, positions)[0]

    def with_losses(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and what each model's layers add to its loss [S]."""
        # torch's fused attention for CPUs has no batching rule and would run model by model; that
        # for GPUs keeps no logarithms for the backward pass, as under vmap it sees no gradients.
        with sdpa_kernel(SDPBackend.MATH):
            return self._all(self.parameters, self.buffers, tokens, positions)

    def train(self, mode: bool = True) -> None:
        for model in self.models:
            model.train(mode)

    def backward(self, losses: Tensor) -> None:
        """Compute every model's gradients of its own loss, of losses [S]."""
        for stacked in self.parameters.values():
            stacked.grad = None
        losses.sum().backward()
        for name, stacked in self.parameters.items():
            for model, part in zip(self.models, stacked.grad.unbind(), strict=True):
                model.get_parameter(name).grad = part


def run_stack(cells: Sequence[Cell], device: str = "cpu") -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Trains and tests cells of one kind together; each with its record when it has stopped.

    A record is that of `run_cell`, with `stacked`, the number of cells that began together. The
    seconds are a cell's share of the time that it was in the stack; `training of the stack` is how
    long that was.

    Raises:
        ValueError: cells of different kinds.
        UserError: options that do not fit.
    """
    if len({cell.kind for cell in cells}) != 1:
        raise ValueError("only cells that differ in learning rate and seed alone can be stacked")
    make = _once(generate)
    trials = [Trial(cell, device, make) for cell in cells]
    torch.manual_seed(cells[0].seed)  # of the dropout
    active, stack = trials, Stack([trial.model for trial in trials])
    clock = _Clock(trials)
    for step in cells[0].steps():
        losses = train_step(stack, active, step.rows)
        if step.tested:
            stopping = _validate(stack, active, step, losses)
            if step.number == cells[0].all_steps:
                stopping = active
            if stopping:
                clock.share(active)
                yield from _finish(stopping, clock, len(cells), device)
                active = [trial for trial in active if trial not in stopping]
                if not active:
                    return
                stack = Stack([trial.model for trial in active])
                clock.start()
        if step.ends_epoch:
            for trial in active:
                trial.schedule.step()


def train_step(stack: Stack, trials: Sequence[Trial], rows: slice) -> Tensor:
    """One update of every model; the task's losses [S] before it."""
    stack.train()
    tokens, positions, targets = (
        torch.stack([getattr(trial, name)[rows] for trial in trials])
        for name in ("inputs", "positions", "targets")
    )
    logits, own = stack.with_losses(tokens, positions)
    every = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = every.view(len(trials), -1).mean(dim=1)
    stack.backward(losses + own)
    for trial in trials:
        trial.optimizer.step()
    return losses.detach()


def _validate(stack: Stack, trials: Sequence[Trial], step: Any, losses: Tensor) -> list[Trial]:
    """Validates all models; those that stop."""
    found = _measured(stack, [trial.validation for trial in trials], trials[0])
    points = zip(trials, losses.tolist(), found, strict=True)
    return [trial for trial, loss, point in points if trial.note(step, loss, point)]


def _measured(stack: Stack, examples: Sequence[Examples], first: Trial) -> list[dict[str, float]]:
    stack.train(False)
    return measure_stack(stack, examples, first.task.vocabulary, first.inputs.device)


def _finish(
    trials: Sequence[Trial], clock: _Clock, size: int, device: str
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Tests trained models together; the record of each."""
    for trial in trials:
        trial.restore()
    started, stack = time.monotonic(), Stack([trial.model for trial in trials])
    found = {
        test: _measured(stack, [trial.examples[test] for trial in trials], trials[0])
        for test in trials[0].examples
    }
    if trials[0].task.runs_free:
        for test, forced in found.items():
            alone = free_running_stack(stack, [trial.examples[test] for trial in trials], device)
            found[test] = [a | b for a, b in zip(forced, alone, strict=True)]
    testing = (time.monotonic() - started) / len(trials)
    for i, trial in enumerate(trials):
        accuracies = {test: points[i] for test, points in found.items()}
        record = trial.record(accuracies, clock.shares[id(trial)], testing)
        record["stacked"] = size
        record["seconds"]["training of the stack"] = round(clock.total, 2)
        yield trial.cell, record


class _Clock:
    """Each trial's share of the training's seconds, and all of them so far."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.total = 0.0
        self.shares = {id(trial): 0.0 for trial in trials}
        self.start()

    def start(self) -> None:
        self.started = time.monotonic()

    def share(self, active: Sequence[Trial]) -> None:
        """Divides the time since the start among those that were active."""
        passed = time.monotonic() - self.started
        self.total += passed
        for trial in active:
            self.shares[id(trial)] += passed / len(active)


def _once(make: Callable[..., Examples]) -> Callable[..., Examples]:
    """Makes the same rows once: cells of one seed share them."""
    made: dict[Any, Examples] = {}

    def remembered(task: Any, count: int, *, seed: int, split: str) -> Examples:
        key = (task, count, seed, split)
        if key not in made:
            made[key] = make(task, count, seed=seed, split=split)
        return made[key]

    return remembered
