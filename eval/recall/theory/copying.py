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
        rows, length = prompt.shape
        horizon = length + count + 1
        tokens = np.concatenate([prompt, np.full((rows, 1), signals + 1)], axis=1)
        kinds = int(tokens.max()) + 1
        embedded = self._embed(tokens, signals, kinds, np.arange(length + 1) / horizon)
        emitted = []
        for step in range(count):
            weights = self._attend(embedded, horizon)
            output = np.einsum("rt,rtd->rd", weights, embedded)
            token = output[:, :-2].argmax(axis=1)  # nearest one-hot
            emitted.append(token)
            position = np.array([(length + 1 + step) / horizon])
            added = self._embed(token[:, None], signals, kinds, position)
            embedded = np.concatenate([embedded, added], axis=1)
        return np.stack(emitted, axis=1)

    def _embed(
        self, tokens: np.ndarray, signals: int, kinds: int, positions: np.ndarray
    ) -> np.ndarray:
        """[rows, T, kinds + 2], kinds: signal tokens, ⊥ and noise tokens."""
        base = np.eye(kinds)[tokens]
        signal = ((tokens > 0) & (tokens <= signals + 1)).astype(float)[..., None]
        place = np.broadcast_to(positions[:, None], (*tokens.shape, 1))
        return np.concatenate([base, signal, place], axis=2)

    def _attend(self, embedded: np.ndarray, horizon: int) -> np.ndarray:
        """Attention [rows, T] of the last position."""
        time = embedded.shape[1]
        lags = np.arange(self.first_lag, min(self.window or time, time))
        weights = 2.0 ** (-lags / horizon * self.decays)
        query = np.einsum("i,rid->rd", weights, embedded[:, time - 1 - lags])
        base, signal, place = embedded[..., :-2], embedded[..., -2], embedded[..., -1]
        scores = -self.alpha * np.einsum("rtd,rd->rt", base, query[:, :-2])
        scores += self.beta * signal * query[:, -2:-1] - self.theta * place * query[:, -1:]
        scores = SHARPNESS * (scores - scores.max(axis=1, keepdims=True))
        weights = np.exp(scores)
        return weights / weights.sum(axis=1, keepdims=True)


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
        places = np.sort(ranks[:, : self.count], axis=1)
        noise = rng.integers(0, self.noises, (rows, self.length))
        prompt = np.where(noise > 0, self.signals + 1 + noise, 0)
        np.put_along_axis(prompt, places, order, axis=1)
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

    def check(make: Callable[[Prompts], CopyLayer]) -> Verdict:
        found = min(success(make(prompts), prompts, rows, seed) for prompts in cases)
        return Verdict(f"{100 * found:.1f}% of prompts right in the worst case", found == 1)

    setting = (
        f"N = {count}; L = {', '.join(map(str, lengths))}; (signal tokens, |S|, |noise|) = "
        f"{', '.join(map(str, shapes))}; {rows} prompts each, greedy"
    )
    long, short = CopyLayer(None, theta=0.0), CopyLayer(count)
    as_printed, other = "the sum as printed, from i = 1", "a filter that does not decay, ρ = 1"
    return [
        Claim.judged(
            "Theorem 4 (W = ∞, no positions)",
            "one layer outputs all unique signal tokens in order",
            f"{setting}; (β, α, θ) = ({long.beta:g}, {long.alpha:g}, 0)",
            check,
            lambda _: long,
            {
                as_printed: lambda _: replace(long, first_lag=1),
                other: lambda _: replace(long, decays=False),
            },
            _PRINTED,
        ),
        Claim.judged(
            "Theorem 4 (W = N with positions)",
            "one layer outputs all unique signal tokens in order",
            f"{setting}; (β, α, θ) = ({short.beta:g}, {short.alpha:g}, {short.theta:g})",
            check,
            lambda _: short,
            {
                as_printed: lambda _: replace(short, first_lag=1),
                "without positions, θ = 0": lambda _: replace(short, theta=0.0),
                "a window of N/2": lambda _: replace(short, window=count // 2),
            },
            _PRINTED,
        ),
        Claim.judged(
            "Theorem 4, how far apart",
            "α = 3TW θ and β = 3α are far enough apart, W = N and T = L + N + 1",
            setting,
            check,
            lambda prompts: _apart(count, prompts),
            {
                "α = TW/30 θ": lambda prompts: _apart(count, prompts, near=1 / 30),
                "β = 0": lambda prompts: _apart(count, prompts, above=0.0),
            },
            "The proof bounds p* p_i by 1, but the convolved position reaches W; ρ^i − ρ^{i+1} is "
            "at least log 2/(2T).",
        ),
    ]


def _apart(window: int, prompts: Prompts, near: float = 3.0, above: float = 3.0) -> CopyLayer:
    """θ = 1, α = near T W, β = above α."""
    alpha = near * (prompts.length + prompts.count + 1) * window
    return CopyLayer(window, alpha=alpha, beta=above * alpha, theta=1.0)
