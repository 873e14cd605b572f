"""The recall mixers on a CUDA GPU: as on the CPU; flash-linear-attention's operators as torch's."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from eval.recall.mixers import Setting, make_mixer, mixer_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="fla-core is not installed"
)


def layer_and_input(specification: str, time: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = make_mixer(specification).build(Setting(64, layer=1, num_layers=2)).eval()
    return layer, torch.randn(3, time, 64)


def results(layer: torch.nn.Module, x: torch.Tensor, device: str) -> list[torch.Tensor]:
    """Output and gradients, on the CPU."""
    layer, x = layer.to(device), x.to(device).requires_grad_()
    y = layer(x)
    weights = torch.linspace(-1, 2, y.numel(), device=device).view_as(y)
    found = torch.autograd.grad((y * weights).sum(), (x, *layer.parameters()))
    return [s.detach().cpu() for s in (y, *found)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6, f"tensor {index}"


@pytest.mark.parametrize("time", [1, 67])
@pytest.mark.parametrize("name", mixer_names())
def test_mixers_are_the_same_on_the_gpu(name, time):
    layer, x = layer_and_input(name, time)
    wanted = results(layer, x, "cpu")
    same(results(layer, x, "cuda"), wanted)


@needs_fla
@pytest.mark.parametrize("time", [1, 67, 300])
@pytest.mark.parametrize("name", ["gla", "deltanet", "deltanet:heads=3,window=2"])
def test_the_packages_operators_give_the_same(name, time):
    width = 96 if "heads=3" in name else 64
    torch.manual_seed(0)
    plain = make_mixer(name).build(Setting(width)).eval()
    added = make_mixer(name + ("," if ":" in name else ":") + "operator=fla")
    other = added.build(Setting(width)).eval()
    other.load_state_dict(plain.state_dict())
    x = torch.randn(3, time, width)
    same(results(other, x, "cuda"), results(plain, x, "cuda"))
