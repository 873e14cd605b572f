"""The perplexity loop against a few plain lines, and what it promises about tokens and windows."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cat_lm.core.errors import UserError
from eval.length_sweep import perplexity
from eval.length_sweep.perplexity import (
    document_spans,
    position_curve,
    score_tokens,
    span_windows,
)
from tests.finished_runs import tiny_model

VOCABULARY = 60


@pytest.fixture(scope="module")
def model():
    return tiny_model(VOCABULARY)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, VOCABULARY, 101)


def token_nlls(model, tokens: np.ndarray, length: int, stride: int | None = None, **options):
    windows = span_windows(0, len(tokens) - 1, length, stride)
    return perplexity.token_nlls(model, tokens, windows, **options)


def dense_nlls(model, tokens: np.ndarray, length: int, stride: int | None = None) -> list[float]:
    """One window at a time, all logits at once, in fp64."""
    found: list[float] = []
    while len(found) < len(tokens) - 1:
        # Each window ends `stride` tokens after what is scored, the first one after `length`.
        stop = min(len(found) + (stride if found and stride else length), len(tokens) - 1)
        start = max(0, stop - length)
        window = torch.tensor(tokens[start : stop + 1])
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0].double()
        picked = logits.log_softmax(-1)[range(len(window) - 1), window[1:]]
        found += (-picked)[len(found) - start :].tolist()
    return found


@pytest.mark.parametrize(("length", "stride"), [(1, None), (7, None), (20, 7), (33, 1), (100, 30)])
@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
def test_agrees_with_dense_logits(model, tokens, length, stride, batch_tokens):
    nlls = token_nlls(model, tokens, length, stride, batch_tokens=batch_tokens)
    assert len(nlls) == len(tokens) - 1, "every token after the first is scored, once"
    np.testing.assert_allclose(nlls, dense_nlls(model, tokens, length, stride), atol=2e-5)


@given(count=st.integers(1, 100), length=st.integers(1, 40), stride=st.none() | st.integers(1, 50))
def test_every_token_is_scored_once_and_windows_are_full(count, length, stride):
    windows = span_windows(5, 5 + count, length, stride)
    scored = [i for window in windows for i in range(window.first, window.stop)]
    assert scored == list(range(5, 5 + count))
    step = min(stride or length, length)
    for window in windows:
        assert window.stop - window.start == min(length, count)
        if window is not windows[0]:
            assert window.stop - window.first <= step
            assert window.first - window.start >= length - step


def test_documents_are_scored_alone(model, tokens):
    documents = tokens.copy()
    documents[[0, 29, 64]] = 0  # the ends of documents; the last one has none
    spans = document_spans(documents, 0)
    assert spans == [(0, 29), (29, 64), (64, 100)]
    score = score_tokens(
        model, documents, 20, num_bytes=1, num_words=1, eod_id=0, per_document=True
    )
    parts = [dense_nlls(model, documents[a : b + 1], 20) for a, b in spans]
    assert score.nll == pytest.approx(sum(map(sum, parts)), rel=1e-5)
    whole = score_tokens(model, documents, 20, num_bytes=1, num_words=1, eod_id=0)
    assert whole.tokens == score.tokens == 100
    assert abs(whole.nll - score.nll) > 0.1, "the tokens before a document were seen"
    assert (score.groups, score.group_kind) == (3, "documents")
    documents[100] = 0
    assert document_spans(documents, 0) == spans, "the end of the last document is scored too"


def test_loss_by_position_is_the_mean_over_windows(model, tokens):
    windows = span_windows(0, 100, 20)
    nlls = token_nlls(model, tokens, 20)
    curve = position_curve(nlls, windows)
    assert [part["start"] for part in curve[:6]] == [1, 2, 3, 4, 6, 8]
    assert curve[0]["tokens"] == 5
    assert curve[0]["loss"] == pytest.approx(nlls[::20].mean(), rel=1e-6)
    last = curve[-1]
    assert last["start"] <= 20 < last["stop"]
    by_row = nlls.reshape(5, 20)[:, last["start"] - 1 :]
    assert last["loss"] == pytest.approx(by_row.mean(), rel=1e-6)
    assert sum(part["tokens"] for part in curve) == 100
    # With a stride, only what a window scores counts, at its place in the window.
    curve = position_curve(token_nlls(model, tokens, 20, 5), span_windows(0, 100, 20, 5))
    assert sum(part["tokens"] for part in curve if part["start"] >= 16) == 5 + 16 * 5


def test_chunks_of_logits_change_nothing(model, tokens, monkeypatch):
    whole, rows = token_nlls(model, tokens, 100), []
    monkeypatch.setattr(perplexity, "LOGIT_ELEMENTS", 8 * VOCABULARY)
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    chunked = token_nlls(model, tokens, 100)
    handle.remove()
    np.testing.assert_allclose(chunked, whole, atol=1e-6)
    assert max(rows) == 8  # The check of the head makes 8 rows of its own.


def test_only_scored_tokens_get_logits(model, tokens):
    rows = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    token_nlls(model, tokens, 50, 5, batch_tokens=1)
    handle.remove()
    assert rows[2:] == [50] + [5] * 10, "after the two of the head's check"


def test_score_sums_up_in_the_stated_units(model, tokens):
    score = score_tokens(model, tokens, 20, num_bytes=250, num_words=40)
    expected = sum(dense_nlls(model, tokens, 20))
    assert score.nll == pytest.approx(expected, rel=1e-5)
    assert score.tokens == 100
    assert score.loss == pytest.approx(expected / 100, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(expected / 100), rel=1e-4)
    assert score.word_perplexity == pytest.approx(math.exp(expected / 40), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / 250, rel=1e-5)
    assert (score.groups, score.group_kind) == (5, "windows")


def test_uniform_model_has_the_vocabulary_as_its_perplexity(model, tokens):
    uniform = tiny_model(VOCABULARY)
    with torch.no_grad():
        uniform.get_output_embeddings().weight.zero_()
    score = score_tokens(uniform, tokens, 10, num_bytes=100, num_words=9)
    assert score.perplexity == pytest.approx(VOCABULARY, rel=1e-5)
    assert score.standard_error == pytest.approx(0, abs=1e-6)


def test_standard_error_is_over_documents_where_there_are_some(model, tokens):
    documents = tokens.copy()
    documents[[25, 50, 75, 100]] = 0  # ends of four documents, equally long
    score = score_tokens(model, documents, 20, num_bytes=1, num_words=1, eod_id=0)
    assert (score.groups, score.group_kind) == (4, "documents")
    # nlls[i] belongs to token i + 1; of equal groups the error is the textbook's.
    means = token_nlls(model, documents, 20).reshape(4, 25).mean(axis=1, dtype=np.float64)
    assert score.standard_error == pytest.approx(means.std(ddof=1) / 2, rel=1e-6)
    assert score.document_tokens == [25] * 4
    assert score.document_nlls == pytest.approx((means * 25).tolist())
    single = score_tokens(model, tokens, 100, num_bytes=1, num_words=1)
    assert math.isnan(single.standard_error)


def test_token_of_another_tokenizer_is_named(model):
    with pytest.raises(UserError, match=f"vocabulary of {VOCABULARY}"):
        token_nlls(model, np.full(50, VOCABULARY), 10)


def test_model_that_changes_its_logits_after_the_head_is_refused(tokens):
    class Capped(type(tiny_model(VOCABULARY))):
        def forward(self, *inputs, **options):
            output = super().forward(*inputs, **options)
            output.logits = 0.5 * output.logits
            return output

    capped = tiny_model(VOCABULARY)
    capped.__class__ = Capped
    with pytest.raises(UserError, match="cannot be computed in chunks"):
        token_nlls(capped, tokens, 10)


@pytest.mark.long
def test_memory_stays_small_at_a_long_length():
    """8,192 tokens × 12,576 logits in fp32 are 393 MiB, attention maps of 2 heads 0.5 GiB.

    The text has two documents in one window and two windows of unequal length, as those could
    bring masks that make attention quadratic. A process of its own shows the peak.
    """
    code = """
import resource
import numpy as np
from tests.finished_runs import tiny_model
from cat_lm.pretrained.memory import forward_bytes
from eval.length_sweep.perplexity import Window, token_nlls
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
model = tiny_model(12576)
token_nlls(model, np.arange(100), [Window(0, 0, 99)])
before = peak()
tokens = np.arange(8193)
tokens[3000] = 0
token_nlls(model, tokens, [Window(0, 0, 8192)])
print(peak() - before, forward_bytes(model, 1, 8192) / 2**20)
token_nlls(model, tokens, [Window(0, 0, 5000), Window(5000, 5000, 8192)], batch_tokens=10000)
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    used, estimate, padded = map(float, result.stdout.split())
    assert used < 250, "MiB"
    assert padded < 250, "MiB"
    assert used < 1.3 * estimate, "the estimate is not too low"
