"""Options of #SBATCH lines, read as sbatch reads them, and variables that it prefers to them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable

# Options that the script's own logic rests on.
OURS = ("nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu", "array", "time")
OURS += ("signal", "requeue", "no-requeue", "open-mode", "output", "error", "job-name", "chdir")
OURS += ("export", "export-file", "wait")
_SHORT = {
    **{"A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile"},
    **{"G": "gpus", "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes"},
    **{"O": "overcommit", "Q": "quiet", "S": "core-spec", "V": "version", "W": "wait"},
    **{"a": "array", "b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error"},
    **{"h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks"},
    **{"o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time"},
    **{"v": "verbose", "w": "nodelist", "x": "exclude"},
}
_WITHOUT_VALUE = "HOQVWhsv"
# SBATCH_GPUS_PER_NODE is --gpus-per-node; what is called otherwise.
_OTHERWISE = {"TIMELIMIT": "time", "MEM_PER_NODE": "mem", "ARRAY_INX": "array"}
# Ways to ask for one thing, of which SLURM takes one.
_SAME = (
    {"cpus-per-task", "cpus-per-gpu"},
    {"gres", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task"},
)


def names(line: str) -> list[str]:
    """Return the options of a line (what follows #SBATCH), as they are written but for short ones.

    Raises:
        ValueError: a quote is not closed.
    """
    found = []
    for word in shlex.split(line, comments=True):
        if " " in word.partition("=")[0]:
            continue  # a value in quotes, as of --comment
        if word.startswith("--"):
            found.append(word[2:].partition("=")[0])
        elif word.startswith("-"):
            found += _of_letters(word[1:])
    return found


def asks_for(line: str, options: Iterable[str]) -> bool:
    """Return True if a line gives one of the options: sbatch takes beginnings of names, too."""
    given = names(line)
    return any(option.startswith(name) for option in options for name in given)


def overriding(lines: Iterable[str]) -> list[str]:
    """Return the variables of this environment that sbatch would prefer to these lines.

    Those of options that the script rests on count even where no line has them, such as --error.
    """
    asked = {*OURS, *(name for line in lines for name in names(line))}
    asked |= {name for same in _SAME if same & asked for name in same}
    return sorted(variable for variable in os.environ if _option_of(variable) in asked)


def lines_of(script: str) -> list[str]:
    """Return what follows #SBATCH in a script's lines."""
    return re.findall(r"^#SBATCH (.*)$", script, re.M)


def _option_of(variable: str) -> str | None:
    prefix, _, name = variable.partition("_")
    if prefix != "SBATCH" and variable != "SLURM_HINT":
        return None
    return _OTHERWISE.get(name, name.lower().replace("_", "-"))


def _of_letters(letters: str) -> list[str]:
    """Several may share a word, -HN2: the first one that takes a value has the rest."""
    found = []
    for letter in letters:
        found.append(_SHORT.get(letter, letter))
        if letter not in _WITHOUT_VALUE:
            break
    return found
