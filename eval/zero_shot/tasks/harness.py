"""Prepare the use of lm-evaluation-harness; importing this module imports none of it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator

from cat_lm.core.errors import UserError


def launched() -> tuple[int, int]:
    """Return this process's rank, and how many ranks torchrun or accelerate has started."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]


def require_harness() -> None:
    """Raise UserError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed; run: pip install -e '.[eval]'")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the harness's notes, prints and progress bars."""
    import datasets
    import lm_eval.api.task
    from tqdm import tqdm

    # This bar cannot be silenced otherwise where tqdm was imported before.
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    # The harness's bootstrap would fork this process, which has threads and perhaps a GPU.
    os.environ["DISABLE_MULTIPROC"] = "1"
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
