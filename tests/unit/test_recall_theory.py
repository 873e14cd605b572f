"""The theory's constructions and exact simulations, against direct computation."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from eval.recall.theory import associative, copying, generalization, landmark, report
from eval.recall.theory.claims import Claim
from eval.recall.theory.report import theory


@pytest.mark.parametrize("delay", ["key", "value"])
@pytest.mark.parametrize("ngram", [1, 2])
def test_theorem_1_recalls_wherever_the_padding_imitates_nothing(ngram, delay):
    found = associative.measure(ngram, 48, delay, 300, seed=3)
    assert found["wrong_elsewhere"] == 0
    assert found["distance"] <= found["bound"]


def test_the_layer_is_the_formula_row_by_row():
    construction = associative.Construction.draw(2, seed=0)
    tokens = torch.tensor([[3, 5, 7, 1, 3, 5]])
    x = construction.embeddings[tokens[0]]
    first, second = construction.filters

    def unit(row):
        return row / row.norm() if row.norm() > 0 else row

    rows = [unit(first * x[i] + (second * x[i - 1] if i else 0)) for i in range(6)]
    keys = [torch.zeros(32).double(), *rows[:-1]]
    c = construction.temperature(6)
    weights = torch.stack([c * key @ rows[-1] for key in keys]).softmax(0)
    expected = (weights[:, None] * x).sum(0)
    torch.testing.assert_close(associative.layer(construction, tokens, "key")[0], expected)


def test_a_constant_ngram_collides_with_the_padded_start():
    construction = associative.Construction.draw(2, seed=0)
    tokens = torch.tensor([[4, 9, 1, 4, 4, 7, 2, 4, 4]])
    output = associative.layer(construction, tokens, "key")[0]
    weights = (construction.embeddings @ output).topk(2).indices
    # Half of the attention follows position 0 (answer 9), half the true copy (answer 7), if the
    # filter's sum has the sign of its first tap; the true copy alone otherwise.
    same_sign = construction.filters.sum() * construction.filters[0] > 0
    assert 7 in weights
    assert bool(9 in weights and abs(output @ construction.embeddings[9]) > 0.3) == bool(same_sign)


def test_selective_copying_works_as_corrected_and_not_as_printed():
    for layer in (copying.CopyLayer(None, theta=0.0), copying.CopyLayer(8)):
        for count in (8, 4):
            assert copying.success(layer, length=40, count=count, rows=40) == 1
    printed = copying.CopyLayer(None, theta=0.0, first_lag=1)
    assert copying.success(printed, length=40, count=8, rows=40) < 0.2
    no_window = copying.CopyLayer(1)
    assert copying.success(no_window, length=40, count=8, rows=40) < 0.2


def test_fixed_thresholds_equal_quadrature():
    """P(success at d) = E_z[Φ(√d/(σ√B) + √((B−1)/B) z)^n] · Φ(√d)^(2B−2), integrated on a grid."""
    block, length = 16, 2**20
    thresholds = landmark.fixed_thresholds(block, 60_000, seed=0)
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    for d in (150.0, 300.0, 450.0):
        inside = math.sqrt(d / block) + math.sqrt((block - 1) / block) * z
        chance = (density * torch.special.log_ndtr(inside).mul(length / block - 2).exp()).sum()
        local = torch.special.log_ndtr(torch.tensor(math.sqrt(d))).mul(2 * block - 2).exp()
        assert abs(float(chance * local) - (thresholds <= d).mean()) < 0.01


def test_subspace_thresholds_equal_vectors(monkeypatch):
    """Against r-dimensional vectors drawn in full, at a length that allows it."""
    monkeypatch.setattr(landmark, "LENGTH", 2048)
    block, rank, trials = 16, 5, 1500
    found = landmark.subspace_thresholds(block, rank, trials, seed=0)
    rng = np.random.default_rng(9)
    others = math.sqrt(block) * rng.standard_normal((trials, 2048 // block - 2, rank))
    own = math.sqrt(block - 1) * rng.standard_normal((trials, 1, rank))
    far = ((others - own) ** 2).sum(axis=2).max(axis=1)
    near = (rng.standard_normal((trials, 2 * block - 2, rank)) ** 2).sum(axis=2).max(axis=1)
    expected = np.maximum(far, near)
    for share in (0.1, 0.5, 0.9):
        assert abs(np.quantile(found, share) / np.quantile(expected, share) - 1) < 0.05


def test_exponential_thresholds_equal_whole_sequences(monkeypatch):
    """Against products of every token with the query, filtered token by token."""
    monkeypatch.setattr(landmark, "LENGTH", 512)
    block, trials = 8, 3000
    found = landmark.exponential_thresholds(block, trials, seed=0, local=False)
    rng, blocks = np.random.default_rng(5), 512 // block - 1
    decay = math.exp(-1 / block)
    noise, copy = rng.standard_normal((trials, blocks * block)), np.zeros((trials, blocks * block))
    place = rng.integers(0, blocks * block, trials)
    noise[np.arange(trials), place], copy[np.arange(trials), place] = 0, 1
    states = []
    for x in (noise, copy):
        state, kept = np.zeros(trials), []
        # A burn-in makes the state stationary, as in a long context.
        for value in (*rng.standard_normal((200, trials)) * (x is noise), *x.T):
            state = decay * state + value
            kept.append(state)
        states.append(np.stack(kept[200 + block - 1 :: block], axis=1))
    rows, target = np.arange(trials), place // block
    noise, mean = states
    ahead = mean[rows, target][:, None] - mean
    ahead[rows, target] = np.inf
    needed = ((noise - noise[rows, target][:, None]) / ahead).max(axis=1)
    expected = np.maximum(needed, 0) ** 2
    for share in (0.25, 0.5, 0.75):
        assert abs(np.quantile(found, share) / np.quantile(expected, share) - 1) < 0.08


def test_the_two_sided_layer_filters_values():
    torch.manual_seed(0)
    table = torch.randn(6, 4, dtype=torch.float64)
    layer = generalization.TwoSidedLayer(table, reach=2)
    layer.roots.data.uniform_(0, 1)
    tokens = torch.randint(6, (3, 5))
    x, weights = table[tokens], layer.attention(tokens)
    values = torch.zeros_like(x)
    for i in range(5):
        for lag in range(-2, 3):
            if 0 <= i - lag < 5:
                values[:, i] += layer.filters[lag + 2] * x[:, i - lag]
    torch.testing.assert_close(layer(tokens), torch.einsum("bt,btd->bd", weights, values))


def test_theory_writes_everything_and_every_claim_holds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(landmark, "BLOCKS", (128, 512))
    monkeypatch.setattr(landmark, "RANKS", (4,))
    monkeypatch.setattr("eval.recall.theory.report.TRIALS", 2000)
    assert theory(tmp_path, rows=20, slow_trials=30)
    record = json.loads((tmp_path / "theory.json").read_text())
    sources = " ".join(claim["source"] for claim in record["claims"])
    for name in ("Theorem 1", "Corollary 1", "Theorem 2", "Theorem 4", "(A)", "(B)", "(C)"):
        assert name in sources
    filters = np.array(record["theorem_2"]["filter"])
    assert filters.argmax() == 6 and abs(filters[6] - 2) < 0.1  # lag −1
    for name in ("landmark_tradeoff.png", "theorem_2.svg", "theory.html", "theory.md"):
        assert (tmp_path / name).stat().st_size > 1000
    assert "holds" in capsys.readouterr().out


def test_the_page_takes_what_is_claimed_as_text():
    claim = Claim("T <i>1", "x < y & z", "a 'b'", "m", False, "not <i>so")
    page = report.page([claim], "python <i>")
    assert "<i>" not in page and "<p>x &lt; y &amp; z</p>" in page
    assert "<h2>T &lt;i&gt;1: does not hold</h2>" in page
    assert "<em>Correction.</em> not &lt;i&gt;so" in page
    assert "Correction" not in report.page([dataclasses.replace(claim, correction="")], "")
