"""The language model's loss: gradients in fp32, returned logits, heads that were changed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cat_lm.ops.loss import linear_cross_entropy as loss_module
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead, linear_cross_entropy
from tests.tiny_models import SIZES, cat_model, random_ids, stock_model


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """7 positions a chunk, so that the last chunk of the tests is not full."""
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 7 * 97)


def test_gradient_of_the_weight_is_summed_in_fp32():
    """In bf16 a sum over many chunks would stop growing once it is 256 times its terms."""
    hidden = torch.ones(7 * 600, 1, dtype=torch.bfloat16)
    weight = torch.zeros(97, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(7 * 600, dtype=torch.long)).backward()
    assert float(weight.grad[0]) == pytest.approx(-4200 * 96 / 97, rel=0.01)


def test_when_logits_are_returned():
    model, ids = cat_model(), random_ids(2, 10)
    assert model(ids, labels=ids).logits.shape == (2, 10, 97)
    assert model(ids, labels=ids, skip_logits=True).logits is None
    model.train()  # as TRL reads them
    assert model(ids, labels=ids).logits.shape == (2, 10, 97)
    assert model(ids).logits.shape == (2, 10, 97)
    assert model(ids, logits_to_keep=3).logits.shape == (2, 3, 97)
    assert model(ids, labels=ids).past_key_values is None


def test_labels_that_do_not_fit():
    model, ids = cat_model(), random_ids(2, 10)
    with pytest.raises(ValueError, match=r"labels are \[2, 9\]"):
        model(ids, shift_labels=ids[:, 1:])


def test_tied_embeddings_get_both_gradients():
    stock, model = stock_model(tie_word_embeddings=True), cat_model()
    model = type(model)(type(model.config)(**SIZES, tie_word_embeddings=True)).eval()
    model.load_state_dict(stock.state_dict(), strict=False)  # filters stay the identity
    ids = random_ids(2, 20)
    assert model.lm_head.weight is model.gpt_neox.embed_in.weight
    model(ids, labels=ids).loss.backward()
    stock(ids, labels=ids).loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad, stock.lm_head.weight.grad)


def test_a_resized_head_keeps_the_loss():
    model, ids = cat_model(), random_ids(2, 10)
    model.resize_token_embeddings(105)
    assert isinstance(model.lm_head, LanguageModelHead)
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)


def test_a_wrapped_head_is_scored_by_its_logits():
    model, ids = cat_model(), random_ids(2, 10)
    head = model.lm_head
    model.lm_head = torch.nn.Sequential(head, torch.nn.Tanh())
    expected = F.cross_entropy(head(model.gpt_neox(ids)[0])[:, :-1].tanh().mT, ids[:, 1:])
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)
