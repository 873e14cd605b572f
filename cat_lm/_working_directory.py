"""Keeps commands from importing what lies in the working directory, such as a downloaded model.

`python -m` puts that folder first on the path, with its modules (safetensors.py) and the entry
points of its packages. `cat_lm/__init__.py` imports this module before any other; the packages with
commands import cat_lm first. Programs of others that import cat_lm keep their path.
"""

import os
import sys

_PACKAGES = ("cat_lm", "data_prep", "eval", "launch")


def _runs_command() -> bool:
    """Return True if Python was started as `python -m` with a module of ours."""
    # While `-m` looks for its module, that is the name of the program.
    if sys.argv[:1] != ["-m"]:  # empty where Python is embedded
        return False
    name = sys.orig_argv[-len(sys.argv)]  # cat_lm.export, or -mcat_lm.export
    return name.rpartition("-m")[2].partition(".")[0] in _PACKAGES


def _drop() -> None:
    here, checkout = sys.path[0], os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in (checkout, *named):
        return
    # An empty or relative name in PYTHONPATH can stand for the same folder.
    sys.path[:] = [path for path in sys.path if path != here]
    kept = [path for path in map(os.path.abspath, filter(None, named)) if path != here]
    # Processes that this one starts, such as workers, would look there before any code of ours.
    os.environ |= {"PYTHONPATH": os.pathsep.join(kept), "PYTHONSAFEPATH": "1"}


if _runs_command() and not sys.flags.safe_path:
    _drop()
