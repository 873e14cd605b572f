"""Theorem 2 and Lemma 1: a layer that solves recall at one length solves it at all lengths.

A layer of this class with error ε at length L on all sequences, and ε₀ = ε/Δ, has a value filter
near 2D₋₁, an attention map near ½ on the query's two places, and an error of order L' ε₀ at length
L'. The constants that the paper leaves open follow from its proof, for W ≤ L − 2:

    Γ = ε₀/(1−4ε₀) ≥ s_v/s_q,    1/s_q ≤ m = (2 + (L−10)ε₀)/(1−4ε₀)
    ‖F−2D₋₁‖₁ ≤ D = max((1+2ε₀)m − 2, 8ε₀ + ε₀m) + (W+½) ε₀m,    Σ_{i≥0} F_i ≤ P = 3/2 ε₀m
    ‖map − golden map‖₁ ≤ 2M,    M = (L'−2)Γ/(2 + (L'−2)Γ)
    ‖y − f(X)‖ ≤ (3+D) M + (D+P)/2

They need ε to be the largest error over the sequences X^i of the proof, all of which are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from eval.recall.theory.claims import Claim, Verdict
from eval.recall.theory.two_sided import Measured, Problem, Run, TwoSidedLayer, measure, train

PROBLEMS = (
    *(Problem(8, seed=seed) for seed in range(3)),
    *(Problem(8, orthonormal=False, seed=seed) for seed in range(3, 5)),
    Problem(16, vocabulary=8, width=12, seed=5),
)
LENGTHS = (16, 32, 64, 128, 256, 512)
CONDITION = 1 / 8  # R₀: the theorem speaks of models with ε₀ ≤ R₀/L
LEAST_EXPONENT, LARGEST_EXPONENT = 0.8, 1.25  # of a bound of order L' ε₀: in ε, and in L'


@dataclass(frozen=True)
class Case:
    """A layer along its training, in the theorem's terms.

    Attributes:
        unit: ε₀/ε.
        measured: by falling ε.
    """

    problem: Problem
    unit: float
    measured: list[Measured]

    @property
    def admitted(self) -> list[Measured]:
        """Those with ε₀ ≤ R₀/L."""
        most = CONDITION / self.problem.length
        return [m for m in self.measured if m.error * self.unit <= most]


Curve = Callable[[Case, Measured], dict[int, float]]  # L' -> what is bounded
Bound = Callable[[Case, Measured, int], float]


@dataclass(frozen=True)
class Trained:
    """Hold the runs, each with its layers measured, and the first run's wrong layers."""

    runs: list[Run]
    cases: list[Case]
    controls: dict[str, list[Case]]

    def wrong(self, of_attention: bool = False) -> list[str]:
        """Name the controls of statements on s_v/s_q, or of those on filters, maps and errors."""
        names = list(self.controls)
        return [*names[:2], names[2 + of_attention]]


def trained(
    problems: tuple[Problem, ...],
    lengths: tuple[int, ...],
    rows: int,
    unit: Callable[[TwoSidedLayer], float],
) -> Trained:
    """Trains a layer for each problem, and measures it and the wrong layers made of the first.

    Args:
        rows: random sequences for training, and for each measurement.
        unit: ε₀/ε of a layer's embeddings.
    """
    runs = [train(problem, rows) for problem in problems]

    def case(run: Run, layers: list[TwoSidedLayer]) -> Case:
        return Case(run.problem, unit(layers[0]), [measure(m, lengths, rows) for m in layers])

    cases = [case(run, run.kept) for run in runs]
    first, right = runs[0], cases[0]
    half = case(first, [first.half_trained])
    confused = [
        replace(m, ratio=layer.confusing().largest_ratio())
        for m, layer in zip(right.measured, first.kept, strict=True)
    ]
    controls = {
        "untrained": [case(first, [first.untrained])],
        f"half trained (ε = {half.measured[0].error:.2g})": [half],
        "the trained layers with taps and positions beyond L": [
            case(first, [layer.reaching_beyond() for layer in first.kept])
        ],
        "the trained layers with another key as near as the query's own": [
            replace(right, measured=confused)
        ],
    }
    return Trained(runs, cases, controls)


def theorem_2(found: Trained) -> list[Claim]:
    """The theorem's three statements and Lemma 1's bound on attention."""

    return [
        bounded(
            found,
            "Theorem 2, filter (Lemma 1)",
            "‖F_v − 2D₋₁‖₁ ≤ D, of order L ε₀",
            lambda case, m: {case.problem.length: m.filter},
            lambda case, m, _: filter_bound(case, m),
            "The statement says D₋₁, but its proof gives F₋₁ → 2, as the query's own place has "
            f"half of the attention and no token after it; ‖F_v − D₋₁‖₁ is "
            f"{found.cases[0].measured[-1].to_advance:.5f}.",
        ),
        bounded(
            found,
            "Lemma 1, attention",
            "s_v/s_q ≤ ε₀/(1 − 4ε₀) for every query q and key v ≠ q",
            lambda case, m: {case.problem.length: m.ratio},
            lambda case, m, _: gamma(case, m),
            of_attention=True,
        ),
        bounded(
            found,
            "Theorem 2, attention map",
            "‖softmax(X W x_{L'−1}) − golden map‖₁ ≤ 2M, of order L' ε₀, at every length L'",
            lambda _, m: {length: values[1] for length, values in m.by_length.items()},
            lambda case, m, length: 2 * off_map(case, m, length),
        ),
        bounded(
            found,
            "Theorem 2, length generalization",
            "‖y − f(X)‖ ≤ (3 + D) M + (D + P)/2, of order L' ε₀, at every length L'",
            lambda _, m: {length: values[0] for length, values in m.by_length.items()},
            error_bound,
        ),
    ]


def bounded(
    found: Trained,
    source: str,
    statement: str,
    curve: Curve,
    bound: Bound,
    correction: str = "",
    of_attention: bool = False,
) -> Claim:
    """One statement on trained layers, with those wrong layers as controls that it speaks of."""
    least = [case.measured[-1].error for case in found.cases]
    most = [case.measured[0].error for case in found.cases]
    kinds = dict.fromkeys(case.problem.describe() for case in found.cases)
    longest = max(found.cases[0].measured[0].by_length)
    return Claim.judged(
        source,
        f"a layer with ε₀ ≤ 1/(8L) at length L has {statement}",
        f"{len(found.cases)} layers ({'; '.join(kinds)}) trained in fp64 until ε ≤ 1e-5, "
        f"measured at ε from "
        f"{max(most):.1g} to {min(least):.1g} and L' up to {longest}; "
        f"the fitted exponent must be at least {LEAST_EXPONENT} in ε (mean of layers) and "
        f"at most {LARGEST_EXPONENT} in L'",
        lambda cases: judge(cases, curve, bound),
        found.cases,
        {what: found.controls[what] for what in found.wrong(of_attention)},
        correction,
    )


def judge(cases: list[Case], curve: Curve, bound: Bound) -> Verdict:
    """Every layer that meets the condition is within its bound, which scales as claimed.

    Fails where no layer of a case meets the condition; then its values are held against the bound
    at the largest ε₀ that does.
    """

    def largest_share(case: Case, layers: list[Measured]) -> float:
        # NumPy's maximum of numbers and NaN is NaN, which passes nothing.
        shares = [v / bound(case, m, n) for m in layers for n, v in curve(case, m).items()]
        return float(np.max(shares))

    for case in cases:
        if not case.admitted:
            last, most = case.measured[-1], CONDITION / case.problem.length
            share = largest_share(case, [replace(last, error=most / case.unit)])
            said = f"ε₀ = {last.error * case.unit:.2g} > 1/(8L) = {most:.2g}: condition not met"
            return Verdict(f"{said}; {share:.3g} of the bound at 1/(8L)", False)
    share = float(np.max([largest_share(case, case.admitted) for case in cases]))
    said, passes = f"at most {share:.3g} of the bound", share <= 1
    if not math.isfinite(share):
        return Verdict(said, False)
    if in_error := [e for case in cases for e in _exponent_in_error(case, curve)]:
        said += f"; exponent in ε {np.mean(in_error):.2f} ({_range(in_error)})"
        passes &= bool(np.mean(in_error) >= LEAST_EXPONENT)
    if in_length := [e for case in cases for e in _exponent_in_length(case, curve)]:
        said += f", in L' {_range(in_length)}"
        passes &= max(in_length) <= LARGEST_EXPONENT
    return Verdict(said, passes)


def _exponent_in_error(case: Case, curve: Curve) -> list[float]:
    """Of what is bounded at up to 8 times the trained length, where it is far from its largest."""
    length = max(n for n in curve(case, case.measured[0]) if n <= 8 * case.problem.length)
    errors = [m.error for m in case.admitted]
    return _slope(errors, [curve(case, m)[length] for m in case.admitted])


def _exponent_in_length(case: Case, curve: Curve) -> list[float]:
    """Of what is bounded at the least ε, from twice the trained length on."""
    values = curve(case, case.measured[-1])
    longer = {n: value for n, value in values.items() if n >= 2 * case.problem.length}
    return _slope(list(longer), list(longer.values()))


def _slope(x: list[float], y: list[float]) -> list[float]:
    """The exponent fitted to y(x); none where there is one x."""
    return [float(np.polyfit(np.log(x), np.log(y), 1)[0])] if len(set(x)) > 1 else []


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def distance_unit(layer: TwoSidedLayer) -> float:
    """1/Δ, Δ = √(1 − max cosine²) of the embeddings: Theorem 2's ε₀/ε."""
    cosine = layer.embeddings @ layer.embeddings.T
    cosine.fill_diagonal_(0)
    return 1 / math.sqrt(1 - float(cosine.abs().max()) ** 2)


def gamma(case: Case, m: Measured) -> float:
    """Γ, Lemma 1's bound on s_v/s_q (Eq. 6 of the workshop version)."""
    unit = case.unit * m.error
    return unit / (1 - 4 * unit)


def _inverse_mass(case: Case, m: Measured) -> float:
    """The bound on 1/s_q at length L."""
    unit = case.unit * m.error
    return (2 + (case.problem.length - 10) * unit) / (1 - 4 * unit)


def filter_bound(case: Case, m: Measured) -> float:
    """D: F₋₁ from above and from below, then all other taps."""
    unit, mass = case.unit * m.error, _inverse_mass(case, m)
    own = max((1 + 2 * unit) * mass - 2, 8 * unit + unit * mass)
    return own + (case.problem.reach + 0.5) * unit * mass


def off_map(case: Case, m: Measured, length: int) -> float:
    """M: what attention may spend beside the query's two places."""
    others = (length - 2) * gamma(case, m)
    return others / (2 + others)


def error_bound(case: Case, m: Measured, length: int) -> float:
    """The error at length L' (Eq. 20 to 24, their constants kept)."""
    far, past = filter_bound(case, m), 1.5 * case.unit * m.error * _inverse_mass(case, m)
    return (3 + far) * off_map(case, m, length) + (far + past) / 2
