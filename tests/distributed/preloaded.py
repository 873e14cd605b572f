"""What every rank imports, imported once by the process that `run_on_ranks` forks ranks from."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from cat_lm.training import (
    checkpoint,  # noqa: F401
    distributed,
    engine,  # noqa: F401
    preflight,  # noqa: F401
)

distributed.import_deepspeed()
