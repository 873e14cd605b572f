"""Training and testing one cell: a task, a mixer, a width, a learning rate, a seed.

Zoology's recipe: AdamW (torch's betas, weight decay 0.1 on all parameters), no warm-up, no
clipping, fp32, a cosine from the learning rate to 0 stepped once an epoch; the same rows in the
same order every epoch; stop when the test accuracy is above 0.99 after an epoch. Accuracy is the
mean over rows of the mean over a row's scored positions. Logits are made at scored positions alone.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from cat_lm.errors import UserError
from eval.recall.mixers import make_mixer
from eval.recall.model import RecallModel, learned_filters, parameters
from eval.recall.options import parse_specification
from eval.recall.tasks import IGNORED, Examples, Task, generate, make_task
from eval.recall.tasks.multi_query import MultiQueryRecall

BATCHES = {128: 512, 256: 256, 512: 128, 1024: 64}  # longest L -> rows, as Zoology's Figure 2
STOP_ABOVE = 0.99
_TEST_SEED = 10  # added to the seed, as Zoology's
_LOGITS = 2**24  # logits made at once when testing


@dataclass(frozen=True)
class Cell:
    """All that decides a result.

    Attributes:
        task, mixer: specifications such as `mqar:keys=8`, `cat:streams=k`.
        layers: none for the mixer's own.
        batch_size: none for Zoology's at that length.
        stop_above: test accuracy after which training stops; none: never.
        eval_steps: also test (and perhaps stop) every so many steps; none: after epochs alone.
        test_lengths: further lengths to test at, with the task's items in proportion.
        fixed_items: test longer lengths also with as many items as in training.
    """

    task: str
    mixer: str
    d_model: int
    seq_len: int
    lr: float = 1e-2
    seed: int = 0
    epochs: int = 64
    train_examples: int = 100_000
    test_examples: int = 3_000
    layers: int | None = None
    batch_size: int | None = None
    weight_decay: float = 0.1
    stop_above: float | None = STOP_ABOVE
    eval_steps: int | None = None
    test_lengths: tuple[int, ...] = ()
    fixed_items: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "seq_len", "epochs", "train_examples", "test_examples"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("layers", "batch_size", "eval_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: must be at least 1")
        if not self.lr > 0:
            raise UserError(f"lr={self.lr}: must be above 0")

    def make_task(self) -> Task:
        """The task, or a UserError for options that do not fit."""
        name, options = parse_specification(self.task)
        return make_task(name, self.seq_len, options)

    @property
    def rows(self) -> int:
        """Rows in a batch."""
        if self.batch_size is not None:
            return self.batch_size
        return next((rows for length, rows in BATCHES.items() if self.seq_len <= length), 64)

    @property
    def all_steps(self) -> int:
        """Steps without an early stop."""
        return self.epochs * -(-self.train_examples // self.rows)

    def timed(self, steps: int) -> Cell:
        """The same kind of step, so many times; equal for cells whose steps cost the same."""
        return dataclasses.replace(
            self,
            lr=1e-9,
            seed=0,
            epochs=1,
            train_examples=steps * self.rows,
            test_examples=1,
            test_lengths=(),
            stop_above=None,
        )

    def run(self, device: str, *, quiet: bool = False) -> dict[str, Any]:
        return run_cell(self, device, quiet=quiet)


def run_cell(cell: Cell, device: str = "cpu", *, quiet: bool = False) -> dict[str, Any]:
    """Trains and tests a cell.

    Args:
        device: of torch.
        quiet: no progress.

    Returns:
        Plain values: accuracies by test, the history of tests, filters, times.

    Raises:
        UserError: options that do not fit.
    """
    started = time.monotonic()
    task, mixer = cell.make_task(), make_mixer(cell.mixer)
    tests = _tests(cell, task)
    torch.manual_seed(cell.seed)
    longest = max(cell.seq_len, *(t.seq_len for t in tests.values()))
    model = RecallModel(
        mixer,
        vocabulary=task.vocabulary,
        d_model=cell.d_model,
        positions=longest,
        layers=cell.layers,
    ).to(device)
    train = generate(task, cell.train_examples, seed=cell.seed, split="train")
    examples = _test_examples(cell, tests)
    prepared = time.monotonic()
    history, steps = _train(cell, model, train, examples["trained length"], quiet)
    trained = time.monotonic()
    accuracies = {name: measure(model, rows) for name, rows in examples.items()}
    if task.free_running and getattr(task, "mode", "") == "autoregressive":
        accuracies["trained length"] |= free_running(model, examples["trained length"])
    return {
        "cell": dataclasses.asdict(cell),
        "task": task.describe(),
        "mixer": {"label": mixer.label, "options": dataclasses.asdict(mixer.options)},
        "layers": cell.layers or mixer.layers,
        "parameters": parameters(model),
        "accuracy": accuracies["trained length"]["accuracy"],
        "best_accuracy": max(point["accuracy"] for point in history),
        "tests": {
            name: {"seq_len": tests[name].seq_len, **found} for name, found in accuracies.items()
        },
        "history": history,
        "steps": steps,
        "filters": learned_filters(model),
        "seconds": {
            "data": round(prepared - started, 2),
            "training": round(trained - prepared, 2),
            "testing": round(time.monotonic() - trained, 2),
        },
    }


def _tests(cell: Cell, task: Task) -> dict[str, Task]:
    """Test name -> task."""
    tests = {"trained length": task}
    for length in cell.test_lengths:
        try:
            tests[f"length {length}"] = task.at_length(length)
            if cell.fixed_items and isinstance(task, MultiQueryRecall) and length > task.seq_len:
                fixed = dataclasses.replace(task, seq_len=length, keys=task.num_keys)
                tests[f"length {length}, {task.num_keys} keys"] = fixed
        except ValueError as error:
            raise UserError(f"--test-lengths {length}: {error}") from None
    return tests


def _test_examples(cell: Cell, tests: dict[str, Task]) -> dict[str, Examples]:
    seed = cell.seed + _TEST_SEED
    return {
        name: generate(task, cell.test_examples, seed=seed, split="test")
        for name, task in tests.items()
    }


def _train(
    cell: Cell, model: RecallModel, train: Examples, test: Examples, quiet: bool
) -> tuple[list[dict[str, float]], int]:
    """Trains in place; the history of tests, and the steps made."""
    device = model.embedding.weight.device
    inputs, labels = (torch.from_numpy(x).to(device) for x in (train.inputs, train.labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.lr, weight_decay=cell.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cell.epochs, eta_min=0.0)
    history: list[dict[str, float]] = []
    starts = range(0, len(inputs), cell.rows)
    bar = tqdm(total=cell.epochs * len(starts), disable=True if quiet else None, leave=False)
    step = 0
    for epoch in range(cell.epochs):
        for start in starts:
            rows = slice(start, start + cell.rows)
            loss = _step(model, optimizer, inputs[rows], labels[rows])
            step += 1
            bar.update()
            ended = start == starts[-1]
            if not ended and (cell.eval_steps is None or step % cell.eval_steps):
                continue
            found = measure(model, test)
            point = {"step": step, "epoch": epoch + 1, "loss": float(loss.detach()), **found}
            history.append(point)
            if not quiet:
                _report(bar, point, cell)
            if cell.stop_above is not None and found["accuracy"] > cell.stop_above:
                bar.close()
                return history, step
        schedule.step()
    bar.close()
    return history, step


def _step(
    model: RecallModel, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor
) -> Tensor:
    model.train()
    scored = labels != IGNORED
    loss = F.cross_entropy(model(tokens, scored), labels[scored])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


def _report(bar: tqdm, point: dict[str, float], cell: Cell) -> None:
    text = f"accuracy {point['accuracy']:.4f}, loss {point['loss']:.3f}"
    if bar.disable:
        where = f"step {point['step']}, epoch {point['epoch']}/{cell.epochs}"
        print(f"{where}: {text}", file=sys.stderr, flush=True)
    else:
        bar.set_postfix_str(text)


@torch.no_grad()
def measure(model: RecallModel, examples: Examples) -> dict[str, float]:
    """`accuracy`, mean over rows of the share of right positions; `rows_right`, share of rows whose
    positions are all right. Answers before are given (teacher forcing)."""
    model.eval()
    device = model.embedding.weight.device
    scored = examples.labels[:1] != IGNORED
    rows = max(1, _LOGITS // (int(scored.sum()) * len(model.embedding.weight)))
    rows = min(rows, max(1, 2**22 // examples.inputs.shape[1] ** 2))
    right = []
    for start in range(0, len(examples), rows):
        tokens = torch.from_numpy(examples.inputs[start : start + rows]).to(device)
        labels = torch.from_numpy(examples.labels[start : start + rows]).to(device)
        found = model(tokens, labels != IGNORED).argmax(dim=1) == labels[labels != IGNORED]
        right.append(found.view(len(tokens), -1).cpu())
    correct = torch.cat(right)
    return {
        "accuracy": float(correct.double().mean(dim=1).mean()),
        "rows_right": float(correct.all(dim=1).double().mean()),
    }


@torch.no_grad()
def free_running(model: RecallModel, examples: Examples) -> dict[str, float]:
    """The same when a model's own answers are fed back, where labels stand at a row's end."""
    model.eval()
    device = model.embedding.weight.device
    labels = torch.from_numpy(examples.labels).to(device)
    first = int((examples.labels[0] == IGNORED).sum())
    tokens, answers = torch.from_numpy(examples.inputs).to(device), []
    rows = max(1, 2**22 // tokens.shape[1] ** 2)
    for part in tokens.split(rows):
        part, found = part[:, : first + 1], []
        for _ in range(labels.shape[1] - first):
            scored = torch.zeros_like(part, dtype=torch.bool)
            scored[:, -1] = True
            found.append(model(part, scored).argmax(dim=1))
            part = torch.cat([part, found[-1][:, None]], dim=1)
        answers.append(torch.stack(found, dim=1))
    right = (torch.cat(answers) == labels[:, first:]).double()
    return {
        "free_running_accuracy": float(right.mean()),
        "free_running_rows_right": float((right == 1).all(dim=1).double().mean()),
    }


def choose_device(name: str) -> str:
    """`auto` is the GPU if there is one.

    Raises:
        UserError: a device that torch does not have here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name


def delays(filters: Sequence[dict[str, list[list[float]]]]) -> list[dict[str, list[int]]]:
    """The lag of the largest tap of each learned filter: stream -> one lag a head, for each layer.

    A layer that recalls by single taps has delay(k) = delay(q) + delay(v) + 1.
    """
    return [
        {
            stream: [max(range(len(f)), key=lambda i, f=f: abs(f[i])) for f in heads]
            for stream, heads in layer.items()
        }
        for layer in filters
    ]
