"""GLA, the DeltaNets and the Mambas on a CUDA GPU: as on the CPU; a package's operators."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from cat_lm.ops.recurrence import backends
from cat_lm.ops.recurrence.backends import choose_backend
from tests.cat_lm.architectures.test_families import model_of, tokens

FAMILIES = ("gla", "delta_net", "gated_deltanet")
MAMBAS = ("mamba", "mamba2")
RECURRENCES = (backends.GLA, backends.DELTA_RULE, backends.GATED_DELTA_RULE)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_fla = pytest.mark.skipif(
    importlib.util.find_spec("fla") is None, reason="fla-core is not installed"
)
DOCUMENTS = torch.arange(160).expand(2, -1) // 70


def results(model: torch.nn.Module, device: str, **how: torch.Tensor) -> list[torch.Tensor]:
    """Logits and gradients in fp32 on the CPU, of 160 tokens."""
    model, rows = model.to(device), tokens(2, 160).to(device)
    how = {name: tensor.to(device) for name, tensor in how.items()}
    model.zero_grad()
    logits = model(rows, **how).logits.float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()
    return [s.detach().float().cpu() for s in (logits, *(p.grad for p in model.parameters()))]


def near(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one - other).norm() <= tolerance * other.norm() + 1e-6, f"tensor {index}"


@pytest.mark.parametrize("family", (*FAMILIES, *MAMBAS))
def test_models_are_the_same_on_the_gpu(family):
    wanted = results(model_of(family), "cpu", document_ids=DOCUMENTS)
    near(results(model_of(family), "cuda", document_ids=DOCUMENTS), wanted, 1e-3)


@needs_fla
@pytest.mark.parametrize(("family", "recurrence"), zip(FAMILIES, RECURRENCES, strict=True))
def test_the_packages_operators_are_near_ours(family, recurrence):
    """In bf16, which both round; auto takes them."""
    assert choose_backend(recurrence, "cuda", torch.bfloat16).name == "fla"
    model = model_of(family).to(torch.bfloat16)
    model.set_mixer_backend("torch")
    wanted = results(model, "cuda", document_ids=DOCUMENTS)
    model.set_mixer_backend("fla")
    near(results(model, "cuda", document_ids=DOCUMENTS), wanted, 0.1)
    with torch.no_grad():
        text = model.generate(tokens(2, 9).cuda(), max_new_tokens=5, eos_token_id=None)
    assert text.shape == (2, 14)
