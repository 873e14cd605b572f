"""Theorem 4 (Theorem 3 in the body): one layer copies unique signal tokens in their order.

A token's embedding is [x'; s; p]: x' one-hot over the signal tokens, ⊥ and the noise tokens, of
which one is enough (all noise alike); s = 1 for signal tokens and ⊥; p = i/T. The query is the
current end of the sequence convolved with ρ^i, 0 ≤ i < W, ρ = 2^{−1/T}, and

    score_i = −α ⟨z*', x'_i⟩ + β s* s_i − θ p* p_i,    β ≫ α ≫ θ.

Scenario 1: W = ∞, θ = 0. Scenario 2: W = N and positions. What is read most is emitted and
appended, until all signal tokens are out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import softmax

from eval.recall.theory.claims import Claim, Verdict

SHARPNESS = 1e4  # a common factor of α, β, θ, which the proof takes large enough
_PRINTED = (
    "The proof's sum starts at i = 1 but must start at i = 0: the current token has to count as "
    "already emitted. In Eq. 82 I_N should be I_|S|, and z₀ be z_{L+1}."
)


@dataclass(frozen=True)
class CopyLayer:
    """The construction.

    Attributes:
        window: W; none: the whole past.
        alpha, beta, theta: the weights of the three criteria.
        first_lag: 0, or 1 as the proof's sum is printed.
        decays: whether ρ = 2^{−1/T}, or 1.
    """

    window: int | None
    alpha: float = 1e4
    beta: float = 1e8
    theta: float = 1.0
    first_lag: int = 0
    decays: bool = True

    def copy(self, prompt: np.ndarray, signals: int, count: int) -> np.ndarray:
        """Tokens [rows, count] emitted after ⊥, which is appended to the prompts here.

        Args:
            prompt: [rows, L]: signal tokens 1..signals; noise 0 and above signals + 1.
            count: N, tokens to emit.
        """
        horizon = prompt.shape[1] + count + 1
        tokens = np.pad(prompt, ((0, 0), (0, 1)), constant_values=signals + 1)
        codes = np.eye(int(tokens.max()) + 1)
        for _ in range(count):
            time = tokens.shape[1]
            base, place = codes[tokens], np.arange(time) / horizon
            signal = ((tokens > 0) & (tokens <= signals + 1)).astype(float)
            lags = np.arange(self.first_lag, min(self.window or time, time))
            weights, ends = 2.0 ** (-lags / horizon * self.decays), time - 1 - lags
            query = np.einsum("i,rid->rd", weights, base[:, ends])
            scores = -self.alpha * np.einsum("rtd,rd->rt", base, query)
            scores += self.beta * signal * (signal[:, ends] @ weights)[:, None]
            scores -= self.theta * place * (weights @ place[ends])
            read = np.einsum("rt,rtd->rd", softmax(SHARPNESS * scores, axis=1), base)
            # Round to the nearest one-hot vector.
            tokens = np.column_stack([tokens, read.argmax(axis=1)])
        return tokens[:, -count:]


@dataclass(frozen=True)
class Prompts:
    """Random prompts of unique signal tokens among noise.

    Attributes:
        length: L.
        count: signal tokens in a prompt.
        signals: |S|, of which they are drawn.
        noises: |N|, noise tokens, each with a direction of its own.
    """

    length: int
    count: int
    signals: int
    noises: int = 1

    def draw(self, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Prompts [rows, L] and their signal tokens in order [rows, count]."""
        order = rng.random((rows, self.signals)).argsort(axis=1)[:, : self.count] + 1
        ranks = rng.random((rows, self.length)).argsort(axis=1)
        noise = rng.integers(0, self.noises, (rows, self.length))
        prompt = np.where(noise > 0, self.signals + 1 + noise, 0)
        np.put_along_axis(prompt, np.sort(ranks[:, : self.count], axis=1), order, axis=1)
        return prompt, order


def success(layer: CopyLayer, prompts: Prompts, rows: int, seed: int = 0) -> float:
    """Share of prompts whose unique signal tokens all come out in order, decoded greedily."""
    prompt, order = prompts.draw(rows, np.random.default_rng(seed))
    return float((layer.copy(prompt, prompts.signals, prompts.count) == order).all(axis=1).mean())


def theorem_4(
    rows: int, seed: int = 0, count: int = 16, lengths: tuple[int, ...] = (20, 32, 128, 512)
) -> list[Claim]:
    """Both scenarios as corrected, and how far apart the weights must be."""
    # At most N signal tokens, of as many or of more; one noise token or several.
    shapes = ((count, count, 1), (count // 2, count, 1), (count, 2 * count, 4))
    cases = [Prompts(n, c, s, kinds) for n in lengths for c, s, kinds in shapes]

    def check(layer: CopyLayer | Callable[[Prompts], CopyLayer]) -> Verdict:
        layers = [layer if isinstance(layer, CopyLayer) else layer(prompts) for prompts in cases]
        pairs = zip(layers, cases, strict=True)
        found = min(success(one, prompts, rows, seed) for one, prompts in pairs)
        return Verdict(f"{100 * found:.1f}% of prompts right in the worst case", found == 1)

    setting = (
        f"N = {count}; L = {', '.join(map(str, lengths))}; (signal tokens, |S|, |noise|) = "
        f"{', '.join(map(str, shapes))}; {rows} prompts each, greedy"
    )
    long, short = CopyLayer(None, theta=0.0), CopyLayer(count)
    as_printed = "the sum as printed, from i = 1"
    return [
        Claim(
            "Theorem 4 (W = ∞, no positions)",
            "one layer outputs all unique signal tokens in order",
            f"{setting}; (β, α, θ) = ({long.beta:g}, {long.alpha:g}, 0)",
            check,
            long,
            {
                as_printed: replace(long, first_lag=1),
                "a filter that does not decay, ρ = 1": replace(long, decays=False),
            },
            _PRINTED,
        ),
        Claim(
            "Theorem 4 (W = N with positions)",
            "one layer outputs all unique signal tokens in order",
            f"{setting}; (β, α, θ) = ({short.beta:g}, {short.alpha:g}, {short.theta:g})",
            check,
            short,
            {
                as_printed: replace(short, first_lag=1),
                "without positions, θ = 0": replace(short, theta=0.0),
                "a window of N/2": replace(short, window=count // 2),
            },
            _PRINTED,
        ),
        Claim(
            "Theorem 4, how far apart",
            "α = 3TW θ and β = 3α are far enough apart, W = N and T = L + N + 1",
            setting,
            check,
            _separated_layer(count),
            {
                "α = TW/30 θ": _separated_layer(count, near=1 / 30),
                "β = 0": _separated_layer(count, above=0.0),
            },
            "The proof bounds p* p_i by 1, but the convolved position reaches W; ρ^i − ρ^{i+1} is "
            "at least log 2/(2T).",
        ),
    ]


def _separated_layer(
    window: int, near: float = 3.0, above: float = 3.0
) -> Callable[[Prompts], CopyLayer]:
    """θ = 1, α = near T W, β = above α."""

    def make(prompts: Prompts) -> CopyLayer:
        alpha = near * (prompts.length + prompts.count + 1) * window
        return CopyLayer(window, alpha=alpha, beta=above * alpha)

    return make
