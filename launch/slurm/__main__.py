"""`python -m launch.slurm COMMAND`: manage runs on a SLURM cluster, or on one machine."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, argument_type, output_file, whole
from cat_lm.core.errors import command
from launch.slurm.options import (
    ATTEMPTS,
    CORES,
    CORES_OF_A_GPU,
    ENV,
    add_options,
    add_resources,
    check_name,
    variable,
)

# The module of each command; the function in it is named as the command.
MODULES = {"submit": "submit", "resume": "submit", "cancel": "submit", "status": "status"}
MODULES |= {"local": "local", "prepare": "prepare", "run": "run"}
# What these commands need after `--`; it is passed to other programs.
AFTER_DASHES = {"prepare": "the flags of data_prep.prepare after --"}
AFTER_DASHES |= {"run": "a command after --, such as `-- python -m eval.zero_shot MODEL`"}


@command
def main() -> None:
    arguments = parse_arguments()
    # train.py must find the modules beside it, in the run's copy of the code.
    os.environ.pop("PYTHONSAFEPATH", None)
    # Import the command only now, because --help does not need it.
    module = importlib.import_module(f"launch.slurm.{MODULES[arguments.command]}")
    getattr(module, arguments.command)(arguments)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, in which options may be between overrides."""
    parser = make_parser()
    argv = sys.argv[1:] if argv is None else argv
    # The words after `--` are those of another program.
    split = argv.index("--") if "--" in argv else len(argv)
    words = argv[split + 1 :]
    wanted = AFTER_DASHES.get(argv[0]) if argv else None
    if wanted and not words and not {"-h", "--help"} & set(argv[:split]):
        parser.error(f"{argv[0]}: give {wanted}")
    if words and not wanted:
        parser.error(f"unrecognized arguments: {' '.join(argv[split:])}")
    arguments, rest = parser.parse_known_args(argv[:split])
    arguments.words = words
    wrong = [text for text in rest if text.startswith("-") or not hasattr(arguments, "overrides")]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def make_parser() -> Parser:
    parser = Parser(
        prog="python -m launch.slurm",
        description="Train on a SLURM cluster: submit a run, look at it, stop it, resume it; and "
        "run other commands there.",
        epilog="A run's job requeues itself until the run is finished. Exit codes: 0 done, 2 bad "
        "input. local ends with the code of its run (75 stopped, to be resumed), or with 2 after "
        "attempts without progress; run --wait with the code of the command.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_training(commands.add_parser)
    _add_others(commands.add_parser)
    return parser


def _add_training(add_parser: Callable[..., Parser]) -> None:
    new = add_parser(
        "submit",
        help="start a run",
        description="Copies code and configuration into RUN/slurm (RUN is train.output_dir), "
        "renders RUN/slurm/job.sbatch there and submits it. One task per rank under srun.",
    )
    again = add_parser(
        "resume",
        help="resume a run whose job has ended",
        description="Renders the job again, with what is given here changed, and submits it. The "
        "job uses the run's copy of the code.",
    )
    here = add_parser(
        "local",
        help="run on this machine, without SLURM",
        description="Copies code and configuration as `submit` does and starts the ranks under "
        "torchrun, and restarts them until the run is finished. TERM and Ctrl-C save a checkpoint "
        "and end it; USR1 saves and restarts.",
    )
    several = "; or another CONFIG: a job for each, with the same overrides"
    for one, more in ((new, several), (again, ""), (here, "")):
        if one is again:
            one.add_argument("run", help="folder of the run (train.output_dir)")
        else:
            one.add_argument("config", help="YAML file of the run")
        one.add_argument(
            "overrides",
            nargs="*",
            metavar="section.key=value",
            help=f"overrides of the configuration, of which the last one counts{more}",
        )
    add_options(new)
    add_options(again, resumed=True)
    again.add_argument("--new-code", action="store_true", help="copy the checkout again")
    ranks = whole(numbers.PER_NODE)
    ways = here.add_mutually_exclusive_group(required=True).add_argument
    ways("--gpus-per-node", type=ranks, metavar="G", help="number of GPUs, with one rank each")
    ways(
        "--tasks",
        dest="tasks_per_node",
        type=ranks,
        metavar="N",
        help="number of ranks, on the CPU",
    )
    here.add_argument("--cpus-per-task", type=whole(numbers.CORES), metavar="N", help=CORES)
    here.add_argument("--env", action="append", type=variable, metavar="NAME=VALUE", help=ENV)
    here.add_argument("--max-restarts", type=whole(numbers.RESTARTS), metavar="N", help=ATTEMPTS)


def _add_others(add_parser: Callable[..., Parser]) -> None:
    look = add_parser("status", help="show the state of runs and commands")
    look.add_argument(
        "runs", nargs="+", metavar="run", help="folder of the run; several folders make a table"
    )
    look.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the states to this file as JSON"
    )
    end = add_parser(
        "cancel", help="end the job of a run (which `resume` continues) or of a command"
    )
    end.add_argument("run", help="folder of the run or command")
    data = add_parser(
        "prepare",
        help="prepare data on many nodes",
        usage="python -m launch.slurm prepare --tasks N [options] -- FLAGS",
        description="Submits an array of N jobs, each of which encodes a share of the files, and a "
        "job after them that assembles the result. FLAGS are those of data_prep.prepare. The same "
        "command again continues where tasks have failed.",
    )
    data.add_argument(
        "--tasks",
        type=whole(numbers.ARRAY_TASKS),
        required=True,
        metavar="N",
        help="number of jobs that encode",
    )
    add_resources(data)
    other = add_parser(
        "run",
        help="run any other command, on one node",
        usage="python -m launch.slurm run [options] -- COMMAND",
        description="Submits one job that runs a command of this project, such as an evaluation, "
        "in this folder with a copy of the code. The job ends with the exit code of the command, "
        "and its files are in runs/jobs/NAME/slurm.",
    )
    add, gpus = other.add_argument, whole(numbers.PER_NODE.at_least(0))
    add(
        "--gpus-per-node",
        type=gpus,
        metavar="G",
        help="number of GPUs for the command (default: none)",
    )
    add(
        "--name",
        type=argument_type(check_name),
        help="name of the job's folder (default: the module and a number)",
    )
    add("--wait", action="store_true", help="wait for the job's end and exit with its code")
    add_resources(other, f"cores for each GPU (default: {CORES_OF_A_GPU}), or of the command")


if __name__ == "__main__":
    main()
