"""The perplexity loop against a few plain lines, and what it promises about tokens and windows."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from cat_lm.errors import UserError
from eval import perplexity
from eval.perplexity import score_tokens, standard_error, token_nlls
from tests.finished_runs import tiny_model

VOCABULARY = 60


@pytest.fixture(scope="module")
def model():
    return tiny_model(VOCABULARY)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, VOCABULARY, 101)


def dense_nlls(model, tokens: np.ndarray, length: int) -> list[float]:
    """One window at a time, all logits at once, in fp64."""
    found = []
    for start in range(0, len(tokens) - 1, length):
        window = torch.tensor(tokens[start : start + length + 1])
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0].double()
        picked = logits.log_softmax(-1)[range(len(window) - 1), window[1:]]
        found += (-picked).tolist()
    return found


@pytest.mark.parametrize("length", [1, 7, 20, 33, 100])
@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
def test_agrees_with_dense_logits(model, tokens, length, batch_tokens):
    nlls = token_nlls(model, tokens, length, batch_tokens=batch_tokens)
    assert len(nlls) == len(tokens) - 1, "every token after the first is scored, once"
    np.testing.assert_allclose(nlls, dense_nlls(model, tokens, length), atol=2e-5)


def test_chunks_of_logits_change_nothing(model, tokens, monkeypatch):
    whole = token_nlls(model, tokens, 20)
    monkeypatch.setattr(perplexity, "LOGIT_ELEMENTS", 3 * VOCABULARY)
    np.testing.assert_allclose(token_nlls(model, tokens, 20), whole, atol=1e-6)


def test_logits_of_a_window_never_exist_at_once(model, tokens, monkeypatch):
    monkeypatch.setattr(perplexity, "LOGIT_ELEMENTS", 8 * VOCABULARY)
    rows = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    token_nlls(model, tokens, 100)
    handle.remove()
    assert max(rows) == 8  # the check of the head makes 8 rows of its own


def test_stock_gpt_neox_is_scored_too(tokens):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = GPTNeoXForCausalLM(config).eval()
    np.testing.assert_allclose(
        token_nlls(model, tokens, 25), dense_nlls(model, tokens, 25), atol=2e-5
    )


def test_score_sums_up_in_the_stated_units(model, tokens):
    score = score_tokens(model, tokens, 20, num_bytes=250)
    expected = sum(dense_nlls(model, tokens, 20))
    assert score.nll == pytest.approx(expected, rel=1e-5)
    assert score.tokens == 100
    assert score.loss == pytest.approx(expected / 100, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(expected / 100), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2) / 250, rel=1e-5)
    assert (score.groups, score.group_kind) == (5, "windows")


def test_uniform_model_has_the_vocabulary_as_its_perplexity(model, tokens):
    uniform = tiny_model(VOCABULARY)
    with torch.no_grad():
        uniform.get_output_embeddings().weight.zero_()
    score = score_tokens(uniform, tokens, 10, num_bytes=100)
    assert score.perplexity == pytest.approx(VOCABULARY, rel=1e-5)
    assert score.standard_error == pytest.approx(0, abs=1e-6)


def test_standard_error_is_over_documents_where_there_are_some(model, tokens):
    documents = tokens.copy()
    documents[[29, 64, 100]] = 0  # ends of three documents
    score = score_tokens(model, documents, 20, num_bytes=1, eod_id=0)
    assert (score.groups, score.group_kind) == (3, "documents")
    nlls = token_nlls(model, documents, 20)
    parts = [nlls[:29], nlls[29:64], nlls[64:]]  # nlls[i] belongs to token i + 1
    expected = standard_error(nlls, np.repeat([0, 1, 2], [len(part) for part in parts]))[0]
    assert score.standard_error == pytest.approx(expected, rel=1e-6)


def test_standard_error_of_equal_groups_is_the_textbook_one():
    means = np.array([1.0, 2.0, 4.0, 5.5])
    error, groups = standard_error(np.repeat(means, 10), np.repeat(np.arange(4), 10))
    assert groups == 4
    assert error == pytest.approx(means.std(ddof=1) / 2)
    assert math.isnan(standard_error(np.ones(5), np.zeros(5))[0])


def test_bad_input_is_named(model, tokens):
    with pytest.raises(UserError, match="length 101: the text has 101 tokens, 102"):
        token_nlls(model, tokens, 101)
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


def test_memory_stays_small_at_a_long_length():
    """8,192 tokens × 50,304 logits in fp32 are 1.6 GiB; a process of its own shows the peak."""
    code = """
import resource
import numpy as np
from tests.finished_runs import tiny_model
from eval.perplexity import token_nlls
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
model = tiny_model(50304)
token_nlls(model, np.arange(100), 50)
before = peak()
token_nlls(model, np.arange(8193), 8192)
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 400, "MiB"
