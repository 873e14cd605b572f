"""Definition 7, Proposition 4, Lemma 4 and Proposition 5: recall for all queries of a set S.

A set of unit vectors S is its support function h(x) = sup of ⟨x, β⟩ over β in S, so that suprema
are exact; expectations and probabilities are Monte Carlo, with three standard errors allowed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from eval.recall.theory.claims import Claim, Verdict
from eval.recall.theory.landmark import set_thresholds, sufficient

Support = Callable[[np.ndarray], np.ndarray]
_ALLOWED = 3.0  # allowed difference in standard errors
_DRAWS, _LEAST = 20_000, 40


@dataclass(frozen=True)
class QuerySet:
    """S in R^rank with its support function from [..., rank] to [...]."""

    name: str
    rank: int
    support: Support

    def width(self, rng: np.random.Generator) -> tuple[float, float]:
        """The Gaussian width ω(S) = E h(g) with its standard error."""
        return _mean(self.support(rng.standard_normal((_DRAWS, self.rank))))


Widths = Mapping[str, tuple[float, float]]


def query_sets(seed: int = 0) -> list[QuerySet]:
    """One query, many, two spheres, a cap and sparse vectors."""
    points = _unit(np.random.default_rng([seed, 5]).standard_normal((64, 16)))
    return [
        QuerySet("one query", 1, lambda x: x[..., 0]),
        QuerySet("64 queries in R^16", 16, lambda x: (x @ points.T).max(axis=-1)),
        QuerySet("sphere of R^4", 4, _norm),
        QuerySet("sphere of R^16", 16, _norm),
        QuerySet("cap of R^16, half angle 0.5", 16, partial(_cap, angle=0.5)),
        QuerySet("3-sparse in R^16", 16, partial(_sparse, entries=3)),
    ]


def _unit(points: np.ndarray) -> np.ndarray:
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _norm(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1)


def _cap(x: np.ndarray, angle: float) -> np.ndarray:
    """Unit vectors at most `angle` from the first axis: x's own direction, or the rim below it."""
    along, across = x[..., 0], _norm(x[..., 1:])
    rim = math.cos(angle) * along + math.sin(angle) * across
    return np.where(np.arctan2(across, along) <= angle, _norm(x), rim)


def _sparse(x: np.ndarray, entries: int) -> np.ndarray:
    """Unit vectors of so many non-zero entries: the norm of the largest ones."""
    return np.sqrt(np.partition(x * x, -entries, axis=-1)[..., -entries:].sum(axis=-1))


def general_sets(trials: int, seed: int = 0) -> list[Claim]:
    """All claims on sets.

    Args:
        trials: number of trials of the slower simulations; at least 40, without which nothing could
            be refused.
    """
    sets, trials = query_sets(seed), max(trials, _LEAST)
    widths = {s.name: s.width(np.random.default_rng([seed, i])) for i, s in enumerate(sets)}
    return [
        definition_7(seed),
        proposition_4(trials, seed),
        lemma_4(sets, widths, trials, seed),
        proposition_5(sets, widths, max(trials // 4, _LEAST), seed),
    ]


def definition_7(seed: int) -> Claim:
    """Check the widths that the paper uses: √r for a subspace; √(2 log m) for m queries."""
    rng = np.random.default_rng([seed, 6])
    spheres = {r: QuerySet("", r, _norm).width(rng) for r in (1, 4, 16, 64)}
    finite = {}
    for count in (4, 64, 1024):
        table = _unit(rng.standard_normal((count, 16)))
        points = QuerySet("", 16, lambda x, table=table: (x @ table.T).max(axis=-1))
        finite[count] = points.width(rng)

    def check(bounds: tuple[Callable[[int], float], Callable[[int], float]]) -> Verdict:
        rows = [(f"r={r}", *v, bounds[0](r)) for r, v in spheres.items()]
        rows += [(f"m={m}", *v, bounds[1](m)) for m, v in finite.items()]
        said = ", ".join(f"{n}: {w:.3f} ± {e:.3f} (≤ {b:.3f})" for n, w, e, b in rows)
        return Verdict(said, all(w <= b + _ALLOWED * e for _, w, e, b in rows))

    def many(m: int) -> float:
        return math.sqrt(2 * math.log(m))

    return Claim(
        "Definition 7",
        "ω(S) = E sup ⟨x, g⟩ is at most √r for the unit vectors of an r-dimensional subspace (the "
        "proof of Proposition 5) and √(2 log m) for m unit vectors",
        f"mean ± standard error of {_DRAWS} draws; m vectors in R^16",
        check,
        (math.sqrt, many),
        {
            "√(r − 1)": (lambda r: math.sqrt(r - 1), many),
            "√(log m)": (math.sqrt, lambda m: math.sqrt(math.log(m))),
        },
    )


def proposition_4(trials: int, seed: int) -> Claim:
    """Compare E sup ⟨a, X b⟩ with E sup (‖b‖⟨a, g⟩ + ‖a‖⟨b, h⟩) for sets A and B."""
    rng = np.random.default_rng([seed, 7])
    signs = np.concatenate([np.eye(64), -np.eye(64)])
    cloud = rng.standard_normal((40, 12)) * rng.uniform(0.1, 1, (40, 1))
    pairs = np.concatenate([np.eye(64), np.ones((64, 1))], axis=1)
    points = rng.standard_normal((30, 10))
    sizes = rng.uniform(0.2, 2, 30)
    sets = query_sets(seed)
    scattered = [
        (float(size), lambda x, b=size * one: x @ b)
        for size, one in zip(sizes, _unit(points), strict=True)
    ]
    # B: vectors of one norm (a support function), or points with their norms.
    cases = {
        "±e_i × sphere of R^16": (signs, [(1.0, sets[3].support)], 16),
        "e_i + e_65 × cap": (pairs, [(1.0, sets[4].support)], 16),
        "40 vectors of any norm × 3-sparse": (cloud, [(1.0, sets[5].support)], 16),
        "40 × 30 vectors of any norm": (cloud, scattered, 10),
    }
    sides = {name: _draw_sides(*case, trials, rng) for name, case in cases.items()}

    def check(combine: Callable[[np.ndarray], np.ndarray]) -> Verdict:
        said, passes = [], True
        for name, (left, right) in sides.items():
            low, low_error = _mean(left)
            high, high_error = _mean(combine(right))
            error = math.hypot(low_error, high_error)
            passes &= low <= high + _ALLOWED * error
            said.append(f"{name}: {low:.2f} ≤ {high:.2f} (± {error:.2f})")
        return Verdict("; ".join(said), passes)

    return Claim(
        "Proposition 4",
        "E sup ⟨a, X b⟩ ≤ E sup (‖b‖⟨a, g⟩ + ‖a‖⟨b, h⟩) over a in A, b in B, X, g, h normal",
        f"{trials} draws a side, ± standard error of the difference",
        check,
        lambda right: right[:, 0],
        {
            "without ⟨b, h⟩": lambda right: right[:, 1],
            "the larger term for the sum": lambda right: right[:, 1:].max(axis=1),
        },
        "a ∈ Rⁿ, X ∈ R^{n×d}: the printed X⊤ does not fit. The increments that the comparison "
        "(Sudakov-Fernique's; Slepian's asks for equal variances) needs differ by (P − P')² + "
        "2PP'(1 − x)(1 − y) ≥ 0, P = ‖a‖‖b‖, x and y cosines, so that any bounded A and B will do.",
    )


def _draw_sides(
    table: np.ndarray,
    others: list[tuple[float, Support]],
    width: int,
    trials: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the left side [trials], and the right [trials, 3]: the sum and its two terms."""
    norms = np.linalg.norm(table, axis=1)
    left, right = np.empty(trials), np.empty((trials, 3))
    for trial in range(trials):
        moved = table @ rng.standard_normal((table.shape[1], width))
        left[trial] = max(h(moved).max() for _, h in others)
        g, h_draw = table @ rng.standard_normal(table.shape[1]), rng.standard_normal(width)
        first = np.stack([size * g for size, _ in others])
        second = np.stack([norms * float(h(h_draw)) for _, h in others])
        right[trial] = (first + second).max(), first.max(), second.max()
    return left, right


def lemma_4(sets: list[QuerySet], widths: Widths, trials: int, seed: int) -> Claim:
    """Check the lemma as printed, and as its proof has it, with a common g subtracted from rows."""
    rng = np.random.default_rng([seed, 8])
    found: dict[tuple[str, int], np.ndarray] = {}
    for queries, count in itertools.product(sets, (64, 1024)):
        h, draws = queries.support, np.empty((2, trials))
        for trial in range(trials):
            x = rng.standard_normal((count, queries.rank))
            g = rng.standard_normal(queries.rank)
            draws[:, trial] = max(h(x).max(), h(-x).max()), h(x - g).max()
        found[queries.name, count] = draws

    def check(share: float) -> Verdict:
        """`share`: the factor of ω(S)."""
        said, passes = [], True
        for t in (0.5, 1.0, 2.0):
            allowed = math.exp(-(t**2) / 2)
            over = np.zeros(2)
            for (name, count), draws in found.items():
                bound = math.sqrt(2) * (math.sqrt(math.log(count)) + share * widths[name][0] + t)
                over = np.maximum(over, (draws > bound).mean(axis=1))
            error = math.sqrt(allowed * (1 - allowed) / trials)
            passes &= bool(over.max() <= allowed + _ALLOWED * error)
            said.append(
                f"t={t:g}: {100 * over[0]:.1f}% and {100 * over[1]:.1f}% exceed (≤ "
                f"{100 * allowed:.1f} ± {100 * error:.1f}%)"
            )
        return Verdict(", ".join(said), passes)

    return Claim(
        "Lemma 4",
        "sup ‖X β‖_∞ over S, and sup max (x_i − g)⊤β of its proof, are at most "
        "√2(√log L + ω(S) + t) with probability at least 1 − e^{−t²/2}",
        f"L = 64, 1024; {len(sets)} sets; most over sets and L of {trials} draws each",
        check,
        1.0,
        {"without ω(S)": 0.0},
        "g stands in the statement and is not used: the proof bounds the rows less g, which is "
        "what Proposition 5 needs.",
    )


def proposition_5(sets: list[QuerySet], widths: Widths, trials: int, seed: int) -> Claim:
    """Recall for the worst query of a set, by the sets' support functions."""
    blocks = (128, 512)
    found = {
        (s.name, b): set_thresholds(s.support, s.rank, b, trials, seed)
        for s, b in itertools.product(sets, blocks)
    }

    def check(law: Callable[[int, float, float], float]) -> Verdict:
        said, passes = [], True
        for t in (1.5, 2.0, 3.0):
            promised = 1 - 2 * math.exp(-(t**2) / 2)
            success = min(
                float((v <= law(b, widths[name][0], t)).mean()) for (name, b), v in found.items()
            )
            error = math.sqrt(promised * (1 - promised) / trials)
            passes &= success >= promised - _ALLOWED * error
            said.append(
                f"t={t:g}: {100 * success:.1f}% (≥ {100 * promised:.1f} ± {100 * error:.1f}%)"
            )
        return Verdict(", ".join(said), passes)

    halves = ", ".join(
        f"{s.name} {np.median(found[s.name, 128]):.0f} ({sufficient(128, widths[s.name][0]):.0f})"
        for s in sets
    )
    return Claim(
        "Proposition 5",
        "d ≥ 2σ²B(√log L̄ + ω(S) + t)² solves recall for all queries of S with probability at "
        "least 1 − 2e^{−t²/2}",
        f"L = 2^20, B = {', '.join(map(str, blocks))}, {trials} trials each; least success; d at "
        f"50% (formula at t = 0), B = 128: {halves}",
        check,
        sufficient,
        {
            "without ω(S)": lambda block, _, t: sufficient(block, t=t),
            "without the factor B": lambda block, width, t: sufficient(block, width, t) / block,
        },
        "S must be fixed before the tokens are drawn. Checked with L̄, which is stronger than the "
        "printed log L, and with the statement's e^{−t²/2} (its proof has e^{−t²/4}). The event of "
        "the proof is sup < 1; it is printed with inf and >.",
    )


def _mean(values: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
