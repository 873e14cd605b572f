"""`python -m eval.speed stacks`: many small models of recall trained as one, beside one alone.

For each mixer a step of N stacked models is timed, for several N; memory at the peak stands beside
what `eval.recall` sets aside for each model. A mixer that fails is refused: its row says why.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.common.text_table import aligned
from eval.recall.train.cell import Cell
from eval.recall.train.cost import bytes_of
from eval.recall.train.stack import Stack, train_step
from eval.recall.train.trial import Trial
from eval.speed.progress import say
from eval.speed.timing import Timing, summary, time_in_turn


@dataclass(frozen=True)
class StackOptions:
    """Choose what to time: every mixer with every number of models, on rows of one task."""

    task: str
    mixers: Sequence[str]
    sizes: Sequence[int]
    d_model: int
    seq_len: int
    batch_size: int
    repeats: int


def stacks_speed(options: StackOptions, device: torch.device) -> dict[str, Any]:
    """Time all stacks; `refused` of the result lists the mixers that fail.

    Raises:
        UserError: a task, a mixer or a size that cannot be.
    """
    cells = {mixer: _cell(options, mixer) for mixer in options.mixers}
    estimates = {mixer: bytes_of(cell) for mixer, cell in cells.items()}  # and all are checked
    rows, refused = [], []
    for mixer, cell in cells.items():
        alone = None
        for size in options.sizes:
            say(f"{mixer}, {size} as one")
            try:
                timing, peak = _timed(cell, size, device, options.repeats)
            except RuntimeError as error:  # torch's out of memory is one
                reason = f"failed with {type(error).__name__}: {str(error).splitlines()[0]}"
                refused.append({"case": f"{mixer}, {size} as one", "reason": reason})
                break
            alone = alone or timing.median / size
            rows.append(
                {
                    "mixer": mixer,
                    "models": size,
                    "step_seconds": summary(timing.seconds),
                    "model_steps_per_second": size / timing.median,
                    "times_as_fast_as_the_first": alone * size / timing.median,
                    "estimated_bytes": size * estimates[mixer],
                    "measured_bytes": peak,
                }
            )
    return {"case": dataclasses.asdict(options), "results": rows, "refused": refused}


def _cell(options: StackOptions, mixer: str) -> Cell:
    return Cell(
        options.task,
        mixer,
        options.d_model,
        options.seq_len,
        lr=1e-9,
        epochs=1,
        train_examples=options.batch_size,
        test_examples=1,
        batch_size=options.batch_size,
        stop_above=None,
    )


def _timed(cell: Cell, size: int, device: torch.device, repeats: int) -> tuple[Timing, int | None]:
    """A step's times, and on a GPU the bytes that training took at its peak."""
    gc.collect()
    on_gpu, before = device.type == "cuda", 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = _step(cell, size, device)
    timings = time_in_turn(
        {size: step}, device, repeats, min_seconds=0, cuda_graphs=False, flush_cache=False
    )
    return timings[size], torch.cuda.max_memory_allocated() - before if on_gpu else None


def _step(cell: Cell, size: int, device: torch.device) -> Callable[[], object]:
    alike = [dataclasses.replace(cell, seed=seed) for seed in range(size)]
    trials = [Trial(cell, str(device)) for cell in alike]
    stack = Stack([trial.model for trial in trials])
    return lambda: train_step(stack, trials, slice(0, cell.rows))


def stack_lines(record: dict[str, Any]) -> list[str]:
    """Write the record as a table, and what was refused."""
    case = record["case"]
    title = f"{case['task']}, width {case['d_model']}, length {case['seq_len']}, "
    header = ("", "models", "ms a step", "models x steps/s", "vs first", "peak/estimate")
    rows = []
    for row in record["results"]:
        peak = row["measured_bytes"]
        rows.append(
            (
                row["mixer"],
                str(row["models"]),
                f"{row['step_seconds']['median'] * 1e3:.2f}",
                f"{row['model_steps_per_second']:.1f}",
                f"{row['times_as_fast_as_the_first']:.2f}",
                "" if peak is None else f"{peak / row['estimated_bytes']:.2f}",
            )
        )
    lines = [f"{title}{case['batch_size']} rows", aligned(header, rows)]
    return lines + [f"refused: {item['case']}: {item['reason']}" for item in record["refused"]]
