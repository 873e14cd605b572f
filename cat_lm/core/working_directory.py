"""Keep commands from importing files of the working directory, such as code of a downloaded model.

`python -m` puts that folder first on the path, with its modules (a safetensors.py, for example) and
the entry points of its packages; so does an empty name in PYTHONPATH, which `$UNSET:/folder`
leaves. `cat_lm/__init__.py` imports this module before any other, and every package with commands
and train.py import cat_lm first. The path of other programs that import cat_lm is not changed.
"""

import os
import sys

_PACKAGES = ("cat_lm", "data_prep", "eval", "launch")
# They differ where the imported folder consists of links to the checkout.
_CHECKOUT, _IMPORTED = (
    os.path.dirname(os.path.dirname(os.path.dirname(resolve(__file__))))
    for resolve in (os.path.realpath, os.path.abspath)
)


def _runs_module() -> bool:
    # While `-m` looks for its module, sys.argv[0] is "-m".
    if sys.argv[:1] != ["-m"]:  # sys.argv is empty where Python is embedded.
        return False
    name = sys.orig_argv[-len(sys.argv)]  # cat_lm.export, or -mcat_lm.export
    return name.rpartition("-m")[2].partition(".")[0] in _PACKAGES


def _runs_training() -> bool:
    return os.path.realpath("".join(sys.argv[:1])) == os.path.join(_CHECKOUT, "train.py")


def _drop(**also: str) -> None:
    """Remove the working directory from the path of this process and of those that it starts.

    If it is removed, the variables `also` are set in the environment.
    """
    try:
        here = os.getcwd()
    except OSError:  # The working directory has been deleted.
        return
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in (_CHECKOUT, _IMPORTED, *named):
        return
    # An empty or relative name in PYTHONPATH can mean the same folder.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    kept = [path for path in map(os.path.abspath, filter(None, named)) if path != here]
    os.environ |= {"PYTHONPATH": os.pathsep.join(kept), **also}


if _runs_module() and not sys.flags.safe_path:
    # Worker processes start by `python -c`, which searches the directory before this code runs.
    _drop(PYTHONSAFEPATH="1")
elif os.environ.get("PYTHONPATH") and (_runs_module() or _runs_training()):
    _drop()
