"""`python -m eval.recall`: the mechanistic suite's commands."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable

from cat_lm.core import numbers
from cat_lm.core.cli import (
    Parser,
    number,
    or_word,
    output_path,
    path_name,
    rates,
    whole,
    whole_numbers,
)
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from cat_lm.pretrained.loading import choose_device
from eval.common.grids.options import add_grid_options, add_seeds, execution_of
from eval.recall.grids.catalog import FIGURES
from eval.recall.ranges import RANGES


@command
def main() -> None:
    parser = Parser(
        prog="python -m eval.recall",
        description="Associative recall, selective copying and the theory behind them.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    _add_figure(commands)
    _add_streams(commands)
    _add_mamba(commands)
    _add_theory(commands)
    arguments = parser.parse_args()
    check_output(arguments.out)
    arguments.run(arguments)


def _add_run(commands: argparse._SubParsersAction) -> None:
    from cat_lm import mixers
    from eval.recall.tasks import TASKS

    parser = commands.add_parser(
        "run",
        help="train and test one model",
        description="Trains a small model on a task and tests it. OUT/cells gets one JSON with "
        "every accuracy, the options, the versions and the command, and a picture of the learned "
        "filters; a finished one is kept.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    tasks, known = ", ".join(TASKS.names()), ", ".join(mixers.names())
    parser.add_argument(
        "--task", required=True, help=f"{tasks}; options as mqar:keys=8,filler=zeros"
    )
    parser.add_argument("--mixer", required=True, help=f"{known}; options as cat:streams=k")
    add = parser.add_argument
    add("--d-model", type=_whole("d_model"), required=True, help="model width")
    add("--seq-len", type=_whole("seq_len"), required=True, help="tokens that a model reads")
    add("--out", type=output_path, required=True, metavar="DIR", help="results")
    add("--lr", type=number(RANGES["lr"], above=0), default=1e-2)
    add("--seed", type=_whole("seed"), default=0)
    add("--epochs", type=_whole("epochs"), default=64)
    add("--train-examples", type=_whole("train_examples"), default=100_000)
    add("--test-examples", type=_whole("test_examples"), default=3_000)
    add("--validation-examples", type=_whole("validation_examples"), default=1_000)
    add("--layers", type=_whole("layers"), help="blocks (default: the mixer's in the paper)")
    add("--batch-size", type=_whole("batch_size"), help="rows (default: Zoology's at that length)")
    decay = number(RANGES["weight_decay"])
    add("--weight-decay", type=decay, default=0.1, help="on all parameters")
    add(
        "--stop-above",
        type=or_word(number(RANGES["stop_above"]), "none"),
        default=0.99,
        metavar="ACCURACY|none",
        help="on validation rows, which then also choose the step whose model is tested; above 1: "
        "choose alone; none: a fixed budget, whose last model is tested",
    )
    add(
        "--embedding-dropout",
        type=number(RANGES["embedding_dropout"]),
        help="of the embeddings (default: as Zoology's block has it: 0.1, Mamba's none)",
    )
    steps = _whole("eval_steps")
    add("--eval-steps", type=steps, help="validate within epochs too, every so many steps")
    lengths = whole_numbers(RANGES["seq_len"], "64,256")
    add("--test-lengths", type=lengths, default=(), metavar="32,64,…", help="also test there")
    parser.add_argument(
        "--fixed-items",
        action="store_true",
        help="at longer lengths also with as many keys as in training",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, …")
    parser.set_defaults(run=_run)


def _whole(name: str) -> Callable[[str], int]:
    """Make the kind of a cell's whole number."""
    return whole(RANGES[name])


def _run(arguments: argparse.Namespace) -> None:
    for length in arguments.test_lengths:
        if length < arguments.seq_len:
            raise UserError(
                f"--test-lengths {length}: is shorter than the training's {arguments.seq_len} "
                "tokens"
            )
    from eval.common.grids.cells import cell_path, run
    from eval.recall.show.filter_plots import save_portrait
    from eval.recall.train.cell import Cell

    values = vars(arguments)
    cell = Cell(**{f.name: values[f.name] for f in dataclasses.fields(Cell)})
    path = cell_path(arguments.out, cell)
    if path.exists():
        print(f"{path}: finished before, is told again")
    record = run(arguments.out, cell, str(choose_device(arguments.device)))
    for name, test in record["tests"].items():
        numbers = ", ".join(f"{k} {v:.4f}" for k, v in test.items() if k != "seq_len")
        print(f"{name} ({test['seq_len']}): {numbers}")
    for i, streams in enumerate(record["delays"]):
        said = ", ".join(f"{s} {' '.join(map(str, lags))}" for s, lags in streams.items())
        print(f"layer {i}: lag of the largest tap: {said}")
    seconds = record["seconds"]["training"]
    if picture := save_portrait(record, path):
        print(f"filters: {picture}")
    print(f"{record['steps']} steps in {seconds:.0f} s; {path}")


LANDMARK = "landmark-tradeoff"


def _add_figure(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "figure",
        help="run a whole grid and draw the paper's figure",
        description="Runs a figure's grid of learning rates and seeds with its controls, in "
        "parallel processes, and draws it with every run. Finished runs in OUT are kept, so that "
        "the same command goes on where it was stopped. It begins with an estimate of the time.",
    )
    parser.add_argument("name", choices=(*FIGURES, LANDMARK))
    add_grid_options(parser)
    add_seeds(parser)
    parser.add_argument(
        "--models",
        nargs="+",
        default=(),
        metavar="MIXER",
        help="as of run, in place of the scale's: the page then has these alone, the first one "
        "compared with the others; finished runs stay",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=(),
        metavar="ROW",
        help="of panels: MQAR, … (default: all); the page then has these alone",
    )
    parser.set_defaults(run=_figure)


def _figure(arguments: argparse.Namespace) -> None:
    if arguments.name == LANDMARK:
        if arguments.estimate_only or arguments.device != "auto" or arguments.stack is not None:
            raise UserError(f"{LANDMARK}: a simulation without --device, --stack, --estimate-only")
        if arguments.models or arguments.rows:
            raise UserError(f"{LANDMARK}: a simulation of no mixers, without --models, --rows")
        if arguments.workers is not None or arguments.seeds is not None:
            raise UserError(f"{LANDMARK}: a simulation in one process, without --workers, --seeds")
        from eval.recall.theory.report import landmark_tradeoff

        trials = {"smoke": 30, "cpu": 400, "paper": 4000}[arguments.scale]
        landmark_tradeoff(arguments.out, trials)
        return
    from eval.recall.grids.figure import figure

    execution, out = execution_of(arguments), arguments.out
    chosen = (arguments.seeds, arguments.models, arguments.rows)
    if figure(arguments.name, arguments.scale, out, execution, *chosen):
        print(out / f"{arguments.name}.md")


def _add_streams(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "streams",
        help="which of q, k and v needs the convolution, on recall and on text",
        description="Trains softmax attention, linear attention, DeltaNet and Gated DeltaNet with "
        "a convolution on every subset of their streams, with one filter a head and one a channel, "
        "with separate and with shared keys and values, on MQAR and as small language models. A "
        "learning rate is chosen for each on a seed of its own. Finished runs in OUT are kept. OUT "
        "gets streams.json, streams.csv, streams.md and a picture.",
    )
    parser.add_argument(
        "--data",
        type=path_name,
        default=(),
        nargs="+",
        metavar="DIR",
        help="texts prepared by data_prep.prepare, told beside each other by their folders' names "
        "(default: none, recall alone)",
    )
    add_grid_options(parser)
    add_seeds(parser)
    for axis, names in {
        "row": "MQAR, 'text: NAME' of a folder of --data",
        "column": "a mixer and its kind of filter, as 'linear attention, head'",
    }.items():
        parser.add_argument(
            f"--{axis}s",
            nargs="+",
            default=(),
            metavar=axis.upper(),
            help=f"of the page: {names} (default: all); the page then has these alone",
        )
    parser.set_defaults(run=_streams)


def _streams(arguments: argparse.Namespace) -> None:
    from cat_lm.data.manifest import read_manifest

    for data in arguments.data:
        read_manifest(data)  # an error before torch loads
    from eval.recall.grids.streams import ablation

    execution, out = execution_of(arguments), arguments.out
    chosen = (arguments.seeds, arguments.rows, arguments.columns)
    ablation(arguments.scale, arguments.data, out, execution, *chosen)


def _add_mamba(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "mamba",
        help="when Mamba learns to recall, by dropout, start and learning rate",
        description="Trains Mamba on MQAR with and without dropout of its embeddings, from its own "
        "start and from the one that Zoology gave it, at several learning rates and seeds, "
        "tells when each run leaves its plateau, and compares dropout and start at rates that a "
        "seed of its own chooses. Finished runs in OUT are kept. OUT gets "
        "mamba.json, mamba.md and a picture.",
    )
    add_grid_options(parser)
    add_seeds(parser)
    parser.add_argument(
        "--rates", type=rates, metavar="R,R,…", help="learning rates (default: the scale's)"
    )
    parser.set_defaults(run=_mamba)


def _mamba(arguments: argparse.Namespace) -> None:
    from eval.recall.grids.mamba import study

    execution, out = execution_of(arguments), arguments.out
    study(arguments.scale, out, execution, arguments.seeds, arguments.rates)


def _add_theory(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "theory",
        help="compute the theorems and propositions",
        description="Computes each claim of the paper and puts something wrong to the same check, "
        "prints both, and writes theory.json, theory.md, theory.html and the pictures. Exit "
        "status 1 if a claim does not hold or a wrong one passes.",
    )
    parser.add_argument("--out", type=output_path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=_whole("seed"), default=0)
    trials = whole(numbers.TRIALS)
    parser.add_argument("--rows", type=trials, default=500, help="sequences for each construction")
    parser.add_argument(
        "--trials", type=trials, default=400, help="trials of the slower simulations (default 400)"
    )
    parser.set_defaults(run=_theory)


def _theory(arguments: argparse.Namespace) -> None:
    from eval.recall.theory.report import theory

    options = dict(seed=arguments.seed, rows=arguments.rows, slow_trials=arguments.trials)
    if fallen := theory(arguments.out, **options):
        what = "do not hold or have a control that passes"
        print(f"error: theory: {what}: {'; '.join(fallen)}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
