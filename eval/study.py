"""`python -m eval.study NAME`: runs what is missing of a study, and writes its report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.cli import Parser, output_path, path_name
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from eval.lab.options import add_grid_options, add_seeds, execution_of

if TYPE_CHECKING:
    from eval.lab.study import Study

# Options that only some studies take -> how they are declared.
OPTIONS: dict[str, dict[str, Any]] = {
    "models": {"help": "mixers in place of the scale's; the first is compared with the others"},
    "rows": {"help": "rows of the report, by their names (default: all)"},
    "columns": {"help": "columns of the report, by their names (default: all)"},
    "data": {
        "type": path_name,
        "metavar": "DIR",
        "help": "texts prepared by data_prep; or the folder of a long-range task's official files",
    },
}


@command
def main() -> None:
    from eval.studies import STUDIES

    parser = Parser(
        prog="python -m eval.study",
        description="Trains the models of a study with controls, at learning rates that other "
        "seeds choose, in parallel processes, and writes OUT/NAME.md with its tables, comparisons "
        "and picture. It begins with an estimate of the time. Finished runs in OUT are kept, so "
        "that the same command resumes a study that was stopped.",
    )
    parser.add_argument(
        "name", choices=STUDIES.names(), metavar="NAME", help=", ".join(STUDIES.names())
    )
    add_grid_options(parser)
    add_seeds(parser)
    for name, declared in OPTIONS.items():
        shown = {"metavar": name[:-1].upper(), **declared}
        parser.add_argument(f"--{name}", nargs="+", default=(), **shown)
    _add_long_range(parser)
    arguments = parser.parse_args()
    check_output(arguments.out)
    run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Run the study that is asked for."""
    from eval.lab.run import run_study
    from eval.lab.study import Asked
    from eval.studies import STUDIES

    study = STUDIES.get(arguments.name)
    given = {name: tuple(getattr(arguments, name)) for name in OPTIONS}
    for name, value in given.items():
        if value and name not in study.options:
            raise UserError(f"--{name}: has no effect on the study {study.name}; leave it out")
    asked = Asked(
        arguments.scale,
        arguments.seeds,
        given["models"],
        given["rows"],
        given["columns"],
        {"data": given["data"], **_long_range(study, arguments)},
    )
    if run_study(study, asked, arguments.out, execution_of(arguments)):
        print(arguments.out / f"{study.name}.md")


def _add_long_range(parser: argparse.ArgumentParser) -> None:
    """Add the options of long-range tasks."""
    parser.add_argument(
        "--protocol",
        choices=("clean", "lra"),
        help="long-range tasks: lra validates on the test split where the official pipelines do "
        "(IMDB); clean holds training rows out (default)",
    )
    parser.add_argument(
        "--direction",
        choices=("causal", "both"),
        help="long-range tasks: causal models, as all of the paper's, or encoders that read both "
        "sides (default: causal)",
    )
    parser.add_argument(
        "--cache", type=output_path, metavar="DIR", help="long-range tasks: for what is made once"
    )


def _long_range(study: Study, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how long-range tasks are trained, for studies of them."""
    given = {name: getattr(arguments, name) for name in ("protocol", "direction", "cache")}
    if "long_range" in study.options:
        if arguments.stack is not None:
            raise UserError(f"--stack: has no effect on the study {study.name}; leave it out")
    else:
        for name, value in given.items():
            if value is not None:
                raise UserError(f"--{name}: has no effect on the study {study.name}; leave it out")
        return {}
    from eval.long_range.grids import Choice
    from eval.long_range.tasks import Place

    workers = execution_of(arguments).workers
    data = [Path(folder) for folder in arguments.data]
    if len(data) > 1:
        raise UserError("--data: name one folder of official files")
    place = Place(data[0] if data else None, given["cache"] or Place().cache, workers)
    is_causal = given["direction"] != "both"
    return {"long_range": Choice(given["protocol"] or "clean", is_causal, place)}


if __name__ == "__main__":
    main()
