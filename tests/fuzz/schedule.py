"""Which cases come, in which order: drawn by weight and seed, the same for every run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.fuzz.targets import BY_NAME, TARGETS, Target


def chosen(only: Sequence[str], with_harness: bool) -> list[Target]:
    """The targets that are asked for, all by default. Raises KeyError for an unknown name."""
    targets = [BY_NAME[name] for name in only] if only else list(TARGETS)
    return [target for target in targets if with_harness or target.family != "harness"]


def plain_cases(targets: Sequence[Target]) -> list[str]:
    """A case of each target in which nothing is odd: what its line and its verdicts rest on."""
    return [f"{target.name}-plain-0" for target in targets]


def cases(targets: Sequence[Target], seed: int) -> Iterator[str]:
    """Names of cases without end."""
    kinds = [(t, "file", t.file_weight) for t in targets if t.files]
    kinds += [(t, "line", t.line_weight) for t in targets]
    kinds = [kind for kind in kinds if kind[2] > 0]
    rng, numbers = random.Random(seed), Counter[str]()
    while True:
        ((target, kind, _),) = rng.choices(kinds, [weight for *_, weight in kinds])
        name = f"{target.name}-{kind}"
        yield f"{name}-{numbers[name]}"
        numbers[name] += 1
