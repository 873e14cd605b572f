"""The options of commands that run grids; imports no torch, so that `--help` is quick."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from cat_lm.core import numbers
from cat_lm.core.cli import or_word, output_path, whole
from cat_lm.pretrained.loading import choose_device

if TYPE_CHECKING:
    from eval.lab.execution import Execution


def add_grid_options(parser: argparse.ArgumentParser, stacks: bool = True) -> None:
    """Add the options of all grids. stacks: if True, cells can be trained as one stack."""
    scales = ("smoke", "cpu", "gpu", "paper")
    parser.add_argument(
        "--scale",
        choices=scales,
        default="cpu",
        help="scale of the study; studies differ in the scales that they have",
    )
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")
    parser.add_argument(
        "--workers",
        type=whole(numbers.WORKERS),
        help="processes at once (default: the cores; on a GPU at most 4)",
    )
    if stacks:
        parser.add_argument(
            "--stack",
            type=or_word(whole(numbers.SAMPLES), "auto"),
            metavar="N|auto",
            help="models that differ in learning rate and seed alone to train as one (default: "
            "auto, all that fit into a GPU's memory, and 1 on a CPU, where stacks are no faster)",
        )
    parser.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:1, …")
    parser.add_argument(
        "--estimate-only", action="store_true", help="only print the estimate of the time"
    )


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Add `--seeds`."""
    parser.add_argument(
        "--seeds",
        type=whole(numbers.SAMPLES),
        help="runs of each model at its rate (default: the scale's); more are added to those there",
    )


def execution_of(arguments: argparse.Namespace) -> Execution:
    """Return how cells are executed; imports torch."""
    from eval.lab.execution import Execution

    device, workers = str(choose_device(arguments.device)), arguments.workers
    if workers is None:
        workers = len(os.sched_getaffinity(0))
        if device.startswith("cuda"):
            workers = min(4, workers)  # One GPU takes turns: four workers hide the host's work.
    return Execution(device, workers, arguments.estimate_only, getattr(arguments, "stack", 1))
