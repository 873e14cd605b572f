"""The chunked cross-entropy of the head against the dense one, and what the model makes of it."""

import pytest
import torch
from torch.nn import functional as F

from cat_lm.ops.loss import linear_cross_entropy as loss_module
from cat_lm.ops.loss.linear_cross_entropy import LanguageModelHead, linear_cross_entropy
from tests.unit.tiny_models import (
    cat_model,
    random_ids,
    stock_model,
    with_weights_of,
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """7 positions a chunk, so that the last chunk of the tests is not full."""
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 7 * 97)


def case(dtype=torch.float32, ignored=0.3):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 20, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(97, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 97, (2, 20), generator=generator)
    labels[torch.rand(2, 20, generator=generator) < ignored] = -100
    return hidden, weight, labels


def dense(hidden, weight, labels):
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(logits.float(), labels.flatten(), reduction="sum")


def check_against_dense(hidden, weight, labels, tolerance):
    ours, theirs = linear_cross_entropy(hidden, weight, labels), dense(hidden, weight, labels)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    pairs = zip(
        torch.autograd.grad(ours * 0.7, (hidden, weight)),
        torch.autograd.grad(theirs * 0.7, (hidden, weight)),
        strict=True,
    )
    for gradient, expected in pairs:
        assert gradient.dtype == expected.dtype
        scale = expected.abs().max().clamp(min=1e-30)
        assert (gradient - expected).abs().max() <= tolerance * scale


def test_fp32():
    check_against_dense(*case(), tolerance=1e-6)


def test_bfloat16():
    check_against_dense(*case(torch.bfloat16), tolerance=2e-2)


def test_fp64_gradcheck():
    hidden, weight, labels = case(torch.float64)
    call = lambda hidden, weight: linear_cross_entropy(hidden, weight, labels)  # noqa: E731
    assert torch.autograd.gradcheck(call, (hidden, weight), fast_mode=True)


def test_autocast():
    hidden, weight, labels = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    expected = dense(hidden.bfloat16(), weight.bfloat16(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0.0)
    gradient, expected = (torch.autograd.grad(value, weight)[0] for value in (loss, expected))
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0.02 * float(expected.max()))


def test_gradient_of_the_weight_is_summed_in_fp32():
    """In bf16 a sum over many chunks would stop growing once it is 256 times its terms."""
    hidden = torch.ones(7 * 600, 1, dtype=torch.bfloat16)
    weight = torch.zeros(97, 1, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(7 * 600, dtype=torch.long)).backward()
    assert float(weight.grad[0]) == pytest.approx(-4200 * 96 / 97, rel=0.01)


def test_nothing_scored():
    hidden, weight, labels = case(ignored=2.0)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_extreme_logits_stay_finite():
    hidden, weight, labels = case()
    check_against_dense((hidden.detach() * 1e4).requires_grad_(), weight, labels, 1e-5)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_the_wanted_gradient(wanted):
    hidden, weight, labels = case()
    (weight if wanted == "hidden" else hidden).requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert (hidden.grad is not None) == (wanted == "hidden")
    assert (weight.grad is not None) == (wanted == "weight")


def test_backward_twice():
    hidden, weight, labels = case()
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight)[0])


def test_when_logits_are_returned():
    model, ids = cat_model(), random_ids(2, 10)
    assert model(ids, labels=ids).logits.shape == (2, 10, 97)
    assert model(ids, labels=ids, skip_logits=True).logits is None
    model.train()  # as TRL reads them
    assert model(ids, labels=ids).logits.shape == (2, 10, 97)
    assert model(ids).logits.shape == (2, 10, 97)
    assert model(ids, logits_to_keep=3).logits.shape == (2, 3, 97)
    assert model(ids, labels=ids).past_key_values is None


def test_all_labels_ignored_gives_zero_loss_and_gradients():
    model, ids = cat_model(), random_ids(2, 10)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_labels_that_do_not_fit():
    model, ids = cat_model(), random_ids(2, 10)
    with pytest.raises(ValueError, match=r"labels are \[2, 9\]"):
        model(ids, shift_labels=ids[:, 1:])


def test_loss_function_that_is_set_is_called():
    model, ids = cat_model(), random_ids(2, 10)
    expected = model(ids, labels=ids).loss
    usual = model.loss_function
    model.loss_function = lambda **how: 2 * usual(**how)
    torch.testing.assert_close(model(ids, labels=ids).loss, 2 * expected)


def test_tied_embeddings_get_both_gradients():
    stock = stock_model(tie_word_embeddings=True)
    model, ids = with_weights_of(stock, tie_word_embeddings=True), random_ids(2, 20)
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
