"""What every use of lm-evaluation-harness begins with; importing this imports none of it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator

from cat_lm.core.errors import UserError


def require_harness() -> None:
    """Raises UserError where lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed; run: pip install 'cat_lm[eval]'")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the harness's notes and prints out of a command's output."""
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    # Its bootstrap would fork this process, which has threads and perhaps a GPU.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
