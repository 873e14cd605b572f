"""LoRA by peft on the projections, and quantized projections under convolutions."""

from __future__ import annotations

import sys
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from tests.distributed.ranks import run_on_ranks
from tests.tiny_models import LLAMA_VARIANTS, VARIANTS, cat_model, each_model, random_ids

IDS = random_ids(2, 24)


def projections(model):
    """Return the linear layers before the convolution, each by its module and its name."""
    names = ("query_key_value", "q_proj", "k_proj", "v_proj")
    return [(parent, n) for parent in model.modules() for n in names if hasattr(parent, n)]


def trained_adapter(model, **options):
    """The model with LoRA after three steps of SGD on the adapter alone."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    )
    own = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(own, lr=0.5)
    losses = []
    for _ in range(3):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    return adapted.eval()


@each_model()
def test_lora_trains_saves_reloads_and_merges(variant, tmp_path):
    model = cat_model(**variant)
    model.save_pretrained(tmp_path / "base")
    before = model(IDS).logits.detach()
    names = {name for _, name in projections(model)}
    adapted = trained_adapter(model, target_modules=sorted(names))
    targets = {name.split(".lora")[0] for name, _ in adapted.named_parameters() if "lora" in name}
    assert {name.rpartition(".")[2] for name in targets} == names
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
    assert not torch.allclose(expected, before, atol=1e-3)

    adapted.save_pretrained(tmp_path / "adapter")
    base = type(model).from_pretrained(tmp_path / "base")
    reloaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(reloaded(input_ids=IDS).logits, expected, rtol=0, atol=1e-6)
        merged = reloaded.merge_and_unload()
        difference = (merged(IDS).logits - expected).abs().max() / expected.abs().max()
    assert difference <= 1e-5
    assert all(type(getattr(parent, name)) is nn.Linear for parent, name in projections(merged))


@torch.no_grad()
@each_model("none")
def test_replaced_linear_layers_keep_the_convolution(variant):
    """As weight-only quantisation does: int8 rows with a scale each."""

    class Int8Linear(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
            self.rows = (linear.weight / self.scale).round().to(torch.int8)
            self.bias = linear.bias

        def forward(self, x):
            return nn.functional.linear(x, self.rows * self.scale, self.bias)

    def quantize(model):
        for parent, name in projections(model):
            setattr(parent, name, Int8Linear(getattr(parent, name)))

    check_quantized(variant, quantize)


def check_quantized(variant, quantize):
    """The model's logits stay far nearer to it than those of a model without its filters are."""
    model, plain = cat_model(**variant), cat_model(**variant)
    plain.load_state_dict(model.state_dict())
    for name, filters in plain.named_parameters():
        if name.endswith("_filter"):
            filters.zero_()
    expected = model(IDS).logits
    filters = {n: p.clone() for n, p in model.named_parameters() if n.endswith("_filter")}
    quantize(model)
    error = (model(IDS).logits - expected).abs().max()
    assert 0 < error < 0.05 * (plain(IDS).logits - expected).abs().max()
    weights = dict(model.named_parameters())
    assert filters and all(weights[name].equal(tensor) for name, tensor in filters.items())


# Not among the packages: transformers loads it in every command where it finds it.
TORCHAO = Path(sys.prefix) / "torchao"


@torch.no_grad()
def quantized_by_torchao(ranks) -> list[str]:
    """Return the types of the projections' weights after torchao's weight-only int8."""
    sys.path.append(str(TORCHAO))
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    kinds = set()

    def quantize(model):
        quantize_(model, Int8WeightOnlyConfig())
        weights = (getattr(parent, name).weight for parent, name in projections(model))
        kinds.update(type(weight).__name__ for weight in weights)

    for name, variant in (VARIANTS | LLAMA_VARIANTS).items():
        if not name.endswith("none"):
            check_quantized(variant, quantize)
    return sorted(kinds)


@pytest.mark.skipif(not TORCHAO.is_dir(), reason=f"torchao is not in {TORCHAO.name}/ of .venv")
def test_torchao_leaves_the_convolution_in_place():
    assert run_on_ranks(quantized_by_torchao, 1) == [["Int8Tensor"]]
