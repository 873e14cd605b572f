"""A small table of options in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any


def pairwise(
    options: Mapping[str, Sequence[Any]],
    is_allowed: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> list[dict[str, Any]]:
    """Return rows in which each allowed pair of values of two options occurs at least once.

    Rows are filled greedily and in the given order, so that the same options give the same rows.

    Args:
        options: the values of each option; the first one must go together with every other value.
        is_allowed: True for a row of all options whose values go together.
    """
    names = list(options)
    first = {name: values[0] for name, values in options.items()}
    index = {name: range(len(values)) for name, values in options.items()}
    missing = {
        ((one, i), (other, j)): None
        for one, other in combinations(names, 2)
        for i in index[one]
        for j in index[other]
        if is_allowed(first | {one: options[one][i], other: options[other][j]})
    }
    rows = []
    while missing:
        row = _filled(dict(next(iter(missing))), options, missing, is_allowed)
        rows.append({name: options[name][row[name]] for name in names})
        for pair in combinations([(name, row[name]) for name in names], 2):
            missing.pop(pair, None)
    return rows


def _filled(
    row: dict[str, int],
    options: Mapping[str, Sequence[Any]],
    missing: Mapping[Any, None],
    is_allowed: Callable[[dict[str, Any]], bool],
) -> dict[str, int]:
    """Return the row with the values that cover the most missing pairs."""
    names = list(options)

    def goes_together(chosen: dict[str, int]) -> bool:
        return is_allowed({name: options[name][chosen.get(name, 0)] for name in names})

    def gain(name: str, value: int) -> int:
        places = [(other, row[other]) for other in names if other in row]
        mine = (name, value)
        return sum((place, mine) in missing or (mine, place) in missing for place in places)

    for name in names:
        if name not in row:
            able = [i for i in range(len(options[name])) if goes_together(row | {name: i})]
            row[name] = max(able, key=lambda i, name=name: (gain(name, i), -i))
    return row
