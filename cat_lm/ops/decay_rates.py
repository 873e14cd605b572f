"""How fast logits decay with distance at most, and over which decay factors are numbers."""

from __future__ import annotations

import math

# α (i − j) that factors of queries and keys may reach: their product meets keys that come later,
# which are masked, as e^{α (j − i)}, and must stay a number. fp16 ends at e^11.
REACH, REACH_HALF = 60.0, 4.0


def largest_rate(spacing: str, bound: float) -> float:
    """Return α of the last head, per token, as `ExponentialDecay` defines it."""
    return bound if spacing == "slow" else -math.log(bound)
