"""The sensible range of every number that a user can give, in YAML and on command lines alike.

Values outside cannot be meant (a billion layers, an infinite rate) and are refused before anything
is built. The bounds are far beyond what anyone has trained, and near enough that a check at a bound
takes no time.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float

    def problem(self, value: float) -> str | None:
        """Return the allowed bounds as text if `value` (or NaN) lies outside, otherwise None."""
        if self.low <= value <= self.high:
            return None
        low, high = (format(n, "," if isinstance(n, int) else ",g") for n in self)
        return f"must be from {low} to {high}"

    def at_least(self, low: float) -> Range:
        """Return the range with another lower bound."""
        return Range(low, self.high)


_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_DIGITS = r"[0-9][0-9_]*"
_COUNT = re.compile(rf"([+-]?(?:{_DIGITS}\.?[0-9_]*|\.{_DIGITS})(?:E[+-]?[0-9]+)?)\s*([KMBGT]?)")
# No number within a range of ours has more characters.
_MOST_CHARACTERS = 40


def parse_count(text: str) -> int | float:
    """Parse a whole number as people write it: 15B, 20k, 1.5e9, 20_000.

    Return infinity for more digits than any range has. Raises ValueError for any other text.
    """
    match = _COUNT.fullmatch(text.strip().upper()) if len(text) <= _MOST_CHARACTERS else None
    if match is None:
        raise ValueError("must be a whole number such as 20000, 0.5M or 15B")
    count = Decimal(match[1].replace("_", ""))
    if count.adjusted() > _MOST_CHARACTERS:
        return math.inf
    count *= _SUFFIXES[match[2]]
    if count != count.to_integral_value():
        raise ValueError("must be a whole number")
    return int(count)


def check_whole(value: Any, allowed: Range) -> Any:
    """Return a number, or a text parsed by `parse_count`, if it is a whole number within a range.

    Values of other types are returned unchanged, for the caller's check of types. Raises ValueError
    for another text, and outside of the range.
    """
    if isinstance(value, bool):
        raise ValueError("must be a whole number, not true or false")
    count = parse_count(value) if isinstance(value, str) else value
    if isinstance(count, int | float) and (problem := allowed.problem(count)):
        raise ValueError(problem)
    return count


def check_number(
    value: Any, allowed: Range, *, above: float | None = None, below: float | None = None
) -> Any:
    """Return a number within a range, like `check_whole`; `above` and `below` are excluded."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    if isinstance(value, str):  # In YAML 1.1, 3e-4 is text: a number would be 3.0e-4.
        try:
            value = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    if not isinstance(value, int | float):
        return value
    if above is not None and not value > above:
        raise ValueError(f"must be greater than {above:g}")
    if below is not None and not value < below:
        raise ValueError(f"must be less than {below:g}")
    if problem := allowed.problem(value):
        raise ValueError(problem)
    return value


# The label of positions that are not scored, as in torch's cross entropy.
IGNORE_INDEX = -100

# A model's shape
HIDDEN_SIZE = Range(1, 2**17)
LAYERS = Range(1, 1024)
HEADS = Range(1, 4096)
INTERMEDIATE_SIZE = Range(1, 2**20)
VOCABULARY = Range(1, 2**24)
WINDOW = Range(1, 2**16)
# The state size of a long filter; 0 for models without one.
CONV_STATE = Range(0, 2**10)
STATE_SIZE = Range(1, 2**14)
CONTEXT = Range(1, 2**24)
LABELS = Range(0, 2**17)  # classes of a classifier, a field that transformers gives every model
# A model's hyperparameters
ROPE_BASE = Range(1.0, 1e15)
TEMPERATURE = Range(1e-3, 1e3)
NORM_EPSILON = Range(1e-20, 1.0)
# The width of keys and values over that of the model.
EXPANSION = Range(1e-3, 64.0)
TIME_STEP = Range(1e-9, 1e3)  # the step of a state-space model
SCALING_FACTOR = Range(1.0, 4096.0)
# Options of YaRN: the factor of cosines and sines, and rotations over the original length.
ROPE_MAGNITUDE = Range(1e-3, 1e3)
ROTATIONS = Range(1e-3, 1e6)
# A run
LEARNING_RATE = Range(0.0, 1e3)
OPTIMIZER_EPSILON = Range(1e-30, 1.0)
WEIGHT_DECAY = Range(0.0, 1e3)
GRADIENT_NORM = Range(0.0, 1e9)
NEWTON_SCHULZ_STEPS = Range(1, 20)
RATE_FACTOR = Range(0.0, 1e6)
AUXILIARY_WEIGHT = Range(1e-6, 1e6)
BATCH = Range(1, 2**20)
STEPS = Range(0, 10**9)
TOKENS = Range(0, 10**15)
SEED = Range(0, 2**62)
MINUTES = Range(1e-3, 1e6)
TFLOPS = Range(1e-6, 1e6)
FRACTION = Range(0.0, 1.0)
DROPOUT = Range(0.0, 0.99)
# The weight of a corpus in a mixture, in any unit.
SHARE = Range(1e-9, 1e18)
# Data
DOCUMENTS = Range(1, 10**12)
TEXT_BYTES = Range(1, 10**18)
# Machines
RANKS = Range(1, 2**20)
NODES = Range(1, 2**16)
# Devices or ranks per node.
PER_NODE = Range(1, 1024)
CORES = Range(1, 4096)
WORKERS = Range(1, 4096)
ARRAY_TASKS = Range(1, 10**6)
RESTARTS = Range(1, 10**6)
# The bandwidth of a link or of a file system, in GB/s.
BANDWIDTH = Range(1e-6, 1e6)
# Text and evaluations
NEW_TOKENS = Range(1, 2**20)
ROWS = Range(1, 10**9)
SAMPLES = Range(1, 10**4)
BEAMS = Range(1, 2**10)
REPEATS = Range(1, 10**6)
SCORED_TOKENS = Range(1, 10**12)
BATCH_TOKENS = Range(1, 2**26)
PROMPT_TOKENS = Range(1, 2**20)
BOOTSTRAP_ITERATIONS = Range(0, 10**5)
# Small models and synthetic data, which fit on one machine.
SMALL_WIDTH = Range(1, 2**14)
SMALL_DEPTH = Range(1, 128)
SMALL_CONTEXT = Range(1, 2**20)
EPOCHS = Range(1, 10**6)
TRIALS = Range(20, 10**6)
# Whole numbers and numbers in options such as keys=8 and decay=0.5.
OPTION = Range(-(2**20), 2**20)
OPTION_NUMBER = Range(-1e30, 1e30)
# The accuracy that stops a training early; above 1 it is never reached.
STOP_ACCURACY = Range(0.0, 10.0)
