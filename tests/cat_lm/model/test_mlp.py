"""When GPT-NeoX's MLP computes its bias and GELU in one operator, and when its modules do."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch import nn

from cat_lm.model.blocks import mlp
from tests.tiny_models import cat_model, random_ids, stock_model

IDS = random_ids(2, 24)


@pytest.fixture
def fused(monkeypatch):
    """The dtypes of the products that the operator was given."""
    given = []

    def counted(product, bias):
        given.append(product.dtype)
        return called(product, bias)

    called = mlp.gelu_with_bias
    monkeypatch.setattr(mlp, "gelu_with_bias", counted)
    return given


def trained(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss and the gradients of a training step."""
    loss = model.train()(input_ids=IDS, labels=IDS).loss
    return loss, torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


def assert_near(found, wanted, bound: float) -> None:
    assert found[0].dtype == wanted[0].dtype
    for one, other in zip(found[1], wanted[1], strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= bound * other.abs().max() + 1e-9


def test_training_computes_as_transformers_and_evaluation_has_its_bits(fused):
    model, stock = cat_model(conv_type="none"), stock_model()
    stock.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, stock(IDS).logits)
    assert torch.equal(model(IDS).logits, stock(IDS).logits)  # Also where parameters are learned.
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    with torch.no_grad():
        model.train()(IDS)
    assert fused == []
    found, wanted = trained(model), trained(stock)
    assert fused == 2 * [torch.float32]
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
    assert_near(found, wanted, 1e-5)


@pytest.mark.parametrize("how", ["bf16 weights", "autocast"])
def test_half_precision_keeps_its_dtypes(fused, monkeypatch, how):
    model = cat_model()
    if how == "bf16 weights":
        model = model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = trained(model)
        assert fused == 2 * [torch.bfloat16]
        monkeypatch.setattr(mlp, "_is_one_operator", lambda *_: False)
        wanted = trained(model)
    assert len(fused) == 2
    assert_near(found, wanted, 0.05)


def with_hook(model: nn.Module) -> nn.Module:
    seen = model.gpt_neox.layers[0].mlp.dense_h_to_4h
    seen.register_forward_hook(lambda *_: model.seen.append(_[2].detach()))
    model.seen = []
    return model


def with_hook_on_activation(model: nn.Module) -> nn.Module:
    model.gpt_neox.layers[0].mlp.act.register_full_backward_hook(lambda *_: None)
    return model


def with_adapter(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["dense_h_to_4h"], layers_to_transform=[0])
    return peft.get_peft_model(model, config)


def with_other_linear(model: nn.Module) -> nn.Module:
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.gpt_neox.layers[0].mlp.dense_h_to_4h.__class__ = Doubled
    return model


def with_other_forward(model: nn.Module) -> nn.Module:
    linear = model.gpt_neox.layers[0].mlp.dense_h_to_4h
    linear.forward = lambda x: 2 * nn.functional.linear(x, linear.weight, linear.bias)
    return model


def without_bias(model: nn.Module) -> nn.Module:
    model.gpt_neox.layers[0].mlp.dense_h_to_4h.register_parameter("bias", None)
    return model


def with_other_activation(model: nn.Module) -> nn.Module:
    model.gpt_neox.layers[0].mlp.act = nn.ReLU()
    return model


CHANGES = [
    *(with_hook, with_hook_on_activation, with_adapter, with_other_linear, with_other_forward),
    *(without_bias, with_other_activation),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_modules_compute_themselves(fused, monkeypatch, change):
    """The first layer's are changed, and the second one's are not."""
    model = change(copy.deepcopy(cat_model()))
    found = trained(model)
    assert len(fused) == 1
    monkeypatch.setattr(mlp, "_is_one_operator", lambda *_: False)
    wanted = trained(model)
    assert len(fused) == 1
    assert_near(found, wanted, 1e-4)
    if change is with_hook:
        torch.testing.assert_close(*model.seen, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [{"canon": "ACD"}, {"hidden_act": "gelu_new"}, {"hidden_act": "relu"}, {"dtype": "float64"}],
    ids=str,
)
def test_other_models_compute_by_their_modules(fused, fields):
    model = cat_model(**fields)
    if "dtype" in fields:
        model = model.double()
    trained(model)
    assert fused == []


def test_adapter_of_the_first_matrix_learns(fused):
    config = peft.LoraConfig(r=4, target_modules=["dense_h_to_4h"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(cat_model(), config).train()
    own = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses, optimizer = [], torch.optim.SGD(own, lr=0.5)
    for _ in range(3):
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[2] < losses[0] and fused == []


def test_derivatives_of_torch_func_are_those_of_the_modules(fused, monkeypatch):
    layer = cat_model(conv_type="none").gpt_neox.layers[0].mlp.train()
    x, tangent = torch.randn(2, 2, 3, 32)

    def derivatives():
        slope = torch.func.grad(lambda x: layer(x).square().sum())
        return *torch.func.jvp(layer, (x,), (tangent,)), slope(x), torch.func.vmap(slope)(x)

    found = derivatives()
    assert fused == []
    monkeypatch.setattr(mlp, "_is_one_operator", lambda *_: False)
    assert all(map(torch.equal, found, derivatives()))
