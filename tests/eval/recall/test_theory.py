"""The theory's constructions and exact simulations, against direct computation."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest
import torch

from cat_lm.core.errors import UserError
from eval.recall import __main__ as command
from eval.recall.theory import (
    associative,
    copying,
    generalization,
    landmark,
    query_sets,
    report,
    two_sided,
)
from eval.recall.theory.associative import Recipe
from eval.recall.theory.claims import Claim, Simulations, Verdict, describe, stands
from eval.recall.theory.report import theory
from eval.recall.theory.two_sided import Problem
from tests.conftest import REPOSITORY

GUIDE = (REPOSITORY / "docs/reproduce.md").read_text(encoding="utf-8")
SOURCES = (
    "Theorem 1, key delay",
    "Theorem 1, value delay",
    "Theorem 1, causality",
    "Corollary 1",
    "Theorem 2, filter (Lemma 1)",
    "Lemma 1, attention",
    "Theorem 2, attention map",
    "Theorem 2, length generalization",
    "Lemma 2 (Assumption 1.b)",
    "Proposition 3, filter (Lemma 3)",
    "Lemma 3, attention",
    "Proposition 3, attention map",
    "Proposition 3, length generalization",
    "Theorem 4 (W = ∞, no positions)",
    "Theorem 4 (W = N with positions)",
    "Theorem 4, how far apart",
    "Proposition 1 (A)",
    "Proposition 1 (B)",
    "Proposition 1, threshold",
    "Proposition 1 (C)",
    "Proposition 2",
    "Definition 7",
    "Proposition 4",
    "Lemma 4",
    "Proposition 5",
    "LaS Theorem B.1",
    "LaS Theorem B.1, both signs",
    "LaS Theorem B.1, smoothing",
)


def test_the_nearest_window_is_that_of_all_of_them():
    """By a loop over windows and N-grams, without those of (a, …, a) after a."""
    size = associative.Size(4, 6, (3,))
    construction = associative.Construction.draw(3, 1, size)
    table, taps = construction.embeddings, construction.filters

    def signature(tokens):
        rows = [f * table[t] for f, t in zip(taps, reversed(tokens), strict=False)]
        return torch.stack(rows).sum(0) / torch.stack(rows).sum(0).norm()

    grams = list(itertools.product(range(4), repeat=3))
    windows = [w for k in (1, 2) for w in itertools.product(range(4), repeat=k)]
    apart = {
        (window, gram): float(1 - signature(window) @ signature(gram))
        for window, gram in itertools.product(windows, grams)
        if set(gram) != {window[0]}
    }
    least, window, gram = construction.nearest
    assert least == pytest.approx(min(apart.values()))
    assert least == pytest.approx(apart[tuple(window.tolist()), tuple(gram.tolist())])
    of_grams = min(
        float(1 - signature(a) @ signature(b)) for a, b in itertools.combinations(grams, 2)
    )
    assert construction.separation_of_grams == pytest.approx(of_grams)
    assert construction.separation == min(construction.separation_of_grams, construction.nearest[0])
    single = associative.Construction.draw(1, 1, size)
    assert single.separation == single.separation_of_grams  # there are no padded windows


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
    torch.testing.assert_close(associative.layer(construction, tokens, Recipe("key"))[0], expected)


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


@pytest.mark.parametrize(("block", "top_k", "snr"), [(1, 1, 3.0), (8, 1, 9.0), (8, 4, 6.0)])
def test_the_chance_that_a_block_is_among_the_chosen(block, top_k, snr):
    """Against landmarks of numbers that are drawn, and with the law's own thresholds."""
    rivals, trials = 40, 4000
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((trials, rivals + 1, block))
    scores[:, 0, 0] = snr  # the match: its product is known, the others' are noise
    landmarks = scores.mean(axis=2)
    found = float(((landmarks[:, 1:] > landmarks[:, :1]).sum(axis=1) < top_k).mean())
    expected = float(landmark.retrieval(snr**2, block, rivals, top_k))
    assert 0.2 < expected < 0.98
    assert abs(found - expected) < 4 * math.sqrt(expected * (1 - expected) / trials)
    other = landmark.retrieval(snr**2, block, rivals, top_k + 1)
    assert other > expected + 0.03  # a block more is a chance more


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


@pytest.mark.parametrize("index", range(6))
def test_support_functions_are_suprema(index):
    """Against the best of many members of the set, and of x's own direction where it is one."""
    queries = query_sets.query_sets()[index]
    rng = np.random.default_rng(3)
    members = rng.standard_normal((200_000, queries.rank))
    if queries.name.startswith("cap"):
        members[:, 0] = 5 * np.abs(members[:, 0])
        members /= np.linalg.norm(members, axis=1, keepdims=True)
        members = members[members[:, 0] >= math.cos(0.5)]
    elif queries.name.startswith("3-sparse"):
        members[:, 3:] = 0
        members = rng.permuted(members, axis=1)
    elif queries.name.startswith("64"):
        members = np.random.default_rng([0, 5]).standard_normal((64, 16))
    elif queries.rank == 1:
        members = np.ones((1, 1))
    members /= np.linalg.norm(members, axis=1, keepdims=True)
    for x in rng.standard_normal((5, queries.rank)):
        best, bound = (members @ x).max(), float(queries.support(x))
        assert best <= bound + 1e-9
        assert best >= bound - (1e-9 if len(members) <= 64 else 0.45 * bound)
    own = members[0]  # a member attains 1 at itself
    assert abs(float(queries.support(own)) - 1) < 1e-9


def test_the_residual_of_lemma_2():
    table = np.eye(4)
    assert generalization.residual(table, 4) == pytest.approx(1)
    table[3] = [0.6, 0.0, 0.0, 0.8]
    assert generalization.residual(table, 4) == pytest.approx(0.8)  # (0.6, 0, 0, 0.8) from e_1
    table[3] = [0.6, 0.8, 0.0, 0.0]
    assert generalization.residual(table, 4) < 1e-12
    assert generalization.residual(table, 2) == pytest.approx(0.6)  # its sine to e_2


@pytest.mark.parametrize("grams", [1, 2])
def test_sequences_follow_the_definitions(grams):
    problem = Problem(10, grams, vocabulary=4, width=4)
    tokens, answers = two_sided.sequences(problem, 10, 50, "train", most=10**6)
    golden = two_sided.mark_ngram_ends(tokens, grams)
    assert (golden.sum(dim=1) == 2).all() and golden[:, -1].all()
    first = golden.double().argmax(dim=1)
    assert (first < 10 - grams).all()
    assert (tokens.gather(1, first[:, None] + 1)[:, 0] == answers).all()
    if grams == 1:  # all X^i of the proof: query, filler, place
        pairs = {tuple(row) for row in tokens.tolist() if len(set(row)) == 2}
        assert len(pairs) >= 4 * 3 * 9
    else:
        constant = (tokens[:, -2] == tokens[:, -1]) & (tokens[:, 0] == tokens[:, -1])
        assert not constant.any()


def test_the_two_sided_layer_filters_values():
    problem = Problem(4, vocabulary=6, width=6)
    layer = two_sided.TwoSidedLayer(problem)
    layer.roots.data.uniform_(0, 1)
    tokens = torch.randint(6, (3, 5), generator=torch.Generator().manual_seed(0))
    x, weights = layer.embeddings[tokens], layer.attention(layer.keys(tokens))
    values = torch.zeros_like(x)
    for i in range(5):
        for lag in range(-2, 3):
            if 0 <= i - lag < 5:
                values[:, i] += layer.filters[lag + 2] * x[:, i - lag]
    torch.testing.assert_close(layer(tokens), torch.einsum("bt,btd->bd", weights, values))


def test_the_largest_ratio_is_that_of_attention_weights():
    layer = two_sided.TwoSidedLayer(Problem(6, 2, vocabulary=3, width=4))
    worst = 0.0
    for row in itertools.product(range(3), repeat=6):
        tokens = torch.tensor([row])
        weights = layer.attention(layer.keys(tokens))[0]
        query = row[-2:]
        for place in range(5):
            window = row[max(0, place - 1) : place + 1]
            if window == query or (len(window) == 1 and set(query) == set(window)):
                continue
            worst = max(worst, (weights[place] / weights[-1]).item())
    assert layer.largest_ratio() == pytest.approx(worst)
    assert layer.confusing().largest_ratio() >= 1 - 1e-9


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The whole command at small sizes: what it returned, its folder and record."""
    out = tmp_path_factory.mktemp("theory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(landmark, "BLOCKS", (32, 512))
        patch.setattr(landmark, "RANKS", (64,))
        patch.setattr(associative, "SIZES", associative.SIZES[:1])
        patch.setattr(associative, "LENGTHS", (16, 32))
        patch.setattr(report, "TRIALS", 2000)
        patch.setattr(report, "TRAINING_ROWS", 150)
        patch.setattr(report, "TABLES", 1)
        patch.setattr(generalization, "PROBLEMS", (Problem(5, vocabulary=5, width=6),))
        patch.setattr(generalization, "LENGTHS", (10, 40, 160))
        patch.setattr(
            generalization, "NGRAM_PROBLEMS", (Problem(8, 2, 4, 6, bounded=True, seed=1),)
        )
        patch.setattr(generalization, "NGRAM_LENGTHS", (16, 64))
        fallen = theory(out, Simulations(rows=20, trials=40))
    return fallen, out, json.loads((out / "theory.json").read_text())


def test_theory_writes_everything_and_every_claim_stands(run):
    fallen, out, record = run
    assert fallen == []
    filters = np.array(record["theorem_2"][0]["filter"])
    assert filters.argmax() == len(filters) // 2 - 1 and abs(filters.max() - 2) < 1e-3
    assert record["theorem_2"][0]["measured"][-1]["error"] < 1e-4
    for name in ("landmark_tradeoff.png", "theorem_2.svg", "theory.md"):
        assert (out / name).stat().st_size > 1000
    assert [claim["source"] for claim in record["claims"]] == list(SOURCES)
    for claim in record["claims"]:
        assert claim["holds"] and claim["controls"], claim["source"]
        assert all(control["fails"] for control in claim["controls"]), claim["source"]
    controls = sum(len(claim["controls"]) for claim in record["claims"])
    page = (out / "theory.md").read_text()
    assert page.count("| yes |") == len(record["claims"]) + controls and "**no**" not in page


def test_the_tables_rows_are_those_of_the_command():
    """The guide's table of theorems names each row of the command once."""
    part = GUIDE.split("\n## CAT: theorems, propositions and lemmas\n")[1].split("\n## ")[0]
    named = re.findall(r"^\|[^|]*\|([^|]*)\|", part, re.MULTILINE)[2:]
    rows = [row.strip() for cell in named for row in cell.split(";")]
    assert sorted(rows) == sorted(SOURCES)


@pytest.fixture(scope="module")
def small():
    """One layer of Theorem 2 at two decades of error, and the wrong ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_sided, "ERRORS", (1e-2, 1e-3))
        problems = (Problem(5, vocabulary=4, width=4),)
        return generalization.trained(problems, (10, 40), 30, generalization.distance_unit)


def test_what_gives_no_numbers_passes_no_check(small, monkeypatch):
    """A layer that is right at the trained length and NaN at longer ones; one that is NaN."""
    (case,), layer = small.cases, copy.deepcopy(small.runs[0].kept[-1])
    length, attention = layer.problem.length, layer.attention
    layer.attention = lambda keys: attention(keys) * (1 if keys.shape[1] <= length else math.nan)
    found = two_sided.measure(layer, (10,), 30)
    assert found.error == case.measured[-1].error and math.isnan(found.by_length[10][0])
    wrong = [dataclasses.replace(case, measured=[found])]
    for part, bound in enumerate((generalization.error_bound, generalization.off_map)):
        values = {n: both[part] for n, both in found.by_length.items()}
        assert not generalization.judge(wrong, lambda c, m, v=values: v, bound).passes
    everywhere = associative.everywhere
    monkeypatch.setattr(associative, "everywhere", lambda *a: everywhere(*a) * math.nan)
    assert not associative.causality(5).judge()["holds"]


def test_the_commands_seed_reaches_the_constructions(monkeypatch):
    seen = []
    for module, name in ((associative, "measure"), (copying, "success")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, own=own: seen.append(a[-1]) or own(*a))
    for claim in associative.theorem_1(2, 7):
        claim.judge()
    near = associative.seed_with_near_window(associative.SIZES[0], 3, 7)
    assert set(seen) == {7, 8, 9, near, *(7 + length for length in (16, 64, 256, 1024))}
    seen.clear()
    for claim in copying.theorem_4(2, 7):
        claim.judge()
    assert set(seen) == {7}


def test_a_layer_that_cannot_be_trained_is_one_line(monkeypatch):
    monkeypatch.setattr(two_sided, "_ROUNDS", 1)
    with pytest.raises(UserError, match=r"no layer \(4 .* L = 5\) reached .* give another --seed"):
        two_sided.train(Problem(5, vocabulary=4, width=4), 10)


def test_a_bound_that_scales_wrongly_is_refused(small):
    (case,) = small.cases
    slow = [dataclasses.replace(m, filter=1e-9 * m.error**0.5, by_length={}) for m in case.measured]
    case = dataclasses.replace(case, measured=slow)
    found = generalization.judge(
        [case], lambda c, m: {5: m.filter}, lambda c, m, _: generalization.filter_bound(c, m)
    )
    assert "0.50" in found.measured and not found.passes


def test_the_bounds_are_lemma_1s(small):
    """At ε₀ = 0.01, L = 5, W = 3, by hand: Γ, 1/s_q, D, M and the error."""
    (case,) = small.cases
    assert case.problem.reach == 3
    m = dataclasses.replace(case.measured[0], error=0.01 / case.unit)
    inverse = (2 - 0.05) / 0.96
    assert generalization.gamma(case, m) == pytest.approx(0.01 / 0.96)
    own = max(1.02 * inverse - 2, 0.08 + 0.01 * inverse)
    far = own + 3.5 * 0.01 * inverse
    assert generalization.filter_bound(case, m) == pytest.approx(far)
    mass = 98 * 0.01 / 0.96
    off = mass / (2 + mass)
    assert generalization.off_map(case, m, 100) == pytest.approx(off)
    expected = (3 + far) * off + (far + 0.015 * inverse) / 2
    assert generalization.error_bound(case, m, 100) == pytest.approx(expected)


def test_a_claim_needs_a_control_and_stands_only_if_that_fails():
    def check(number):
        return Verdict(f"{number}", number > 0)

    def judged(right, wrong):
        return Claim("T", "s", "c", check, right, wrong).judge()

    assert stands(judged(1, {"wrong": -1}))
    weak = judged(1, {"wrong": -1, "also wrong": 2})
    assert weak["holds"] and not stands(weak)
    assert "control fails: NO (also wrong: 2)" in describe(weak)
    assert not stands(judged(-1, {"wrong": -1}))
    with pytest.raises(ValueError, match="T: a claim needs a negative control"):
        judged(1, {})


def test_the_command_fails_with_the_rows_that_do_not_stand(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "theory", lambda *_: ["Lemma 9", "Theorem 0"])
    monkeypatch.setattr("sys.argv", ["eval.recall", "theory", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: theory: do not hold or have a control that passes: Lemma 9; Theorem 0"
    ]
