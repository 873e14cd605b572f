"""`python -m eval.study NAME`: runs what is missing of a study, and writes its report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cat_lm.core import numbers
from cat_lm.core.cli import Parser, announce, learning_rates, output_path, path_name, whole
from cat_lm.core.errors import UserError, command
from cat_lm.core.folders import check_output
from eval.lab.options import add_grid_options, add_seeds, execution_of

_LONG_RANGE = ("protocol", "direction", "cache")
# Options that only some studies take -> how they are declared.
OPTIONS: dict[str, dict[str, Any]] = {
    "models": {
        "nargs": "+",
        "help": "some of the study's, or of recall and long-range tasks mixers in the place of the "
        "scale's, the first of which is compared with the others",
    },
    "rows": {"nargs": "+", "help": "rows of the report, by their names (default: all)"},
    "columns": {"nargs": "+", "help": "columns of the report, by their names (default: all)"},
    "data": {
        "type": path_name,
        "nargs": "+",
        "metavar": "DIR",
        "help": "texts prepared by data_prep: language models are trained on the first, and scored "
        "on all; or the folder of a long-range task's official files",
    },
    "tokens": {
        "type": whole(numbers.TOKENS.at_least(1)),
        "metavar": "N",
        "help": "language models: of training, such as 1B (default: the scale's)",
    },
    "documents": {
        "type": whole(numbers.ROWS.at_least(2)),
        "metavar": "N",
        "help": "language models: held-out documents that are scored of each text",
    },
    "rates": {
        "type": learning_rates,
        "metavar": "R,R,R",
        "help": "language models: learning rates to choose from; one is that of all models",
    },
    "protocol": {
        "choices": ("clean", "lra"),
        "help": "long-range tasks: lra validates on the test split where the official pipelines do "
        "(IMDB); clean holds training rows out (default)",
    },
    "direction": {
        "choices": ("causal", "both"),
        "help": "long-range tasks: causal models, as all of the paper's, or encoders that read "
        "both sides (default: causal)",
    },
    "cache": {
        "type": output_path,
        "metavar": "DIR",
        "help": "long-range tasks: for what is made once",
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
        shown = {} if "choices" in declared else {"metavar": name[:-1].upper()}
        parser.add_argument(f"--{name}", **shown | declared)
    arguments = parser.parse_args()
    check_output(arguments.out)
    run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Run the study that is asked for."""
    from eval.lab.study import StudyOptions
    from eval.studies import STUDIES

    study = STUDIES.get(arguments.name)
    if arguments.scale not in study.scales:
        known = ", ".join(study.scales)
        raise UserError(f"--scale {arguments.scale}: the study {study.name} has {known}")
    taken = {*study.options, *(_LONG_RANGE if "long_range" in study.options else ())}
    if not taken & {"long_range", "tokens"}:  # These cells are trained one at a time.
        taken.add("stack")
    given = {name: getattr(arguments, name) for name in (*OPTIONS, "stack")}
    for name, value in given.items():
        if value is not None and name not in taken:
            raise UserError(f"--{name}: has no effect on the study {study.name}; leave it out")
    more = {name: value for name, value in given.items() if value is not None}
    if "long_range" in study.options:
        more |= _long_range(arguments)
    chosen = (tuple(more.pop(name, ())) for name in ("models", "rows", "columns"))
    asked = StudyOptions(arguments.scale, arguments.seeds, *chosen, more)
    announce(f"{arguments.out}: study {study.name} at {arguments.scale} scale")
    from eval.lab.run import run_study

    if run_study(study, asked, arguments.out, execution_of(arguments)):
        print(arguments.out / f"{study.name}.md")


def _long_range(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how long-range tasks are trained."""
    from eval.long_range.grids import Choice
    from eval.long_range.tasks import Place

    data = [Path(folder) for folder in arguments.data or ()]
    if len(data) > 1:
        raise UserError("--data: name one folder of official files")
    workers = execution_of(arguments).workers
    place = Place(data[0] if data else None, arguments.cache or Place().cache, workers)
    is_causal = arguments.direction != "both"
    return {"long_range": Choice(arguments.protocol or "clean", is_causal, place)}


if __name__ == "__main__":
    main()
