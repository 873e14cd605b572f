"""Theorem 4 (Theorem 3 in the body): one layer copies unique signal tokens in their order.

A token's embedding is [x'; s; p]: x' one-hot over the signal tokens, ⊥ and one direction for all
noise; s = 1 for signal tokens and ⊥; p = i/T. The query is the current end of the sequence
convolved with ρ^i, 0 ≤ i < W, ρ = 2^{−1/T}, and

    score_i = −α ⟨z*', x'_i⟩ + β s* s_i − θ p* p_i,    β ≫ α ≫ θ.

Scenario 1: W = ∞, θ = 0. Scenario 2: W = N and positions. What is read most is emitted and
appended, until all signal tokens are out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eval.recall.theory.claims import Claim

SHARPNESS = 1e4  # a common factor of α, β, θ, which the proof takes large enough


@dataclass(frozen=True)
class CopyLayer:
    """The construction.

    Attributes:
        window: W; none: the whole past.
        alpha, beta, theta: the weights of the three criteria.
        first_lag: 0, or 1 as the proof's sum is printed.
    """

    window: int | None
    alpha: float = 1e4
    beta: float = 1e8
    theta: float = 1.0
    first_lag: int = 0

    def copy(self, prompt: np.ndarray, signals: int, count: int) -> np.ndarray:
        """Tokens [rows, count] emitted after ⊥, which is appended to the prompts here.

        Args:
            prompt: [rows, L]: noise 0, signal tokens 1..signals.
            count: N, tokens to emit.
        """
        rows, length = prompt.shape
        horizon = length + count + 1
        tokens = np.concatenate([prompt, np.full((rows, 1), signals + 1)], axis=1)
        embedded = self._embed(tokens, signals, np.arange(length + 1) / horizon)
        emitted = []
        for step in range(count):
            weights = self._attend(embedded, horizon)
            output = np.einsum("rt,rtd->rd", weights, embedded)
            token = output[:, : signals + 2].argmax(axis=1)  # nearest one-hot
            emitted.append(token)
            position = np.array([(length + 1 + step) / horizon])
            added = self._embed(token[:, None], signals, position)
            embedded = np.concatenate([embedded, added], axis=1)
        return np.stack(emitted, axis=1)

    def _embed(self, tokens: np.ndarray, signals: int, positions: np.ndarray) -> np.ndarray:
        """[rows, T, signals + 4]."""
        base = np.eye(signals + 2)[tokens]
        signal = (tokens > 0).astype(float)[..., None]
        place = np.broadcast_to(positions[:, None], (*tokens.shape, 1))
        return np.concatenate([base, signal, place], axis=2)

    def _attend(self, embedded: np.ndarray, horizon: int) -> np.ndarray:
        """Attention [rows, T] of the last position."""
        time = embedded.shape[1]
        lags = np.arange(self.first_lag, min(self.window or time, time))
        query = np.einsum("i,rid->rd", 2.0 ** (-lags / horizon), embedded[:, time - 1 - lags])
        base, signal, place = embedded[..., :-2], embedded[..., -2], embedded[..., -1]
        scores = -self.alpha * np.einsum("rtd,rd->rt", base, query[:, :-2])
        scores += self.beta * signal * query[:, -2:-1] - self.theta * place * query[:, -1:]
        scores = SHARPNESS * (scores - scores.max(axis=1, keepdims=True))
        weights = np.exp(scores)
        return weights / weights.sum(axis=1, keepdims=True)


def success(layer: CopyLayer, *, length: int, count: int, rows: int, seed: int = 0) -> float:
    """Share of prompts whose unique signal tokens all come out in order, decoded greedily."""
    rng = np.random.default_rng(seed)
    order = rng.random((rows, count)).argsort(axis=1) + 1
    places = np.sort(rng.random((rows, length)).argsort(axis=1)[:, :count], axis=1)
    prompt = np.zeros((rows, length), dtype=np.int64)
    np.put_along_axis(prompt, places, order, axis=1)
    return float((layer.copy(prompt, count, count) == order).all(axis=1).mean())


def theorem_4(
    rows: int, count: int = 16, lengths: tuple[int, ...] = (20, 32, 128, 512)
) -> list[Claim]:
    """Both scenarios as corrected, and what the printed forms give."""

    counts = (count, count // 2)  # the proof allows at most N signal tokens

    def least(layer: CopyLayer) -> float:
        cases = [(n, c) for n in lengths for c in counts]
        return min(success(layer, length=n, count=c, rows=rows) for n, c in cases)

    long, short = CopyLayer(None, theta=0.0), CopyLayer(count)
    scenarios = {"W = ∞, no positions": long, "W = N with positions": short}
    setting = f"N = {count}, {count} or {count // 2} unique tokens, "
    setting += f"L = {', '.join(map(str, lengths))}, {rows} prompts, greedy"
    corrections = {
        "W = ∞, no positions": CopyLayer(None, theta=0.0, first_lag=1),
        "W = N with positions": CopyLayer(count, first_lag=1),
    }
    claims = []
    for name, layer in scenarios.items():
        found, printed = least(layer), least(corrections[name])
        claims.append(
            Claim(
                f"Theorem 4 ({name})",
                "one layer outputs all unique signal tokens in order",
                f"{setting}; (β, α, θ) = ({layer.beta:g}, {layer.alpha:g}, {layer.theta:g})",
                f"{100 * found:.1f}% of prompts right in the worst case; "
                f"{100 * printed:.1f}% with the sum as printed",
                found == 1,
                "The proof's sum starts at i = 1 but must start at i = 0: the current token has to "
                "count as already emitted. In Eq. 82 I_N should be I_|S|, and z₀ be z_{L+1}.",
            )
        )
    close = CopyLayer(count, alpha=1e2, beta=1e4)
    found = least(close)
    claims.append(
        Claim(
            "Theorem 4, how far apart",
            "β/α and α/θ must be large: α/θ above about T·W, as p* sums W positions",
            f"{setting}; (β, α, θ) = (1e4, 1e2, 1)",
            f"{100 * found:.1f}% of prompts right at the worst length; the ratios above: 100%",
            found < 1,
            "The proof bounds p* p_i by 1; the convolved position reaches W.",
        )
    )
    return claims
