"""What every rank and most commands import, imported once by the process that they are forked from.

`test_preloaded.py` looks whether a training run still imports something heavy itself.
"""

import gc
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 (torch's compiler, which it imports)
import matplotlib.pyplot  # noqa: F401 (of sweeps and reports)

from cat_lm import architectures, export  # noqa: F401
from cat_lm.training import (
    checkpoint,  # noqa: F401
    distributed,
    engine,  # noqa: F401
    preflight,  # noqa: F401
)

distributed.import_deepspeed()
# Of this project's own: plugins are found by each command itself, by its own path.
for architecture in architectures.built_in():
    architecture.classes()

# DeepSpeed collects a dozen times while it starts: a forked process would look at all of this each
# time, and copy its pages.
gc.freeze()
