"""Keep commands from importing what lies in the working directory, such as a downloaded model.

`python -m` puts that folder first on the path, with its modules (safetensors.py) and the entry
points of its packages; so does an empty name in PYTHONPATH, as `$UNSET:/folder` leaves. This module
is imported by `cat_lm/__init__.py` before any other; the packages with commands and train.py import
cat_lm first. Programs of others that import cat_lm keep their path.
"""

import os
import sys

_PACKAGES = ("cat_lm", "data_prep", "eval", "launch")
# The second one is another folder where its entries are links to the checkout's.
_CHECKOUT, _IMPORTED = (
    os.path.dirname(os.path.dirname(os.path.dirname(resolve(__file__))))
    for resolve in (os.path.realpath, os.path.abspath)
)


def _runs_module() -> bool:
    # While `-m` looks for its module, that is the name of the program.
    if sys.argv[:1] != ["-m"]:  # empty where Python is embedded
        return False
    name = sys.orig_argv[-len(sys.argv)]  # cat_lm.export, or -mcat_lm.export
    return name.rpartition("-m")[2].partition(".")[0] in _PACKAGES


def _runs_training() -> bool:
    return os.path.realpath("".join(sys.argv[:1])) == os.path.join(_CHECKOUT, "train.py")


def _drop(**also: str) -> None:
    """Drop the working directory from the path, here and in processes that this one starts.

    `also` is set in the environment, too, unless the directory stays.
    """
    try:
        here = os.getcwd()
    except OSError:  # it has been removed
        return
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if here in (_CHECKOUT, _IMPORTED, *named):
        return
    # An empty or relative name in PYTHONPATH can stand for the same folder.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    kept = [path for path in map(os.path.abspath, filter(None, named)) if path != here]
    os.environ |= {"PYTHONPATH": os.pathsep.join(kept), **also}


if _runs_module() and not sys.flags.safe_path:
    # Workers, which `python -c` starts, would look in the directory before any code of ours.
    _drop(PYTHONSAFEPATH="1")
elif os.environ.get("PYTHONPATH") and (_runs_module() or _runs_training()):
    _drop()
