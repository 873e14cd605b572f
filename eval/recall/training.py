"""Train and test a cell of recall, by itself or with others as one stack.

Zoology's recipe: AdamW (torch's betas, weight decay 0.1 on all parameters), no warm-up, no
clipping, fp32, a cosine from the learning rate to 0 stepped once an epoch; the same rows in the
same order every epoch. Logits are made at scored positions alone.

Zoology stops, and takes the best epoch, by its test rows. Here validation rows decide both:
training stops when their accuracy is above 0.99 after an epoch, and the model of the best
validation point, the later of equals, is tested. Without that stop the budget is fixed and the last
model is tested. The test rows of all lengths are looked at once, at the end, with this one model.

A stack trains cells of one kind, with different learning rates and seeds: each step is one
computation for all S models (torch.func over stacked parameters), which takes little longer than
that of one where a model alone leaves a GPU idle. Every model keeps its own rows, loss, optimizer,
schedule, tests and early stop, and the result is that of a cell trained by itself, up to rounding;
only dropout draws other numbers, as one generator serves all. A model that has stopped leaves the
stack, so that no time goes into it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cat_lm.mixers import make_mixer
from eval.lab import training
from eval.lab.cell import Step
from eval.lab.training import own_loss
from eval.recall.cell import Cell
from eval.recall.measuring import measure, scored_positions, stack_of
from eval.recall.model import RecallModel, learned_filters
from eval.recall.tasks import Examples, generate

_TEST_SEED = 10  # added to the seed for test data, as in Zoology
_VALIDATION_SEED = 20


class Trial(training.Trial):
    """The training of a cell.

    Attributes:
        tests: name of a test -> its task.
        examples: name of a test -> its rows.
        validation: the rows for validation.
        inputs [rows, T], positions [rows, n], targets [rows, n]: the training rows on the device;
            positions are those that are scored.
    """

    chosen_by = "accuracy"
    # One kernel for an update: of models this small it takes a tenth of a step otherwise.
    optimizer_options: ClassVar[dict[str, Any]] = {"fused": True}

    def __init__(self, cell: Cell, device: str) -> None:
        self.task, self.tests = cell.make_task(), cell.tests()
        super().__init__(cell, device)
        self.keeps_best, self.stop_above = cell.stop_above is not None, cell.stop_above
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, cell.epochs, eta_min=0.0
        )

    def build(self) -> RecallModel:
        cell = self.cell
        return RecallModel(
            make_mixer(cell.mixer),
            vocabulary=self.task.vocabulary,
            d_model=cell.d_model,
            positions=max(cell.seq_len, *(t.seq_len for t in self.tests.values())),
            layers=cell.layers,
            dropout=cell.embedding_dropout,
        )

    def load(self, make: Callable[..., Examples] = generate) -> None:
        cell = self.cell
        self._place(make(self.task, cell.train_examples, seed=cell.seed, split="train"))
        self.examples = {
            name: make(task, cell.test_examples, seed=cell.seed + _TEST_SEED, split="test")
            for name, task in self.tests.items()
        }
        seed = cell.seed + _VALIDATION_SEED
        self.validation = make(self.task, cell.validation_examples, seed=seed, split="validation")

    def _place(self, rows: Examples) -> None:
        self.inputs, labels = (
            torch.from_numpy(x).to(self.device) for x in (rows.inputs, rows.labels)
        )
        self.positions = scored_positions(labels)
        self.targets = labels.gather(1, self.positions)

    def batch(self, step: Step) -> tuple[Tensor, ...]:
        return self.inputs[step.rows], self.positions[step.rows], self.targets[step.rows]

    def imitate(self, rows: int) -> tuple[Tensor, ...]:
        if not hasattr(self, "inputs"):
            self._place(generate(self.task, self.cell.rows, seed=0, split="train"))
        return self.batch(Step(1, 1, slice(0, rows), False, False))

    def loss(self, batch: tuple[Tensor, ...], own: list[Tensor]) -> Tensor:
        inputs, positions, targets = batch
        return F.cross_entropy(self.model(inputs, positions, own), targets.flatten())

    def validate(self) -> dict[str, float]:
        return self._measure(self.validation)

    def advance(self, step: Step) -> None:
        if step.ends_epoch:
            self.schedule.step()

    def test(self) -> dict[str, Any]:
        free = self.task.runs_free
        found = {name: self._measure(rows, free) for name, rows in self.examples.items()}
        return self.describe(found)

    def _measure(self, rows: Examples, runs_free: bool = False) -> dict[str, float]:
        answer, vocabulary = stack_of(self.model.eval()), self.task.vocabulary
        return measure(answer, [rows], vocabulary, self.device, runs_free=runs_free)[0]

    def describe(self, found: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Return what the record has of tests: test -> what it found."""
        return {
            "accuracy": found["trained length"]["accuracy"],
            "tests": {
                name: {
                    "seq_len": self.tests[name].seq_len,
                    **values,
                    **self.tests[name].one_token(self.examples[name]),
                }
                for name, values in found.items()
            },
            "filters": learned_filters(self.model),
        }


class Stack:
    """S models of one architecture that compute as one.

    The models' parameters are views of the stacked ones: what an optimizer does to a model's is
    done to the stack's.

    Args:
        trials: whose models, on one device, are changed in place.
    """

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.trials, self.models = list(trials), [trial.model for trial in trials]
        self.parameters, self.buffers = stack_module_state(self.models)
        for name, stacked in self.parameters.items():
            for model, part in zip(self.models, stacked.detach().unbind(), strict=True):
                model.get_parameter(name).data = part
        first = self.models[0]

        def run_model(
            parameters: Any, buffers: Any, tokens: Tensor, positions: Tensor
        ) -> tuple[Tensor, Tensor]:
            own: list[Tensor] = []
            # Layers may share a module, which is then found under two names. It is
            # to be exchanged once: after a second time torch leaves it without its parameters.
            logits = functional_call(
                first, (parameters, buffers), (tokens, positions, own), tie_weights=False
            )
            return logits, logits.new_zeros(()) + own_loss(own)

        self._all = torch.vmap(run_model, randomness="different")

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [S, B·n, vocabulary] for tokens [S, B, T] at positions [S, B, n]."""
        return self._with_losses(tokens, positions)[0]

    def _with_losses(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and what each model's layers add to its loss [S]."""
        # torch's fused attention for CPUs has no batching rule and would run model by model; that
        # for GPUs keeps no logarithms for the backward pass, as under vmap it sees no gradients.
        with sdpa_kernel(SDPBackend.MATH):
            return self._all(self.parameters, self.buffers, tokens, positions)

    def update(self, batches: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Update every model by its own loss; return the tasks' losses [S] before the update."""
        for model in self.models:
            model.train()
        tokens, positions, targets = (torch.stack(x) for x in zip(*batches, strict=True))
        logits, own = self._with_losses(tokens, positions)
        every = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses = every.view(len(self.models), -1).mean(dim=1)
        for stacked in self.parameters.values():
            stacked.grad = None
        (losses + own).sum().backward()
        for name, stacked in self.parameters.items():
            for model, part in zip(self.models, stacked.grad.unbind(), strict=True):
                model.get_parameter(name).grad = part
        for trial in self.trials:
            trial.optimizer.step()
        return losses.detach()

    def measure(self, rows: Sequence[Examples], runs_free: bool = False) -> list[dict[str, float]]:
        """Measure all models, each on rows of its own."""
        for model in self.models:
            model.eval()
        first = self.trials[0]
        return measure(self, rows, first.task.vocabulary, first.device, runs_free=runs_free)


def stacked_step(cell: Cell, size: int, device: str) -> Callable[[int], object]:
    """Return a function that trains one step of this number of rows of a stack."""
    stack = Stack([Trial(cell, device) for _ in range(size)])
    return lambda rows: stack.update([trial.imitate(rows) for trial in stack.trials])


def run_stack(cells: Sequence[Cell], device: str = "cpu") -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Train and test cells of one kind together; yield each with its record when it stops.

    A record is that of `Cell.run`, with `stacked`, the number of cells that began together. The
    seconds are a cell's share of the time that it was in the stack; `training of the stack` is how
    long that was.

    Raises:
        ValueError: cells of different kinds.
        UserError: options that do not fit.
    """
    if len({cell.kind for cell in cells}) != 1:
        raise ValueError("only cells that differ in learning rate and seed alone can be stacked")
    trials = [Trial(cell, device) for cell in cells]
    started = time.monotonic()
    make = functools.cache(generate)  # Cells with the same seed share their rows.
    for trial in trials:
        trial.load(make)
    data = (time.monotonic() - started) / len(trials)
    torch.manual_seed(cells[0].seed)  # This seeds the dropout.
    stack, plan = Stack(trials), list(cells[0].plan())
    shares, total, started = dict.fromkeys(trials, 0.0), 0.0, time.monotonic()
    for step in plan:
        losses = stack.update([trial.batch(step) for trial in stack.trials])
        stopping = _validate(stack, step, losses) if step.tested else []
        if step is plan[-1]:
            stopping = stack.trials
        if stopping:
            passed = time.monotonic() - started
            total += passed
            for trial in stack.trials:
                shares[trial] += passed / len(stack.trials)
            started = time.monotonic()
            tested = _test(stopping)
            testing = (time.monotonic() - started) / len(stopping)
            for trial, found in zip(stopping, tested, strict=True):
                times = {"data": data, "training": shares[trial], "testing": testing}
                record = trial.record(found, **times, **{"training of the stack": total})
                yield trial.cell, record | {"stacked": len(cells)}
            if not (active := [trial for trial in stack.trials if trial not in stopping]):
                return
            stack, started = Stack(active), time.monotonic()
        for trial in stack.trials:
            trial.advance(step)


def _validate(stack: Stack, step: Step, losses: Tensor) -> list[Trial]:
    """Note a validation of each model; return those that stop here."""
    stopping = []
    found = stack.measure([trial.validation for trial in stack.trials])
    for trial, loss, point in zip(stack.trials, losses.tolist(), found, strict=True):
        trial.steps = step.number
        if trial.note(step, loss, point):
            stopping.append(trial)
    return stopping


def _test(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Test trained models together; return what the record of each has."""
    for trial in trials:
        trial.restore()
    stack, free = Stack(trials), trials[0].task.runs_free
    tests = trials[0].examples
    found = [stack.measure([trial.examples[name] for trial in trials], free) for name in tests]
    return [
        trial.describe(dict(zip(tests, points, strict=True)))
        for trial, points in zip(trials, zip(*found, strict=True), strict=True)
    ]
