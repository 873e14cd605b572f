"""The sensible range of every number that a user can give, and what can be a path: in YAML and on
command lines alike.

What lies outside cannot be meant (a billion layers, an infinite rate) and would end in no memory,
no end or no sense; it is refused before anything is built. The bounds are generous: far beyond what
anyone has trained, and near enough that a check at a bound still takes no time.
"""

from __future__ import annotations

import math
import os
import re
from typing import NamedTuple

# Nearer to nothing than anything that is meant: such numbers end in zeros, infinities and NaN.
SMALLEST = 1e-30


class Range(NamedTuple):
    """Numbers from `low` to `high`, both of them allowed; none but 0 is nearer to 0 than 1e-30."""

    low: float
    high: float

    def problem(self, value: float) -> str | None:
        """Say what would be right where `value` lies outside (NaN does), else None."""
        is_nothing = value != 0 and abs(value) < SMALLEST
        if self.low <= value <= self.high and not is_nothing:
            return None
        if is_nothing and self.low == 0:
            return f"must be 0 or from {SMALLEST:g} to {_shown(self.high)}"
        return f"must be from {_shown(self.low)} to {_shown(self.high)}"

    def at_least(self, low: float) -> Range:
        """Make the same range with another lower bound."""
        return Range(low, self.high)


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
# Numbers of state of a long filter; 0 where there is none.
CONV_STATE = Range(0, 2**10)
STATE_SIZE = Range(1, 2**14)
CONTEXT = Range(1, 2**24)
LABELS = Range(0, 2**17)  # of a classifier, which no model here is
# Its numbers
ROPE_BASE = Range(1.0, 1e15)
TEMPERATURE = Range(1e-3, 1e3)
NORM_EPSILON = Range(1e-20, 1.0)
# Of keys and values over the width.
EXPANSION = Range(1e-3, 64.0)
TIME_STEP = Range(1e-9, 1e3)  # of a state space
SCALING_FACTOR = Range(1.0, 4096.0)
# YaRN's own: what multiplies cosines and sines, and rotations over the original length.
ROPE_MAGNITUDE = Range(1e-3, 1e3)
ROTATIONS = Range(1e-3, 1e6)
# Of the whole model; the largest that were trained have 10^12.
PARAMETERS = Range(1, 10**13)
# A run
LEARNING_RATE = Range(0.0, 1e3)
OPTIMIZER_EPSILON = Range(1e-30, 1.0)
WEIGHT_DECAY = Range(0.0, 1e3)
GRADIENT_NORM = Range(0.0, 1e9)
AUXILIARY_WEIGHT = Range(1e-6, 1e6)
BATCH = Range(1, 2**20)
STEPS = Range(0, 10**9)
TOKENS = Range(0, 10**15)
SEED = Range(0, 2**62)
MINUTES = Range(1e-3, 1e6)
TFLOPS = Range(1e-6, 1e6)
FRACTION = Range(0.0, 1.0)
DROPOUT = Range(0.0, 0.99)
# A corpus in a mixture, in any unit.
SHARE = Range(1e-9, 1e18)
# Data
DOCUMENTS = Range(1, 10**12)
TEXT_BYTES = Range(1, 10**18)
# Machines
RANKS = Range(1, 2**20)
NODES = Range(1, 2**16)
# Devices or ranks of one machine.
PER_NODE = Range(1, 1024)
CORES = Range(1, 4096)
WORKERS = Range(1, 4096)
ARRAY_TASKS = Range(1, 10**6)
RESTARTS = Range(1, 10**6)
# GB/s, of a link or of a file system.
BANDWIDTH = Range(1e-6, 1e6)
PRICE = Range(1e-9, 1e9)
MEGABYTES = Range(1, 10**7)
# Text and evaluations
NEW_TOKENS = Range(1, 2**20)
EXTRAPOLATION = Range(1, 64)  # tokens read or written, over those of a training sequence
ROWS = Range(1, 10**9)
SAMPLES = Range(1, 10**4)
BEAMS = Range(1, 2**10)
REPEATS = Range(1, 10**6)
SCORED_TOKENS = Range(1, 10**12)
BATCH_TOKENS = Range(1, 2**26)
PROMPT_TOKENS = Range(1, 2**20)
BOOTSTRAP_ITERATIONS = Range(0, 10**5)
# Small models and their made-up data, which one machine holds.
SMALL_WIDTH = Range(1, 2**14)
SMALL_DEPTH = Range(1, 128)
SMALL_CONTEXT = Range(1, 2**20)
EPOCHS = Range(1, 10**6)
TRIALS = Range(20, 10**6)
# Any whole number of an option such as keys=8.
OPTION = Range(-(2**20), 2**20)
# An accuracy to stop at; above 1 it is never reached.
STOP_ACCURACY = Range(0.0, 10.0)

# What Linux takes as a name and as a whole path, in bytes.
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4095
# s3://, file:/, a::s3://, user@host:; `Path` makes one slash of two, and takes "./" off.
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]+"
_ADDRESS = re.compile(rf"(?:\./+)*(?:(?:{_SCHEME}::)*{_SCHEME}:/|[^/@:]+@[^/@:]+:)")


def path_problem(text: str) -> str | None:
    """Say why a text can be no path of a file, a folder or a model; None where it can."""
    # Quotes alone are what a shell leaves of an argument that was meant to be empty.
    if not text.strip("\"' ") or text != text.strip():
        return "is no path"
    if any(ord(character) < 32 for character in text):
        return "is no path: it has control characters in it"
    encoded = os.fsencode(text)
    if max(map(len, encoded.split(b"/"))) > _MOST_NAME_BYTES or len(encoded) > _MOST_PATH_BYTES:
        return (
            f"has a name longer than {_MOST_NAME_BYTES} bytes, or is longer than "
            f"{_MOST_PATH_BYTES:,}"
        )
    return None


def output_problem(text: str) -> str | None:
    """Say why nothing can be written to a path; None where it may be possible."""
    if _ADDRESS.match(text):
        return "is an address; results are written to folders of this machine alone"
    if text == "-":
        return "is no path: results are written to files, not to the standard output"
    return path_problem(text)
