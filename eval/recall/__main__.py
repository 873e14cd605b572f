"""`python -m eval.recall`: the mechanistic suite's commands."""

from __future__ import annotations

import argparse
from pathlib import Path

from cat_lm.errors import UserError, command


@command
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.recall",
        description="Associative recall, selective copying and the theory behind them.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_theory(commands)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _add_theory(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "theory",
        help="compute the theorems and propositions",
        description="Computes each claim of the paper, prints it with what was measured, and "
        "writes theory.json, theory.md, theory.html and the pictures.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=500, help="sequences for each construction")
    parser.add_argument(
        "--trials", type=int, default=400, help="trials of the slower simulations (default 400)"
    )
    parser.set_defaults(run=_theory)


def _theory(arguments: argparse.Namespace) -> None:
    for name in ("rows", "trials"):
        if getattr(arguments, name) < 20:
            raise UserError(f"--{name} {getattr(arguments, name)}: must be at least 20")
    from eval.recall.theory.report import theory

    theory(arguments.out, seed=arguments.seed, rows=arguments.rows, slow_trials=arguments.trials)


if __name__ == "__main__":
    main()
