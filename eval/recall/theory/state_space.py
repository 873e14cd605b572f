"""Theorem B.1 of LaS attention: one head expresses one channel of a state-space layer.

Zimerman and Wolf, *Viewing Transformers Through the Lens of Long Convolutions Layers* (ICML 2024),
appendix B. A channel is a convolution y = k ∗ u, k_j = C A^j B, of L inputs. The head reads
u'_i = (e_i, u_i), i = 0 … L, of which one is an empty token of value 0. Its scores are those of
positions alone, with queries M W, W = ln of

    k_{i−j}  for token j ≤ i,    c_i = Σ_{j>i} k_j  for the empty one,    0  for all others,

so that every row of the exponentials sums to c = Σ_j k_j, and values are c u. Here the head is a
whole LaS head (equation 4): logits times e^{−α(i−j)}, by which W is divided, and each row of its
attention averaged over P keys, in the causal form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.linalg import toeplitz
from scipy.special import softmax

from eval.recall.theory.claims import Claim, Verdict

LENGTHS = (8, 64, 256)
RATES = (0.0, 1e-3, 1.0)  # values of α
WIDTH = 5  # P
_LN_0 = -800.0  # e^−800 is 0 in double precision
_EXACT = 1e-9  # largest error over the largest output

# Given L and a generator, returns a kernel [L].
Kernels = Callable[[int, np.random.Generator], np.ndarray]
# Given a kernel and inputs, [L] each, returns outputs [L].
Layer = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Head:
    """A LaS head that is given the weights of the proof.

    Attributes:
        rate: α.
        width: P; 1 is no smoothing.
        empty: where the empty token stands; none has none.
        value: the value of the empty token.
        causal: whether later tokens are masked.
    """

    rate: float = 0.0
    width: int = 1
    empty: Literal["first", "last", "none"] = "first"
    value: float = 0.0
    causal: bool = True

    def __call__(self, kernel: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """The outputs [L] at the tokens; of a kernel that no weights give, by the nearest's."""
        sign, taps = nearest(kernel, self.width)
        at = {"first": [0], "last": [len(taps)], "none": []}[self.empty]
        wanted = toeplitz(taps, np.zeros_like(taps))  # the matrix of the exponentials of W
        for place in at:
            left = np.append(taps[::-1].cumsum()[::-1], 0.0)  # Σ_{j≥i} k_j
            wanted = np.insert(wanted, place, left[1:], axis=1)
            wanted = np.insert(wanted, place, left[0] * np.eye(len(left))[place], axis=0)
        size = len(wanted)
        with np.errstate(divide="ignore"):
            scores = np.maximum(np.log(wanted), _LN_0) / _decay(size, self.rate)
        # Of u' = (e_i, u_i) queries and keys read the positions, values the inputs.
        read = np.column_stack([np.eye(size), np.insert(inputs, at, self.value)])
        query = read @ np.vstack([scores, np.zeros(size)])
        key = read @ np.vstack([np.sqrt(size) * np.eye(size), np.zeros(size)])
        value = read @ np.append(np.zeros(size), sign * taps.sum())
        logits = query @ key.T / np.sqrt(size)
        outputs = attend(logits, value, self.rate, self.width, causal=self.causal)
        return np.delete(outputs, at)


def nearest(kernel: np.ndarray, width: int = 1) -> tuple[int, np.ndarray]:
    """The sign and the weights [L], none negative, of the head that smooths over `width` keys.

    The average over P keys is inverted, g_j = P k_j − g_{j−1} − … − g_{j−P+1}; that g is unique.
    Attention is not negative, so all of g must have one sign: what has the other is left out.
    """
    taps = np.zeros(len(kernel))
    for j, tap in enumerate(kernel):
        taps[j] = width * tap - taps[max(0, j - width + 1) : j].sum()
    sign = 1 if (taps.clip(min=0) ** 2).sum() >= (taps.clip(max=0) ** 2).sum() else -1
    return sign, (sign * taps).clip(min=0)


def attend(
    logits: np.ndarray, value: np.ndarray, rate: float, width: int, *, causal: bool
) -> np.ndarray:
    """AP_P(softmax(e^{−α D} ⊙ logits)) value: equation 4, with D_ij = i − j, 0 for later keys.

    Args:
        logits: [T, T]; value: [T]; rate: α; width: P.
        causal: whether later keys are masked. The average is over a key and the P − 1 after it.
    """
    size = len(logits)
    logits = logits * _decay(size, rate)
    if causal:
        logits[np.triu_indices(size, 1)] = -np.inf
    padded = np.pad(softmax(logits, axis=1), ((0, 0), (0, width - 1)))
    return sum(padded[:, k : k + size] for k in range(width)) / width @ value


def _decay(size: int, rate: float) -> np.ndarray:
    distance = np.subtract.outer(np.arange(size), np.arange(size))
    return np.exp(-rate * np.maximum(distance, 0))


def two_heads(kernel: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """The positive and the negative taps by a head each, whose outputs are added."""
    parts = (kernel.clip(min=0), kernel.clip(max=0))
    return sum(Head()(part, inputs) for part in parts if part.any())


def decaying(length: int, rng: np.random.Generator) -> np.ndarray:
    """A channel of four states: A diagonal in (0, 1), all C·B of one sign, drawn too."""
    poles, mixed = rng.uniform(0.1, 0.99, 4), rng.uniform(0.1, 1, 4)
    return rng.choice([-1, 1]) * (mixed * poles ** np.arange(length)[:, None]).sum(axis=1)


def turning(length: int, rng: np.random.Generator) -> np.ndarray:
    """A channel of two states whose poles are complex: taps of both signs."""
    radius, angle = rng.uniform(0.8, 0.99), rng.uniform(0.5, 2)
    return radius ** np.arange(length) * np.cos(angle * np.arange(length))


def positive(length: int, rng: np.random.Generator) -> np.ndarray:
    """Any positive taps, of no state-space layer."""
    return rng.uniform(0.01, 1, length)


def averaged(length: int, rng: np.random.Generator) -> np.ndarray:
    """A decaying channel, averaged over P inputs."""
    return np.convolve(decaying(length, rng), np.full(WIDTH, 1 / WIDTH))[:length]


def error(layer: Layer, kernels: Kernels, rows: int, seed: int = 0) -> float:
    """The largest |y − k ∗ u| over the largest |k ∗ u| of a row, over all lengths and rows."""
    rng, worst = np.random.default_rng([seed, 6]), 0.0
    for length in np.repeat(LENGTHS, rows):
        kernel, inputs = kernels(length, rng), rng.standard_normal(length)
        expected = np.convolve(kernel, inputs)[:length]
        off = np.abs(layer(kernel, inputs) - expected).max() / np.abs(expected).max()
        worst = np.maximum(worst, off)  # NaN stays NaN.
    return float(worst)


def theorem_b1(rows: int, seed: int = 0) -> list[Claim]:
    """One head, two heads, and one that smooths."""
    rows = max(1, rows // 50)
    setting = (
        f"L = {', '.join(map(str, LENGTHS))}; {rows} random kernels and inputs each, fp64; largest "
        "error over largest output"
    )

    def check(subjects: list[tuple[Layer, Kernels]]) -> Verdict:
        worst = float(np.max([error(layer, kernels, rows, seed) for layer, kernels in subjects]))
        return Verdict(f"{worst:.1e}", worst <= _EXACT)

    one, smooth = Head(), Head(width=WIDTH)
    right = [(Head(rate), kernels) for rate in RATES for kernels in (decaying, positive)]
    return [
        Claim(
            "LaS Theorem B.1",
            "one head expresses one channel whose taps all have one sign",
            f"{setting}; α = {', '.join(f'{rate:g}' for rate in RATES)}, P = 1, causal with the "
            "empty token first; and as printed, without a mask and with it last",
            check,
            [*right, (Head(empty="last", causal=False), decaying)],
            {
                "taps of both signs (complex poles)": [(one, turning)],
                "without the empty token": [(replace(one, empty="none"), decaying)],
                "an empty token of value 1": [(replace(one, value=1.0), decaying)],
                "the empty token last, as printed, in a causal layer": [
                    (replace(one, empty="last"), decaying)
                ],
            },
            "Said of every kernel, but ln k needs k ≥ 0, and W_v is one number: for a single input "
            "1 every output lies between 0 and c, so no head has taps of both signs, which most "
            "state-space layers have. The empty token's value must be 0, and in a causal layer, "
            "which LaS is, it must stand first. ln 0 is a limit; here it is "
            f"{_LN_0:.0f}. Eq. 5 makes u' of L + 2 channels, not L + 1.",
        ),
        Claim(
            "LaS Theorem B.1, both signs",
            "two heads, for the positive and the negative taps, express any channel",
            setting,
            check,
            [(two_heads, turning), (two_heads, decaying)],
            {"one head": [(one, turning)]},
        ),
        Claim(
            "LaS Theorem B.1, smoothing",
            "a head that averages over P keys expresses k = box ∗ g, if all of g has one sign",
            f"{setting}; P = {WIDTH}",
            check,
            [(smooth, averaged)],
            {
                "an exponential channel, not averaged": [(smooth, decaying)],
                "a head that averages over P − 1": [(Head(width=WIDTH - 1), averaged)],
            },
            "Not in the paper, whose proof has no smoothing: with P > 1 a head whose scores are of "
            "positions alone does not even express k_j = ρ^j, for which g₁ < 0 < g₀.",
        ),
    ]
