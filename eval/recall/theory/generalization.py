"""Theorem 2: a trained layer that solves recall at one length solves it at all lengths.

    f(X) = X_v^T softmax(X W x_{L−1}),   X_v = X * F_v,   F_v ≥ 0 on lags −W … W,

unit-norm embeddings. A model with error ε at length L and ε₀ = ε/Δ is claimed to have a value
filter near a pure advance, an attention map near ½ on the query's two places, and an error of at
most R L' ε₀ at length L'. The constant R is not given, so what is reported are the ratios, which
must stay bounded while ε falls and L' grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from eval.recall.tasks import generate, make_task
from eval.recall.theory.claims import Claim

LENGTH, VOCABULARY, WIDTH = 8, 16, 16
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
CONSTANT = 10.0  # what "an absolute constant" may be here


class TwoSidedLayer(nn.Module):
    """The layer of Theorem 2 with learnable W = W_k W_q^T and F_v."""

    def __init__(self, embeddings: Tensor, reach: int) -> None:
        super().__init__()
        self.register_buffer("embeddings", embeddings)
        width = embeddings.shape[1]
        self.weight = nn.Parameter(0.1 * torch.randn(width, width, dtype=embeddings.dtype))
        self.roots = nn.Parameter(torch.full((2 * reach + 1,), 0.5, dtype=embeddings.dtype))
        self.reach = reach

    @property
    def filters(self) -> Tensor:
        """F_v [2W+1], lag −W first, non-negative."""
        return self.roots.square()

    def attention(self, tokens: Tensor) -> Tensor:
        """The last token's attention map [B, L]."""
        x = self.embeddings[tokens]
        return torch.einsum("btd,de,be->bt", x, self.weight, x[:, -1]).softmax(dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        """f(X) [B, d] for tokens [B, L]. The filter moves to the attention map: A (F * X)."""
        padded = nn.functional.pad(self.attention(tokens), (self.reach, self.reach))
        moved = nn.functional.conv1d(padded[:, None], self.filters[None, None])[:, 0]
        return torch.einsum("bt,btd->bd", moved, self.embeddings[tokens])


@dataclass(frozen=True)
class Snapshot:
    """A model at some step of its training, measured at the training length."""

    step: int
    error: float  # ε, the largest ‖y − f(X)‖
    to_twice: float  # ‖F − 2 D₋₁‖₁
    to_once: float  # ‖F − D₋₁‖₁


@dataclass(frozen=True)
class Trained:
    """Hold what training left, and how it fares at other lengths.

    Attributes:
        delta: Δ = √(1 − max cosine²) of the embeddings.
        snapshots: along training.
        filters: F_v, lag −W first.
        by_length: L' -> (largest error, largest L1 distance of the map from the golden map).
    """

    delta: float
    snapshots: list[Snapshot]
    filters: np.ndarray
    by_length: dict[int, tuple[float, float]]


def train(
    *, seed: int = 0, steps: int = 1500, rows: int = 20_000, orthogonal: bool = True
) -> Trained:
    """Trains by Adam on squared error at length 8 and measures the model on unseen sequences."""
    torch.manual_seed(seed)
    table = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)
    table = torch.linalg.qr(table).Q if orthogonal else nn.functional.normalize(table, dim=1)
    model = TwoSidedLayer(table, LENGTH - 1)
    tokens, answers = _sequences(LENGTH, rows, seed, "train")
    held_out = _sequences(LENGTH, rows, seed, "test")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-3)
    marks = {int(steps * 2.0**-i) for i in range(6)}
    snapshots = []
    for step in range(1, steps + 1):
        pick = torch.randint(rows, (256,))
        loss = (model(tokens[pick]) - table[answers[pick]]).square().sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step in marks:
            snapshots.append(_snapshot(model, step, *held_out))
    by_length = {n: _at_length(model, n, seed) for n in LENGTHS}
    filters = model.filters.detach().numpy()
    return Trained(_delta(table), snapshots, filters, by_length)


def theorem_2(trained: Trained) -> list[Claim]:
    """The three statements for one trained model."""
    last = trained.snapshots[-1]
    unit = last.error / trained.delta
    setting = f"trained at L = {LENGTH}, W = {LENGTH - 1}, ε = {last.error:.2g}, Δ = "
    setting += f"{trained.delta:.3g}"
    ratios = [s.to_twice * trained.delta / (LENGTH * s.error) for s in trained.snapshots]
    maps = {n: distance / (n * unit) for n, (_, distance) in trained.by_length.items()}
    errors = {n: error / (n * unit) for n, (error, _) in trained.by_length.items()}
    return [
        Claim(
            "Theorem 2, filter",
            "‖F_v − 2D₋₁‖₁ ≤ R L ε₀",
            f"{setting}; along training",
            f"‖F_v − 2D₋₁‖₁ = {last.to_twice:.2g}, at most {max(ratios):.2f} L ε₀; "
            f"‖F_v − D₋₁‖₁ = {last.to_once:.3f}",
            max(ratios) <= CONSTANT,
            "The statement says D₋₁, but its proof gives F₋₁ → 2, as the query's own place has "
            "half of the attention and no token after it.",
        ),
        Claim(
            "Theorem 2, attention map",
            "‖softmax(X W x_{L−1}) − golden map‖₁ ≤ R L' ε₀ at every length L'",
            f"{setting}; L' = {min(maps)}…{max(maps)}",
            f"at most {max(maps.values()):.2f} L' ε₀ ({trained.by_length[max(maps)][1]:.2g} at "
            f"L' = {max(maps)})",
            max(maps.values()) <= CONSTANT,
        ),
        Claim(
            "Theorem 2, length generalization",
            "‖y − f(X)‖ ≤ R L' ε₀ at every length L'",
            f"{setting}; L' = {min(errors)}…{max(errors)}",
            f"at most {max(errors.values()):.2f} L' ε₀ ({trained.by_length[max(errors)][0]:.2g} at "
            f"L' = {max(errors)})",
            max(errors.values()) <= CONSTANT,
        ),
    ]


def _snapshot(model: TwoSidedLayer, step: int, tokens: Tensor, answers: Tensor) -> Snapshot:
    with torch.no_grad():
        error = float((model(tokens) - model.embeddings[answers]).norm(dim=1).max())
        advance = torch.zeros_like(model.filters)
        advance[model.reach - 1] = 1  # lag −1
        twice, once = (float((model.filters - n * advance).abs().sum()) for n in (2, 1))
    return Snapshot(step, error, twice, once)


@torch.no_grad()
def _at_length(model: TwoSidedLayer, length: int, seed: int) -> tuple[float, float]:
    errors, maps = [], []
    for tokens, answers in zip(
        *(t.split(500) for t in _sequences(length, 2000, seed, "test")), strict=True
    ):
        errors.append((model(tokens) - model.embeddings[answers]).norm(dim=1).max())
        golden = 0.5 * (tokens == tokens[:, -1:]).double()
        maps.append((model.attention(tokens) - golden).abs().sum(dim=1).max())
    return float(torch.stack(errors).max()), float(torch.stack(maps).max())


def _sequences(length: int, rows: int, seed: int, split: str) -> tuple[Tensor, Tensor]:
    """Tokens [rows, L] after Definition 2, and the answers [rows]."""
    task = make_task("ar", length, {"layout": "free", "vocab_size": str(VOCABULARY + 1)})
    examples = generate(task, rows, seed=seed, split=split)
    answers = examples.labels[:, -1] - 1
    return torch.from_numpy(examples.inputs - 1), torch.from_numpy(answers)


def _delta(table: Tensor) -> float:
    cosine = table @ table.T
    cosine.fill_diagonal_(0)
    return math.sqrt(1 - float(cosine.abs().max()) ** 2)
