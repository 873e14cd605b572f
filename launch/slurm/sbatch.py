"""Options of #SBATCH lines, and variables that sbatch prefers to them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

# Options that the script's own logic rests on.
OURS = ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu", "array", "time")
OURS += ("signal", "requeue", "no-requeue", "open-mode", "output", "error", "job-name", "chdir")
OURS += ("export", "export-file", "wait")
# SBATCH_GPUS_PER_NODE is --gpus-per-node; these have other names.
_VARIABLES = {"TIMELIMIT": "time", "MEM_PER_NODE": "mem", "ARRAY_INX": "array"}
# Ways to ask for one thing, of which SLURM takes one.
_SAME = (
    {"cpus-per-task", "cpus-per-gpu"},
    {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"},
)


def option_of(line: str) -> str | None:
    """Return the option of a line such as --nodes=2; None where it is not one long option."""
    match = re.fullmatch(r"--([a-z][a-z-]*)(=\S.*)?", line)
    return match[1] if match and line.isprintable() else None


def asks_for(line: str, options: Iterable[str]) -> bool:
    """Return True if a line gives one of the options: sbatch takes beginnings of names, too."""
    name = option_of(line)
    return name is not None and any(option.startswith(name) for option in options)


def overriding(lines: Iterable[str]) -> list[str]:
    """Return the variables of this environment that sbatch would prefer to these lines.

    Those of options that the script rests on count even where no line has them, such as --error.
    """
    asked = {*OURS, *map(option_of, lines)}
    asked |= {name for same in _SAME if same & asked for name in same}
    return sorted(variable for variable in os.environ if _option_of_variable(variable) in asked)


def lines_of(script: str) -> list[str]:
    """Return what follows #SBATCH in a script's lines."""
    return re.findall(r"^#SBATCH (.*)$", script, re.M)


def _option_of_variable(variable: str) -> str:
    prefix, _, name = variable.partition("_")
    if prefix != "SBATCH" and variable != "SLURM_HINT":
        return ""
    return _VARIABLES.get(name, name.lower().replace("_", "-"))
