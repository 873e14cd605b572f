"""Recall in real text: slices of a text against a brute force, counts, and losses of a model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.opening import open_verified
from eval.language import recalled
from eval.length_sweep.perplexity import span_windows, token_nlls


def brute_force(tokens, windows, counts):
    """Position -> the slices that it is in, by looking at every earlier place of its window."""
    found = {}
    for window in windows:
        for i in range(window.first, window.stop):
            earlier = [j for j in range(window.start, i) if tokens[j] == tokens[i]]
            hit = any(tokens[j + 1] == tokens[i + 1] for j in earlier)
            rare = hit and counts[i] <= 3
            number = sum(counts[i] >= edge for edge in (1, 4, 16, 64))
            last = hit and tokens[earlier[-1] + 1] == tokens[i + 1]
            found[i] = {"recall" if rare else "rest", *([recalled.BINS[number]] if hit else [])}
            found[i] |= {"last"} if last else set()
    return found


@pytest.mark.parametrize(("length", "stride"), [(8, 4), (5, 2), (1, 1), (64, 32), (300, 150)])
def test_slices_are_those_of_a_brute_force(length, stride):
    random = np.random.default_rng(length)
    tokens = random.integers(0, 6, 161)
    counts = random.choice([0, 1, 3, 4, 15, 16, 63, 64, 900], 160)
    # Documents, and tokens between them that nobody scores.
    spans = [(0, 1), (2, 60), (61, 64), (70, 160)]
    windows = [w for span in spans for w in span_windows(*span, length, stride)]
    found = recalled.assign_slices(tokens, windows, counts, vocabulary=6)
    expected = brute_force(tokens, windows, counts)
    for name, part in found.items():
        assert set(np.flatnonzero(part)) == {i for i, own in expected.items() if name in own}
    assert (found["recall"].any() and found["last"].any()) == (length > 1)
    assert found["rest"].sum() + found["recall"].sum() == sum(b - a for a, b in spans)


def test_a_pair_before_the_window_is_no_hit():
    tokens = np.array([1, 2, 3, 4, 1, 2])
    whole, half = (span_windows(0, 5, length, 2) for length in (5, 4))
    zeros = np.zeros(5, np.int64)
    assert np.flatnonzero(recalled.assign_slices(tokens, whole, zeros, 5)["0"]).tolist() == [4]
    assert not recalled.assign_slices(tokens, half, zeros, 5)["0"].any(), "its pair is at 0"


def test_counts_of_pairs_in_parts_are_those_of_the_whole():
    random = np.random.default_rng(0)
    train, tokens = random.integers(0, 9, 500), random.integers(0, 10, 80)
    chunks = [train[start : start + 8] for start in range(0, 499, 7)]
    found = recalled.count_pairs(tokens, chunks, 10)
    pairs = list(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
    wanted = list(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    assert found.pairs.tolist() == [pairs.count(pair) for pair in wanted]
    assert found.first.tolist() == [sum(a == x for x, _ in pairs) for a, _ in wanted]
    assert found.second.tolist() == [sum(b == y for _, y in pairs) for _, b in wanted]
    assert found.total == 499


def test_parts_of_a_corpus_share_a_token(tiny_corpus, monkeypatch):
    monkeypatch.setattr(recalled, "_CHUNK", 100)
    corpus = open_verified(tiny_corpus, "train")
    parts = list(recalled.overlapping(corpus))
    assert [len(part) for part in parts[:-1]] == [101] * (len(parts) - 1)
    whole = np.concatenate([parts[0], *(part[1:] for part in parts[1:])])
    assert (whole == corpus.tokens(0, corpus.num_tokens)).all()


def test_the_bigram_model_is_a_distribution():
    train = np.random.default_rng(1).integers(0, 7, 400)
    shares = []
    for token in range(7):
        counts = recalled.count_pairs(np.array([3, token]), [train], 7)
        shares.append(math.exp(-counts.bigram_nlls()[0]))
    assert sum(shares) == pytest.approx(1)


def test_slices_of_a_model_are_its_losses(long_corpus, tmp_path):
    from cat_lm.model.hf.configuration import CatGlaConfig
    from cat_lm.model.hf.modeling_recurrent import CatGlaForCausalLM

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}
    model = CatGlaForCausalLM(CatGlaConfig(vocab_size=257, intermediate_size=16, **shape))
    model.eval().save_pretrained(tmp_path / "model")
    given = (tmp_path / "model", "float32", "cpu", long_corpus, 3, 200)
    found, longer = (recalled.score_recalled(*given, length, 0) for length in (16, 128))
    stream, _, spans = recalled._text(long_corpus, 3, 200, 0)
    windows = [w for span in spans for w in span_windows(*span, 16, 8)]
    nlls = token_nlls(model, stream.tokens, windows)
    scored = np.concatenate([nlls[start:stop] for start, stop in spans])
    parts = [found[name]["documents"] for name in ("recall", "rest")]
    assert sum(sum(part["tokens"]) for part in parts) == len(scored) == 600
    total = sum(sum(part["nats"]) for part in parts if part["nats"])
    assert total == pytest.approx(float(scored.sum()), rel=1e-5)
    hits = [sum(sum(x[name]["documents"]["tokens"]) for name in recalled.BINS)
            for x in (found, longer)]  # fmt: skip
    assert 0 < hits[0] < hits[1], "more is seen in a longer window"
    with pytest.raises(UserError, match=r"--skip-tokens 1000000: .*; skip fewer"):
        recalled.score_recalled(*given, 16, 10**6)
