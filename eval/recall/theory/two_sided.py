"""The layer of Theorem 2 and Proposition 3, trained to any ε, and measured at any length.

    f(X) = X_v^T softmax(X_k W q),   X_v = a (X * F_v),   F_v ≥ 0 on lags −W … W,

with q the last row of X_q = X_k = norm(X * F̄). Theorem 2 has N = 1 (X_k = X) and a = 1,
Proposition 3 a fixed F̄ of N taps and a = 2. ε, the largest ‖y − f(X)‖, is taken over sequences of
two N-grams, as the proofs use, and over random ones.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.core.errors import UserError
from eval.recall.tasks import generate, make_task
from eval.recall.tasks.base import SPLITS
from eval.recall.tasks.single_query import copies
from eval.recall.theory.associative import convolve

# Values of ε at which a copy of the layer is kept in training.
ERRORS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
HALF_TRAINED = 0.5
_ROUNDS, _ROUND_STEPS = 200, 5
_PATIENCE = 25  # rounds after which a layer that is not half trained is given up
_ATTEMPTS = 8
_HELD_OUT = 10.0  # allowed ratio of the error on other sequences to the training error
_LARGEST_GAP = 700.0  # largest difference of scores whose exponential is finite
_ALL = 20_000  # sequences of two N-grams over which ε is taken


@dataclass(frozen=True)
class Problem:
    """The training problem of a layer.

    Attributes:
        length: L; ngram: N; vocabulary: V; width: d.
        orthonormal: embeddings: orthonormal, or random directions.
        bounded: whether ‖F_v‖₁ ≤ 1 (Assumption 1.a).
        seed: decides embeddings, F̄, initialization and sequences.
    """

    length: int
    ngram: int = 1
    vocabulary: int = 12
    width: int = 16
    orthonormal: bool = True
    bounded: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        """a: W_v is I in Theorem 2 and 2I in Proposition 3."""
        return 1.0 if self.ngram == 1 else 2.0

    @property
    def reach(self) -> int:
        """W: the largest for which the proofs' sequences see every tap from both sides."""
        return self.length - self.ngram - 1

    def describe(self) -> str:
        kind = "orthonormal" if self.orthonormal else "random"
        said = f"{self.vocabulary} {kind} tokens, d = {self.width}, L = {self.length}"
        return said if self.ngram == 1 else f"N = {self.ngram}, {said}"


class TwoSidedLayer(nn.Module):
    """The layer, with learnable W and F_v.

    Attributes:
        beyond: None, or what makes this a layer outside the theorems' class: taps of weight 1 at
            lags from `beyond` to 2 beyond − 1 on both sides, and scores raised by 50 at places at
            least so far before the query. At lengths up to `beyond` it is the same layer.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(problem.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.problem = problem
        self.beyond: int | None = None
        rows, width = problem.vocabulary, problem.width
        if problem.orthonormal:
            table = torch.linalg.qr(normal(width, width)).Q[:rows]
        else:
            table = F.normalize(normal(rows, width))
        self.register_buffer("embeddings", table)
        # Taps of clearly different size: signatures stay apart ("for almost all F̄").
        ratio = 0.4 + 0.3 * torch.rand(1, generator=generator, dtype=torch.float64)
        self.register_buffer("key_filter", ratio ** torch.arange(problem.ngram))
        # Far from any solution, but with keys that favour their own query.
        self.weight = nn.Parameter(4 * torch.eye(width).double() + 0.1 * normal(width, width))
        self.roots = nn.Parameter(torch.full((2 * problem.reach + 2,), 0.5, dtype=torch.float64))

    @property
    def filters(self) -> Tensor:
        """F_v [2W+1], lag −W first, non-negative. If bounded, the last root takes the rest of 1."""
        squares = self.roots.square()
        taps = squares[:-1] / squares.sum() if self.problem.bounded else squares[:-1]
        if self.beyond is None:
            return taps
        missing = 2 * self.beyond - 1 - self.problem.reach
        wide = F.pad(taps, (missing, missing))
        wide[: self.beyond] = wide[-self.beyond :] = 1
        return wide

    def keys(self, tokens: Tensor) -> Tensor:
        """Unit signatures X_k [B, L, d]; those of the first N − 1 places see zeros before them."""
        signatures = convolve(self.embeddings[tokens], self.key_filter)
        return signatures / signatures.norm(dim=2, keepdim=True)

    def attention(self, keys: Tensor) -> Tensor:
        """Return the last token's attention map [B, L]."""
        scores = torch.einsum("btd,de,be->bt", keys, self.weight, keys[:, -1])
        if self.beyond is not None:
            before = torch.arange(keys.shape[1]).flip(0)
            scores = scores + 50.0 * (before >= self.beyond)
        return scores.softmax(dim=1)

    def forward(self, tokens: Tensor, keys: Tensor | None = None) -> Tensor:
        """f(X) [B, d] for tokens [B, L]. The filter moves to the attention map: A (F * X)."""
        weights, filters = self.attention(self.keys(tokens) if keys is None else keys), self.filters
        padded = F.pad(weights, (len(filters) // 2,) * 2)
        moved = F.conv1d(padded[:, None], filters[None, None])[:, 0]
        return self.problem.scale * torch.einsum("bt,btd->bd", moved, self.embeddings[tokens])

    def reaching_beyond(self) -> TwoSidedLayer:
        """Make a copy that answers alike up to the trained length and not at longer ones."""
        other = copy.deepcopy(self)
        other.beyond = self.problem.length
        return other

    @torch.no_grad()
    def confusing(self) -> TwoSidedLayer:
        """Make a copy for which another key is as near to one query as the query's own."""
        other = copy.deepcopy(self)
        gaps, signatures = self._gaps()
        rival, query = signatures[gaps[:, 0].argmax()], signatures[0]
        gap = -float(gaps[:, 0].max())
        other.weight += gap / (1 - query @ rival) * torch.outer(rival, query)
        return other

    @torch.no_grad()
    def largest_ratio(self) -> float:
        """Return o_q: the largest s_v/s_q of a key v against a query q ≠ v."""
        return math.exp(min(float(self._gaps()[0].max()), _LARGEST_GAP))

    def _gaps(self) -> tuple[Tensor, Tensor]:
        """log s_v/s_q [keys, queries] and the keys' signatures [keys, d].

        Queries are all N-grams; keys are these, in the same order, and then the padded beginnings.
        A query's own key is at −∞, and so is a beginning that may look like its query (a, …, a),
        as no layer can tell them apart.
        """
        sizes = range(self.problem.ngram, 0, -1)
        parts = [list(itertools.product(range(self.problem.vocabulary), repeat=n)) for n in sizes]
        keys = torch.cat([self.keys(torch.tensor(grams))[:, -1] for grams in parts])
        scores = keys @ self.weight @ keys[: len(parts[0])].T
        gaps = scores - scores.diagonal()
        for k, key in enumerate(itertools.chain(*parts)):
            for q, query in enumerate(parts[0]):
                if key == query or (key == query[: len(key)] and len(set(query)) == 1):
                    gaps[k, q] = -torch.inf
        return gaps, keys


@dataclass(frozen=True)
class Measured:
    """A layer's numbers.

    Attributes:
        error: ε at the trained length.
        filter: ‖F_v − F*‖₁, F* = 2D₋₁ (Theorem 2) or D₋₁ (Proposition 3).
        to_advance: ‖F_v − D₋₁‖₁.
        ratio: o_q, the largest s_v/s_q.
        by_length: L' -> (largest ‖y − f(X)‖, largest L1 distance of the map from the golden map).
    """

    error: float
    filter: float
    to_advance: float
    ratio: float
    by_length: dict[int, tuple[float, float]] = field(default_factory=dict)


@torch.no_grad()
def measure(layer: TwoSidedLayer, lengths: tuple[int, ...], rows: int) -> Measured:
    """Measure a layer on sequences that it was not trained on, and on those of two N-grams."""
    problem, filters = layer.problem, layer.filters
    by_length = {}
    for length in dict.fromkeys((problem.length, *lengths)):
        most = _ALL if length == problem.length else problem.vocabulary ** (2 * problem.ngram)
        held_out = sequences(problem, length, rows, "test", most=most)
        worst = []
        for tokens, answers in zip(*(part.split(500) for part in held_out), strict=True):
            keys = layer.keys(tokens)
            off = (layer(tokens, keys) - layer.embeddings[answers]).norm(dim=1).max()
            golden = 0.5 * mark_ngram_ends(tokens, problem.ngram).double()
            far = (layer.attention(keys) - golden).abs().sum(dim=1).max()
            worst.append(torch.stack([off, far]))
        # torch's maximum of numbers and NaN is NaN, which no bound may hold.
        by_length[length] = tuple(torch.stack(worst).amax(dim=0).tolist())
    advance = torch.zeros_like(filters)
    advance[len(filters) // 2 - 1] = 1
    return Measured(
        error=by_length[problem.length][0],
        filter=float((filters - 2 / problem.scale * advance).abs().sum()),
        to_advance=float((filters - advance).abs().sum()),
        ratio=layer.largest_ratio(),
        by_length=by_length,
    )


@dataclass(frozen=True)
class Run:
    """A layer along its training.

    Attributes:
        untrained: the layer at initialization.
        half_trained: the layer when its error was first at most one half.
        kept: the layers when the error was first at most each of `ERRORS`.
    """

    problem: Problem
    untrained: TwoSidedLayer
    half_trained: TwoSidedLayer
    kept: list[TwoSidedLayer]


def train(problem: Problem, rows: int) -> Run:
    """Train layers with different random draws until one reaches the smallest error of `ERRORS`.

    The theorems are about layers that solve their problem. L-BFGS may converge to a layer that does
    not, or that is right only on its training sequences.

    Args:
        rows: number of random training sequences.

    Raises:
        UserError: no layer has reached the error in `_ATTEMPTS` trainings.
    """
    for attempt in range(_ATTEMPTS):
        drawn = replace(problem, seed=problem.seed + 1000 * attempt)
        data = sequences(drawn, drawn.length, rows, "train", most=6 * rows)
        run = _descend(TwoSidedLayer(drawn), *data)
        if run and measure(run.kept[-1], (), rows).error <= _HELD_OUT * ERRORS[-1]:
            return run
    raise UserError(
        f"theory: no layer ({problem.describe()}) reached an error of {ERRORS[-1]:g} in "
        f"{_ATTEMPTS} trainings; give another --seed"
    )


def _descend(layer: TwoSidedLayer, tokens: Tensor, answers: Tensor) -> Run | None:
    """Minimize the logarithm of the mean squared error by L-BFGS in fp64; None if that ends early.

    The logarithm keeps the gradient's size while the error falls by decades.
    """
    untrained = copy.deepcopy(layer)
    keys, targets = layer.keys(tokens), layer.embeddings[answers]
    optimizer = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=_ROUND_STEPS,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = 0.5 * (layer(tokens, keys) - targets).square().sum(dim=1).mean().log()
        value.backward()
        return value

    marks = [HALF_TRAINED, *ERRORS]
    found: list[TwoSidedLayer] = []
    for done in range(_ROUNDS):
        optimizer.step(loss)
        with torch.no_grad():
            error = float((layer(tokens, keys) - targets).norm(dim=1).max())
        while len(found) < len(marks) and error <= marks[len(found)]:
            found.append(copy.deepcopy(layer))
        if len(found) == len(marks):
            return Run(layer.problem, untrained, found[0], found[1:])
        if not found and done >= _PATIENCE:
            break
    return None


def sequences(
    problem: Problem, length: int, rows: int, split: str, *, most: int
) -> tuple[Tensor, Tensor]:
    """Tokens [B, L] whose last N-gram stands once before, and the answers [B].

    Sequences of two N-grams, then random ones, after Definitions 2 and 3. Where the vocabulary has
    too few N-grams for one to be unique by chance, random ones are of all but the query.

    Args:
        rows: random ones, of those of the latter kind before some are left out.
        most: of two N-grams: all if these are no more, else all pairs in turn, so many in all,
            at random places.
    """
    n, count = problem.ngram, problem.vocabulary
    parts = [_of_two_ngrams(problem, length, most)]
    if n == 1 or 2 * count**n >= length:
        options = {"ngram": str(n), "layout": "free", "vocab_size": str(count + 1)}
        examples = generate(make_task("nar", length, options), rows, seed=problem.seed, split=split)
        parts.append((examples.inputs - 1, examples.labels[:, -1] - 1))
    else:
        parts.append(_of_all_but_the_query(problem, length, rows, SPLITS.index(split)))
    tokens, answers = (np.concatenate(part) for part in zip(*parts, strict=True))
    if n > 1:  # (a, …, a) after x₀ = a: three keys look alike, and no layer answers
        free = ~(tokens[:, -n:] == tokens[:, :1]).all(axis=1)
        tokens, answers = tokens[free], answers[free]
    return torch.from_numpy(tokens), torch.from_numpy(answers)


def _of_all_but_the_query(
    problem: Problem, length: int, rows: int, part: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens, drawn again where they would end the query beside its two places."""
    rng = np.random.default_rng([problem.seed, length, part])
    n, count = problem.ngram, problem.vocabulary
    query, place = rng.integers(0, count, (rows, n)), rng.integers(0, length - 2 * n + 1, rows)
    tokens = rng.integers(0, count, (rows, length))
    for t in range(length - n):
        offset = t - place
        planted = (offset >= 0) & (offset < n)
        tokens[planted, t] = query[planted, offset[planted]]
        if t >= n - 1:
            ends = (tokens[:, t - n + 1 : t + 1] == query).all(axis=1) & ~planted
            other = tokens[ends, t] + rng.integers(1, count, int(ends.sum()))
            tokens[ends, t] = other % count
    return _with_query(tokens, query, place)


def _of_two_ngrams(problem: Problem, length: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """One N-gram repeated, and another at one place and at the end: X^i of the proof of Lemma 1."""
    n, count = problem.ngram, problem.vocabulary
    grams, spots = count**n, length - 2 * n + 1
    pair, place = np.divmod(np.arange(grams**2 * spots), spots)
    if len(pair) > most:
        pair = np.arange(most) % grams**2
        place = np.random.default_rng([problem.seed, length]).integers(0, spots, most)
    query, filler = (
        gram[:, None] // count ** np.arange(n)[::-1] % count for gram in np.divmod(pair, grams)
    )
    tokens = filler[:, np.arange(length) % n]
    np.put_along_axis(tokens, place[:, None] + np.arange(n), query, axis=1)
    return _with_query(tokens, query, place)


def _with_query(
    tokens: np.ndarray, query: np.ndarray, place: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences that end with the query, which occurs once before, and their answers."""
    n = query.shape[1]
    tokens[:, -n:] = query
    unique = copies(tokens, n) == 2
    tokens, place = tokens[unique], place[unique]
    return tokens, tokens[np.arange(len(tokens)), place + n]


def mark_ngram_ends(tokens: Tensor, ngram: int) -> Tensor:
    """Return where [B, L] the last N-gram of each row ends, including the last position."""
    same = tokens == tokens[:, -1:]
    for lag in range(1, ngram):
        same[:, lag:] &= tokens[:, :-lag] == tokens[:, -1 - lag, None]
        same[:, :lag] = False
    return same
