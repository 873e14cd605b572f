"""Contracts of kernels as operators of torch: what it asks of each that is registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm import ops
from cat_lm.ops.attention.causal_cpu import causal_attention
from cat_lm.ops.convolution import kinds
from cat_lm.ops.residual.parallel import add_branches, two_norms
from tests.contracts.operators import (
    INTERPRETED,
    convolution_backends,
    decaying_scan,
    gelu_with_bias,
    linear_cross_entropy,
    long_conv,
    long_filters,
)

OURS = sorted(name for name in OPDEFS if name.startswith("cat_lm::"))


class Calls(TorchDispatchMode):
    """Keeps the arguments of the first call of each operator of the library."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.found.setdefault(operator.name(), args)
        return operator(*args, **(kwargs or {}))


def results(backend: str) -> Iterator[Tensor]:
    """Yield what the operators compute that a backend serves."""
    leaves = {"requires_grad": True}
    x, bias = torch.randn(1, 4, 2, 16, **leaves), torch.randn(2, 16, **leaves)
    ids, rotary = torch.tensor([[0, 0, 1, 1]]), torch.randn(2, 1, 4, 8).unbind()
    served = [kind for kind in kinds.BUILT_IN if backend in convolution_backends(kind)]
    for kind in served:
        taps = torch.randn(kinds.get(kind).filter_shape(2, 16, 3), **leaves)
        how = {"document_ids": ids, "rotary": rotary, "backend": backend}
        yield ops.convolve(kind, x, taps, bias, **how)
    if served:
        yield ops.rotate(x, *rotary, backend=backend)
        taps, qkv = torch.randn(2, 3, **leaves), torch.randn(1, 4, 2, 3, 16, **leaves)
        yield sum(ops.head_conv_qkv(qkv, (taps, None, taps), rotary=rotary, backend=backend))
    if backend == "cpu":
        yield causal_attention(*torch.randn(3, 1, 2, 4, 16, **leaves), 0.5)
    if backend == "triton":
        residual, *read = two_norms(x[0, 0], torch.nn.LayerNorm(16), torch.nn.LayerNorm(16))
        yield add_branches(*read, residual)
    if backend == "reference":
        yield gelu_with_bias(x, bias[0])
        numbers = long_filters.get("ssm").start_as("uniform", 2, 4).requires_grad_()
        modes = long_filters.get("ssm").modes_of(numbers, 4)
        yield long_conv(x, modes, document_ids=ids, length=2)
        rate = torch.rand(1, 4, 2, 1, 1)
        yield decaying_scan(x, x, x, rate, -torch.rand(2, 16, 1, **leaves))
        weight = torch.randn(9, 16, **leaves)
        yield linear_cross_entropy(x, weight, torch.randint(9, (1, 4, 2)))


def test_operators_keep_the_rules_of_torch():
    """Check schemas, fake results and traces of all operators; Triton's in the interpreter."""
    with Calls() as calls:
        for backend in ["triton"] if INTERPRETED else ["reference", "cpu"]:
            for y in results(backend):
                y.square().sum().backward()
    ours = {name for name in OURS if ("triton" in name) == INTERPRETED}
    assert calls.found.keys() & set(OURS) == ours
    for name in sorted(ours):
        given = [x.detach().clone() if isinstance(x, Tensor) else x for x in calls.found[name]]
        if OPDEFS[name]._backward_fn is not None:
            for x in given:
                if isinstance(x, Tensor) and x.is_floating_point():
                    x.requires_grad_()
        torch.library.opcheck(OPDEFS[name]._opoverload, tuple(given))


VALUES = {"List[bool]": [True], "bool": True, "int": 2, "float": 0.5, "str": "head"}
VALUES |= {"ScalarType": torch.float32}


@pytest.mark.parametrize("name", OURS)
def test_operator_refuses_a_tangent(name):
    """Also without requires_grad, where torch itself drops the tangent."""
    operator = OPDEFS[name]._opoverload
    arguments = operator._schema.arguments
    for place in [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]:
        with forward_ad.dual_level():
            given = [VALUES.get(str(a.real_type), torch.ones(2)) for a in arguments]
            given[place] = forward_ad.make_dual(torch.ones(2), torch.ones(2))
            with pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative"):
                operator(*given)
