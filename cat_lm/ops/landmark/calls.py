"""Calls of the C++ kernels of landmark attention: what they are handed, and where they are."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from cat_lm.ops.runtime import compiler, threads

# By their numbers in the kernels.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_Strides = ctypes.c_int64 * 3


class Call(ctypes.Structure):
    """A kernel's argument; a class for each kernel has `_fields_`, as `fields_of` gives them."""

    def hand_over(self, strided: dict[str, Tensor], others: dict[str, Tensor]) -> list[Tensor]:
        """Set the pointers, the strides of tensors [B, H, S, D] and the dtype of these.

        Returns:
            What the pointers point to, to be kept until the kernel has ended.
        """
        handed = dict(others)
        for name, x in strided.items():
            handed[name] = x if x.shape[3] == 1 or x.stride(3) == 1 else x.contiguous()
            setattr(self, f"{name}_strides", _Strides(*handed[name].stride()[:3]))
            self.dtype = DTYPES[x.dtype]
        for name, x in handed.items():
            setattr(self, name, x.data_ptr())
        self.parallel = threads.runtime()
        return list(handed.values())


def fields_of(
    integers: tuple[str, ...], strided: tuple[str, ...], pointers: tuple[str, ...]
) -> list[tuple[str, type]]:
    """Give the fields of a call: dtype and threads, `integers`, strides, scaling, pointers."""
    return [
        *((name, ctypes.c_int64) for name in ("dtype", "threads", *integers)),
        *((f"{name}_strides", _Strides) for name in strided),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in (*strided, *pointers, "parallel")),
    ]


def sources(name: str, file: str) -> compiler.Sources:
    """Say what a kernel of this folder is built from."""
    folder = Path(__file__).parent
    return compiler.Sources(name, (folder / file, *compiler.SHARED, folder / "rows.h"))


@functools.cache
def load(kernel: compiler.Sources, function: str) -> ctypes._CFuncPtr | None:
    """The kernel's function, or None where it cannot be built; `load_library` says why."""
    library = compiler.load_library(kernel).handle
    if library is None:
        return None
    found = getattr(library, function)
    found.argtypes, found.restype = [ctypes.c_void_p], None
    return found


def has_kernel(
    kernel: compiler.Sources, function: str, device: torch.device, dtype: torch.dtype
) -> bool:
    """Tell whether there is a kernel for tensors of a device and dtype; it may be built now."""
    is_kind = torch.device(device).type == "cpu" and dtype in DTYPES
    return is_kind and load(kernel, function) is not None


def serves(kernel: compiler.Sources, function: str, *tensors: Tensor) -> bool:
    """Tell whether a kernel computes with these tensors: of one dtype, outside of graphs.

    It reads memory: not of tensors that stand for others, as in torch.func and FakeTensorMode.
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) and not is_wrapped(x) for x in tensors)
        and len({x.dtype for x in tensors}) == 1
        and has_kernel(kernel, function, tensors[0].device, tensors[0].dtype)
    )
