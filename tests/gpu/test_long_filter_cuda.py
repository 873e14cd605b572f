"""The Triton kernels of long filters on a CUDA GPU, against plain torch in fp64."""

from __future__ import annotations

import pytest
import torch

from cat_lm.ops.long_filter import filters
from cat_lm.ops.long_filter.api import choose_backend, long_conv
from cat_lm.ops.runtime.triton_launch import INSTALLED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not INSTALLED, reason="triton is not installed"),
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((result.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_outputs_and_gradients(dtype, packed):
    torch.manual_seed(0)
    kind = filters.get("ssm")
    numbers = kind.start_as("residual", 16, 16).double().cuda()
    x = torch.randn(4, 2000, 16, 64, device="cuda").to(dtype)
    dy = torch.randn_like(x)
    ids = torch.arange(2000, device="cuda").expand(4, -1) // 333 if packed else None
    results = []
    for given, own in ((x, numbers.float()), (x.double(), numbers)):
        given, own = given.requires_grad_(), own.requires_grad_()
        y = long_conv(given, kind.modes_of(own, 16), document_ids=ids)
        results.append((y, *torch.autograd.grad(y, (given, own), dy.to(y.dtype))))
    assert choose_backend("cuda", dtype, 16).name == "triton"
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted) < TOLERANCE[dtype]


def test_the_future_changes_no_bit_of_the_past():
    kind = filters.get("ssm")
    modes = kind.modes_of(kind.start_as("uniform", 4, 16).cuda(), 16)
    x = torch.randn(2, 1000, 4, 64, device="cuda", dtype=torch.bfloat16)
    changed = x.clone()
    changed[:, 500:] *= 1e3
    before, after = long_conv(x, modes), long_conv(changed, modes)
    assert torch.equal(before[:, :500], after[:, :500]) and not torch.equal(before, after)
