"""What operators launch on a GPU that is not there, compiled for real ones.

The interpreter runs kernels as Python and knows nothing of types that must agree in branches and
loops, nor of what a matrix instruction or shared memory takes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cat_lm import ops
from cat_lm.ops.convolution import kinds
from cat_lm.ops.convolution.step import convolve_step
from cat_lm.ops.runtime.triton_launch import INSTALLED
from tests.cat_lm.ops.fake_gpu import fake_gpu

# Backend, architecture, threads of a warp, and the shared memory that a program may have.
TARGETS = {
    "H100": ("cuda", 90, 32, 232448),
    "A100": ("cuda", 80, 32, 166912),
    "L40S": ("cuda", 89, 32, 101376),
    "MI300": ("hip", "gfx942", 64, 65536),
}
needs_triton = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")


class Kernel(NamedTuple):
    """A kernel that was launched; `spilled` are bytes of a thread, of an H100 as `registers`."""

    name: str
    asm: dict[str, Any]
    warps: int
    shared: int
    registers: int
    spilled: int


def launches(work: Callable[[], object], target: str = "H100") -> dict[str, Any]:
    """Run operators on a fake GPU; return what Triton makes of each launch's arguments, by name."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import MockTensor, create_function_from_signature

    *gpu, shared = TARGETS[target]
    backend, found = make_backend(GPUTarget(*gpu)), {}

    def launched(kernel: Any, given: dict) -> None:
        given = tree_map(lambda x: MockTensor(x.dtype) if isinstance(x, Tensor) else x, given)
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        made = kernel._pack_args(backend, given | {"debug": False}, *bind(**given))
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__} {len(found)}"
        found[name] = (kernel, *made)

    with fake_gpu(launched), pytest.MonkeyPatch.context() as patch:
        patch.setattr("cat_lm.ops.convolution.triton.launch.shared_memory", lambda _: shared)
        patch.setattr("cat_lm.ops.landmark.segments_triton.is_fake", lambda _: False)
        patch.setattr(torch.version, "hip", "6.4" if gpu[0] == "hip" else None)
        work()
    return found


def compiled(work: Callable[[], object], target: str = "H100") -> list[Kernel]:
    """Compile what operators launch; no kernel may need more shared memory than there is."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    *gpu, shared = TARGETS[target]
    found = []
    for name, (kernel, options, *given) in launches(work, target).items():
        made = compile(ASTSource(kernel, *given), target=GPUTarget(*gpu), options=options.__dict__)
        assert made.metadata.shared <= shared, name
        used = (0, 0)
        if gpu[0] == "cuda":
            listing = read_cubin(made.asm["cubin"], "--dump-resource-usage")
            used = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+)", listing).groups())
        found.append(Kernel(name, made.asm, options.num_warps, made.metadata.shared, *used))
    return found


def read_cubin(cubin: bytes, option: str) -> str:
    """Return what cuobjdump prints of a kernel."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, requires_grad=True)


def angles(time: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    return torch.empty(2, 1, time, rotary, dtype=dtype).unbind() if rotary else None


def convolve(
    kind: str,
    window: int,
    *,
    rotary: int = 0,
    documents: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, ...] = (2, 2048, 16, 64),
) -> None:
    """Convolve [B, T, H, D] by kernels of a kind, forward and backward."""
    time, heads, width = shape[1:]
    filters = leaf(*kinds.get(kind).filter_shape(heads, width, window), dtype=dtype)
    ops.convolve(
        kind,
        leaf(*shape, dtype=dtype),
        filters,
        leaf(heads, width, dtype=dtype),
        rotary=angles(time, rotary, dtype),
        positions=torch.empty(shape[:2], dtype=torch.int32) if documents else None,
        backend="triton",
    ).sum().backward()


def packed(
    streams: str,
    window: int,
    *,
    rotary: int = 0,
    documents: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, ...] = (2, 2048, 16, 64),
) -> None:
    """Convolve the chosen ones of packed q, k and v, forward and backward."""
    time, heads, width = shape[1:]
    found = ops.head_conv_qkv(
        leaf(*shape[:3], 3, width, dtype=dtype),
        [leaf(heads, window, dtype=dtype) if s in streams else None for s in "qkv"],
        leaf(heads, 3, width, dtype=dtype),
        rotary=angles(time, rotary, dtype),
        positions=torch.empty(shape[:2], dtype=torch.int32) if documents else None,
        backend="triton",
    )
    sum(x.sum() for x in found).backward()


def step(kind: str, window: int, silu: bool = False, heads: int = 16, width: int = 64) -> None:
    """Convolve a token of q, k and v."""
    half = {"dtype": torch.bfloat16}
    past = torch.empty(1, window - 1, heads, 3, width, **half)
    shape = kinds.get(kind).filter_shape(heads, width, window)
    convolve_step(
        kind,
        torch.empty(1, 1, heads, 3, width, **half).unbind(3),
        past.unbind(3),
        [torch.empty(shape, **half) for _ in "qkv"],
        torch.empty(heads, 3, width, **half).unbind(1),
        torch.empty_like(past).unbind(3),
        window=window,
        rotary=angles(1, min(16, width // 2 * 2), torch.float32),
        silu=silu,
    )
