"""Options of multi-token attention, as a pattern and as a mixer; imports no torch."""

from __future__ import annotations

from typing import Any

LONGEST = 512  # the longest row, since several copies of all heads' maps are kept
DEFAULTS = {"query_window": 6, "key_window": 11, "head_mixing": "after"}
HEAD_MIXINGS = ("none", "before", "after", "both")  # where heads are mixed, relative to the softmax


def option_problems(query_window: Any, key_window: Any, head_mixing: Any) -> list[str]:
    """Return problems of the options, in lines that begin with the name."""
    found = []
    for name, value in (("query_window", query_window), ("key_window", key_window)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 1 <= value <= LONGEST:
            found.append(f"{name}={value!r}: must be a whole number from 1 to {LONGEST}")
        elif name == "key_window" and value % 2 == 0:
            found.append(f"{name}={value}: must be odd, as many keys before as after")
    if head_mixing not in HEAD_MIXINGS:
        found.append(f"head_mixing={head_mixing!r}: must be one of {', '.join(HEAD_MIXINGS)}")
    return found


def length_problem(name: str, length: int) -> str | None:
    """Return a problem if a row has more tokens than the exact form supports."""
    if length <= LONGEST:
        return None
    return f"{name}: reads rows of at most {LONGEST} tokens, not of {length}"


def mixings(head_mixing: str) -> tuple[str, ...]:
    """Return where heads are mixed: before or after the softmax, both, or neither."""
    return {"none": (), "both": ("before", "after")}.get(head_mixing, (head_mixing,))


def parameters(heads: int, query_window: int, key_window: int, head_mixing: str) -> int:
    """Count the kernels' taps and the weights between heads."""
    return heads * (query_window * key_window + len(mixings(head_mixing)) * heads)
