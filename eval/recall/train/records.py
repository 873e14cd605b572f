"""What the records of recall's cells hold, and what follows from their filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cat_lm.core.readers import Versioned


class FilterRecord(Versioned):
    """Hold what every cell's record has."""

    cell: dict[str, Any]
    filters: list[dict[str, Any]]
    delays: list[dict[str, list[int]]]
    provenance: dict[str, Any]
    seconds: dict[str, float]


class TaskRecord(FilterRecord):
    """Hold what the record of a model that was trained on a task has."""

    accuracy: float
    validation: dict[str, Any]
    history: list[dict[str, Any]]
    steps: int
    tests: dict[str, dict[str, Any]]


def delays(filters: Sequence[dict[str, list[list[float]]]]) -> list[dict[str, list[int]]]:
    """The lag of the largest tap of each learned filter: stream -> one lag a head, for each layer.

    A layer that recalls by single taps has delay(k) = delay(q) + delay(v) + 1.
    """
    return [
        {
            stream: [max(range(len(f)), key=lambda i, f=f: abs(f[i])) for f in heads]
            for stream, heads in layer.items()
        }
        for layer in filters
    ]
