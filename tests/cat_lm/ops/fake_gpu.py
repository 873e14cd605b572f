"""A GPU that is not there: what a model would launch on it, move in its memory, and wait for.

Fake tensors say that they are on `cuda:0` and hold no numbers, so that a layer of full size takes
no time. What would be computed on the device is counted: an operator of torch as a kernel
(`KERNELS` has those that are several), a view as none. Of this project's own operators the bodies
run, and their Triton kernels are counted instead of launched.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cat_lm.ops.runtime import triton_launch

aten = torch.ops.aten
_META, _CUDA = torch.device("meta"), torch.device("cuda:0")
# Operators that are not one kernel, as CUDA's implementations launch them.
KERNELS = {
    "aten::_scaled_dot_product_flash_attention_backward": 3,  # sums of dO·O; dK and dV; dQ's cast
    "aten::_flash_attention_backward": 3,
    "aten::_scaled_dot_product_efficient_attention_backward": 2,  # sums of dO·O; the rest
    "aten::native_layer_norm_backward": 2,  # the input's; weight's and bias's
}
_NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_NO_KERNEL += ("_unsafe_view", "detach", "alias", "lift_fresh", "_local_scalar_dense")
# The host waits: for a number that it reads, or for a shape that only the device knows.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")


@dataclass
class Counts:
    """Kernels by name, the bytes that they read and write, and for what the host waited."""

    kernels: collections.Counter = field(default_factory=collections.Counter)
    bytes: int = 0
    waits: list[str] = field(default_factory=list)

    @property
    def launches(self) -> int:
        """Count the kernels."""
        return self.kernels.total()

    def __sub__(self, other: Counts) -> Counts:
        """What these have beside others, of which there are no more."""
        rest = self.kernels - other.kernels
        return Counts(rest, self.bytes - other.bytes, self.waits[len(other.waits) :])


class FakeGpu(TorchDispatchMode):
    """Counts in `counts` what is computed inside."""

    def __init__(self, bodies: dict[str, Callable]) -> None:
        super().__init__()
        self.counts = Counts()
        self._bodies = bodies

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is torch.ops.prim.device.default:
            # Only torch's own code asks so, which may be without CUDA and would go no further.
            return _META
        if kwargs.get("device") == _META:
            kwargs = kwargs | {"device": _CUDA}
        name = operator._schema.name
        if name in self._bodies:
            with self:
                return self._bodies[name](*args, **kwargs)
        with self:
            # A body calls some operators whole that autograd would have taken apart before.
            result = operator.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if name.removeprefix("aten::") in _WAITS:
            self.counts.waits.append(name)
        result = operator(*args, **kwargs)
        if not operator.is_view and name.removeprefix("aten::") not in _NO_KERNEL:
            self.count(name, (args, kwargs), result)
        return result

    def count(self, name: str, read: Any, written: Any = ()) -> None:
        """Count a kernel, or as many as `KERNELS` says, and the tensors' bytes, each once."""
        tensors = [x for x in tree_leaves((read, written)) if isinstance(x, Tensor)]
        if any(x.device == _CUDA for x in tensors):
            self.counts.kernels[name] += KERNELS.get(name, 1)
            self.counts.bytes += sum(map(bytes_of, tensors))

    def in_one(self, name: str, count: int, *inputs: Tensor) -> Any:
        """Make as many outputs as `count`, like the first inputs, in one kernel each way.

        Its gradient reads the other inputs or, where there are none, all of them.
        """
        return _InOneKernel.apply(self, name, count, *inputs)


class _InOneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gpu: FakeGpu, name: str, count: int, *inputs: Tensor) -> Any:
        outputs = tuple(torch.empty_like(x) for x in inputs[:count])
        gpu.count(name, inputs, outputs)
        ctx.save_for_backward(*inputs)
        ctx.told = gpu, name, count
        return outputs if count > 1 else outputs[0]

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Any:
        gpu, name, count = ctx.told
        inputs = ctx.saved_tensors
        made = tuple(torch.empty_like(x) for x in inputs[:count])
        gpu.count(f"{name}_backward", (gradients, inputs[count:] or inputs), made)
        return None, None, None, *made, *(None for _ in inputs[count:])


def bytes_of(x: Tensor) -> int:
    """Bytes of a tensor's own numbers: what is expanded lies in memory once."""
    own = (size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0)
    return math.prod(own) * x.element_size()


@contextlib.contextmanager
def fake_gpu(launched: Callable[[Any, dict], None] | None = None) -> Iterator[FakeGpu]:
    """Make new tensors fake ones on cuda:0, and count what is computed with them.

    Args:
        launched: is given each Triton kernel that would be launched, and its arguments, instead of
            the counts.
    """
    if not triton_launch.INSTALLED:
        pytest.skip("triton is not installed")
    import triton

    from cat_lm.ops.convolution.triton import launch

    gpu = FakeGpu(_bodies())

    def launcher(kernel: Any, grid: Any) -> Callable:
        if launched is not None:
            return lambda **given: launched(kernel, given)
        return lambda **given: gpu.count(kernel.fn.__name__, given)

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (triton.JITFunction, "__getitem__", launcher),
            (torch.cuda, "device", lambda _: contextlib.nullcontext()),
            (torch.cuda, "get_device_capability", lambda _: (9, 0)),
            (launch, "shared_memory", lambda _: 232448),  # an H100's
            (F, "scaled_dot_product_attention", _attention),
            # torch without CUDA takes its gradient by the formula.
            (F, "silu", lambda x, inplace=False: gpu.in_one("silu", 1, x)),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        for mode in (torch.device("cuda"), FakeTensorMode(), gpu):
            stack.enter_context(mode)
        yield gpu


def _bodies() -> dict[str, Callable]:
    """What this project's own operators do on a GPU, by their names."""
    import cat_lm.ops.convolution.triton  # noqa: F401

    operators = torch._library.custom_ops.OPDEFS.values()
    own = [op for op in operators if op._qualname.startswith("cat_lm::")]
    return {op._qualname: op._init_fn for op in own}


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do as torch does on a GPU: flash attention; with a mask or wide values what takes them."""
    if attn_mask is None and query.shape[3] == value.shape[3]:
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = query.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        attn_mask,
        torch.is_grad_enabled(),
        dropout_p,
        is_causal,
        scale=scale,
    )[0]


def on_fake_gpu(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give a model of the meta device memory inside `fake_gpu`, its parameters in `dtype`."""
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = nn.Parameter(torch.empty(own.shape, dtype=dtype))
        for name, own in module._buffers.items():
            if own is not None:
                module._buffers[name] = torch.empty(own.shape, dtype=own.dtype)
    return model
