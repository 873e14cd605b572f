"""Options of landmark attention, as a pattern and as a mixer; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cat_lm.core.readers import short

FILTERS = ("box", "exponential", "learned")
SHARES = ("head", "layer")
# What is computed in training, see `cat_lm.model.attention.modules.landmark.train_landmarks`.
WAYS = ("hard", "dense", "guided")
# Beside them, of language models: `guided`, of which filters and θ alone learn.
CALIBRATE = "calibrate"
# The ways that add a loss for the landmarks, and those whose forward attends to all keys.
TAUGHT = ("guided", CALIBRATE)
DENSE = ("dense", *TAUGHT)
USUAL_ROWS = 64  # queries per sequence that landmarks are trained on


def value_problems(
    options: dict[str, Any], filters: Sequence[str] = FILTERS, where: str = ""
) -> list[str]:
    """Return problems of option values, in lines that begin with the name.

    Args:
        filters: those that there are.
        where: a prefix of the names in messages.
    """
    found = []
    for key, least in (("block", 1), ("top_k", 0), ("local", 1)):
        value = options[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            least_said = f"must be a whole number of at least {least}"
            found.append(f"{where}{key}={short(value)}: {least_said}")
    if not isinstance(options["sink"], bool):
        found.append(f"{where}sink={short(options['sink'])}: must be true or false")
    for key, known in (("filter", filters), ("share", SHARES)):
        if options[key] not in known:
            found.append(f"{where}{key}={short(options[key])}: must be one of {', '.join(known)}")
    return found


def is_sharp(filter_name: str, state: int = 0) -> bool:
    """Return True if there is a parameter θ of each head of queries, of filters with N states."""
    return filter_name == "learned" or state > 0
