"""What differs between two measurements of a group, and how much may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.guards.models import MODELS, pretrain_models

# Between machines: of a loss, and of the largest of a tensor's numbers. Other processors add in
# another order: that stays below, and a change of any formula far above.
TOLERANCES = {"losses": 1e-3, "values": 1e-10}
# Eager attention computes its softmax in fp32.
EAGER_TOLERANCE = 1e-6
EAGER_MODELS = {
    name for name, keys in (MODELS | pretrain_models()).items() if "attn_implementation" in keys
}


def differences(group: str, expected: Any, found: Any, exact: bool) -> list[str]:
    """Return a line for each place where two measurements differ.

    Args:
        exact: demand the same bits of losses, which two revisions on one machine have.
    """
    tolerance = TOLERANCES.get(group, 0.0)
    if exact and group == "losses":
        tolerance = 0.0
    return [f"{group}: {line}" for line in _compare(group, "", expected, found, tolerance)]


def _compare(group: str, place: str, expected: Any, found: Any, tolerance: float) -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            name = f"{place}/{key}" if place else str(key)
            if key not in found:
                yield f"{name}: is missing"
            elif key not in expected:
                yield f"{name}: is new"
            else:
                is_eager = group == "values" and key in EAGER_MODELS
                own = EAGER_TOLERANCE if is_eager else tolerance
                yield from _compare(group, name, expected[key], found[key], own)
    elif _are_numbers(expected) and _are_numbers(found) and len(expected) == len(found):
        largest = max(map(abs, expected), default=0.0)
        for number, (a, b) in enumerate(zip(expected, found, strict=True)):
            scale = abs(a) if group == "losses" else largest
            # A number that is not finite equals nothing.
            if not abs(a - b) <= tolerance * scale:
                yield f"{place}[{number}]: {b!r}, expected {a!r}"
                return
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for number, pair in enumerate(zip(expected, found, strict=True)):
            yield from _compare(group, f"{place}[{number}]", *pair, tolerance)
    elif expected != found:
        yield f"{place}: {_short(found)}, expected {_short(expected)}"


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}…"
