"""The sensible range of every number that a user can give: in YAML and on command lines alike.

What lies outside cannot be meant (a billion layers, an infinite rate) and would end in no memory,
no end or no sense; it is refused before anything is built. The bounds are generous: far beyond what
anyone has trained, and near enough that a check at a bound still takes no time.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Range(NamedTuple):
    """Numbers from `low` to `high`, both of them allowed."""

    low: float
    high: float

    def problem(self, value: float) -> str | None:
        """Say what would be right where `value` lies outside (NaN does), else None."""
        if self.low <= value <= self.high:
            return None
        return f"must be from {_shown(self.low)} to {_shown(self.high)}"


def _shown(value: float) -> str:
    if isinstance(value, int) or (math.isfinite(value) and value.is_integer() and abs(value) < 1e6):
        return f"{int(value):,}"
    return f"{value:g}"


# A model's shape
HIDDEN_SIZE = Range(1, 2**17)
LAYERS = Range(1, 1024)
HEADS = Range(1, 4096)
INTERMEDIATE_SIZE = Range(1, 2**20)
VOCABULARY = Range(1, 2**24)
WINDOW = Range(1, 2**16)
CONTEXT = Range(1, 2**24)
# Its numbers
ROPE_BASE = Range(1.0, 1e15)
TEMPERATURE = Range(1e-3, 1e3)
NORM_EPSILON = Range(1e-20, 1.0)
SCALING_FACTOR = Range(1.0, 4096.0)
# A run
LEARNING_RATE = Range(0.0, 1e3)
OPTIMIZER_EPSILON = Range(1e-30, 1.0)
WEIGHT_DECAY = Range(0.0, 1e3)
GRADIENT_NORM = Range(0.0, 1e9)
BATCH = Range(1, 2**22)
STEPS = Range(0, 10**9)
TOKENS = Range(0, 10**15)
SEED = Range(0, 2**62)
MINUTES = Range(1e-3, 1e6)
TFLOPS = Range(1e-6, 1e6)
# Data
DOCUMENTS = Range(1, 10**12)
TEXT_BYTES = Range(1, 10**18)
# Machines
RANKS = Range(1, 2**20)
WORKERS = Range(1, 4096)
# Text and evaluations
NEW_TOKENS = Range(1, 2**20)
ROWS = Range(1, 10**9)
SAMPLES = Range(1, 10**4)
REPEATS = Range(1, 10**6)
