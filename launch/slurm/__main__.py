"""`python -m launch.slurm COMMAND`: runs on a SLURM cluster, or on one machine without it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, output_file, whole
from cat_lm.core.errors import command
from launch.slurm.options import ATTEMPTS, CORES, ENV, add_options, add_resources, variable

# The module of each command's function, which has its name.
MODULES = {"submit": "submit", "resume": "submit", "cancel": "submit", "status": "status"}
MODULES |= {"local": "local", "prepare": "prepare"}


@command
def main() -> None:
    arguments = parse_arguments()
    # The run's train.py must find the modules beside it, which are its own copy of the checkout.
    os.environ.pop("PYTHONSAFEPATH", None)
    # Only now: --help needs nothing of this.
    module = importlib.import_module(f"launch.slurm.{MODULES[arguments.command]}")
    getattr(module, arguments.command)(arguments)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; options may stand between overrides."""
    parser = Parser(
        prog="python -m launch.slurm",
        description="Train on a SLURM cluster: submit a run, look at it, stop it, resume it.",
        epilog="The job requeues itself until the run is finished. Exit codes: 0 done, 2 bad "
        "input; of local its run's own (75 stopped, to be resumed), or 2 after attempts "
        "without progress.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    new = commands.add_parser(
        "submit",
        help="start a run",
        description="Copies code and configuration into RUN/slurm (RUN is train.output_dir), "
        "renders RUN/slurm/job.sbatch there and submits it. One task per rank under srun.",
    )
    again = commands.add_parser(
        "resume",
        help="resume a run whose job has ended",
        description="Renders the job again, with what is given here changed, and submits it. The "
        "code stays the run's own.",
    )
    look = commands.add_parser("status", help="where runs stand")
    end = commands.add_parser("cancel", help="end a run's job; `resume` continues it")
    here = commands.add_parser(
        "local",
        help="the same on this machine, without SLURM",
        description="Copies code and configuration as `submit` does and starts the ranks under "
        "torchrun, and restarts them until the run is finished. TERM and Ctrl-C save a checkpoint "
        "and end it; USR1 saves and restarts.",
    )
    data = commands.add_parser(
        "prepare",
        help="data preparation on many nodes",
        usage="python -m launch.slurm prepare --tasks N [options] -- FLAGS",
        description="An array of N jobs that encode a share of the files each, and a job after "
        "them that assembles the result. FLAGS are those of data_prep.prepare. The same command "
        "again continues where tasks have failed.",
    )
    for one in (new, here):
        one.add_argument("config", help="the run's YAML file")
    for one in (again, end):
        one.add_argument("run", help="the run's folder")
    look.add_argument("runs", nargs="+", metavar="run", help="a run's folder; several: a table")
    several = "or another CONFIG: a job for each, with the same overrides"
    for one, more in ((new, f"; {several}"), (again, ""), (here, "")):
        one.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help=f"last one wins{more}"
        )
    add_options(new)
    add_options(again, resumed=True)
    again.add_argument("--new-code", action="store_true", help="copy the checkout again")
    look.add_argument(
        "--json", type=output_file, metavar="FILE", help="where to write the same as JSON"
    )
    ranks = whole(numbers.PER_NODE)
    kind = here.add_mutually_exclusive_group(required=True)
    kind.add_argument("--gpus-per-node", type=ranks, metavar="G", help="a rank each")
    kind.add_argument(
        "--tasks", dest="tasks_per_node", type=ranks, metavar="N", help="ranks on the CPU"
    )
    here.add_argument("--cpus-per-task", type=whole(numbers.CORES), metavar="N", help=CORES)
    here.add_argument("--env", action="append", type=variable, metavar="NAME=VALUE", help=ENV)
    here.add_argument("--max-restarts", type=whole(numbers.RESTARTS), metavar="N", help=ATTEMPTS)
    data.add_argument("--tasks", type=whole(numbers.ARRAY_TASKS), required=True, metavar="N")
    add_resources(data)

    # After `--`, prepare's flags are another program's.
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    arguments, rest = parser.parse_known_args(argv[:split])
    arguments.flags = argv[split + 1 :]
    if arguments.flags and arguments.command != "prepare":
        parser.error(f"unrecognized arguments: {' '.join(argv[split:])}")
    wrong = [text for text in rest if text.startswith("-") or not hasattr(arguments, "overrides")]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


if __name__ == "__main__":
    main()
