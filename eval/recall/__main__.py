"""`python -m eval.recall`: the mechanistic suite's commands."""

from __future__ import annotations

import argparse
import sys

from cat_lm import mixers
from cat_lm.core.cli import Parser, announce, output_path
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import choose_device
from eval.common.options import add_options, options_of
from eval.recall.cell import Cell
from eval.recall.tasks import TASKS
from eval.recall.theory.claims import Simulations

_TRIALS = {"smoke": 30, "cpu": 400, "paper": 4000}  # scale -> trials of the landmark figure


@command
def main() -> None:
    parser = Parser(
        prog="python -m eval.recall",
        description="Associative recall, selective copying and the theory behind them.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="train and test one model",
        description="Trains a small model on a task and tests it. OUT/cells gets one JSON with "
        "every accuracy, the options, the versions and the command, and a picture of the learned "
        "filters; a finished one is kept.",
    )
    tasks, known = ", ".join(TASKS.names()), ", ".join(mixers.names())
    run.add_argument("--task", required=True, help=f"{tasks}; options as mqar:keys=8,filler=zeros")
    run.add_argument("--mixer", required=True, help=f"{known}; options as cat:streams=k")
    add_options(run, Cell)
    run.add_argument("--device", default="auto", help="device: auto, cpu, cuda, cuda:1, …")
    tradeoff = commands.add_parser(
        "tradeoff",
        help="simulate how landmarks trade blocks that are read for recall",
        description="Simulates retrieval by landmarks of noisy keys with and without convolution, "
        "and draws what is found against the blocks that are read.",
    )
    tradeoff.add_argument("--scale", choices=tuple(_TRIALS), default="cpu")
    theory = commands.add_parser(
        "theory",
        help="compute the theorems and propositions",
        description="Computes each claim of the paper and puts something wrong to the same check, "
        "prints both, and writes theory.json, theory.md and the pictures. Exit status 1 if a claim "
        "does not hold or a wrong one passes.",
    )
    add_options(theory, Simulations)
    for each, call in ((run, _run), (tradeoff, _tradeoff), (theory, _theory)):
        each.add_argument(
            "--out", type=output_path, required=True, metavar="DIR", help="folder for the results"
        )
        each.set_defaults(run=call)
    arguments = parser.parse_args()
    check_output(arguments.out)
    arguments.run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    for length in arguments.test_lengths:
        if length < (trained := arguments.seq_len):
            raise UserError(
                f"--test-lengths {length}: is shorter than the training's {trained} tokens"
            )
    from eval.lab.cell import cell_path, run

    cell = options_of(arguments, Cell)
    path = cell_path(arguments.out, cell)
    announce(f"{path}: {cell.mixer} on {cell.task}")
    from eval.recall.filter_plots import save_portrait

    if path.exists():
        print(f"{path}: finished before, is told again")
    record = run(arguments.out, cell, str(choose_device(arguments.device)))
    for name, test in record["tests"].items():
        numbers = ", ".join(f"{k} {v:.4f}" for k, v in test.items() if k != "seq_len")
        print(f"{name} ({test['seq_len']}): {numbers}")
    for i, streams in enumerate(record["delays"]):
        lags = ", ".join(f"{s} {' '.join(map(str, lags))}" for s, lags in streams.items())
        print(f"layer {i}: lag of the largest tap: {lags}")
    if picture := save_portrait(record, path):
        print(f"filters: {picture}")
    print(f"{record['steps']} steps in {record['seconds']['training']:.0f} s; {path}")


def _tradeoff(arguments: argparse.Namespace) -> None:
    announce(f"{arguments.out}: simulating landmarks at {arguments.scale} scale")
    from eval.recall.theory.report import landmark_tradeoff

    landmark_tradeoff(arguments.out, _TRIALS[arguments.scale])


def _theory(arguments: argparse.Namespace) -> None:
    announce(f"{arguments.out}: computing the theorems and propositions")
    from eval.recall.theory.report import theory

    if fallen := theory(arguments.out, options_of(arguments, Simulations)):
        what = "do not hold or have a control that passes"
        print(f"error: theory: {what}: {'; '.join(fallen)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
