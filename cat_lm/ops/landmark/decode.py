"""Calls of decode.cpp, the C++ kernel that attends with the newest tokens on a CPU.

One call scores landmarks, chooses blocks and attends to them; it copies nothing of the past.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from cat_lm.ops.landmark.select import Choice
from cat_lm.ops.runtime import compiler, threads
from cat_lm.ops.runtime.operators import is_differentiated

KERNEL = compiler.Sources("landmark", (Path(__file__).with_name("decode.cpp"), *compiler.SHARED))

# By their numbers in the kernel.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Numbers of keys, values and landmarks read below which one thread is faster than waking others.
SMALL = 1 << 16

_INTEGERS = (
    *("dtype", "threads", "batch", "heads", "shared", "choices", "time", "width", "past"),
    *("block", "top_k", "local", "sink", "most", "room"),
)
_STRIDED = ("query", "key", "value", "landmarks")
_POINTERS = ("padding", "scores", "places", "out", "parallel")
_Strides = ctypes.c_int64 * 3


class _Call(ctypes.Structure):
    """`DecodeCall` of decode.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS),
        *((f"{name}_strides", _Strides) for name in _STRIDED),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in (*_STRIDED, *_POINTERS)),
    )

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


@functools.cache
def load() -> ctypes._CFuncPtr | None:
    """Return the kernel's function, None where it cannot be built; `load_library` says why."""
    library = compiler.load_library(KERNEL).handle
    if library is None:
        return None
    found = library.decode_run
    found.argtypes, found.restype = [ctypes.c_void_p], None
    return found


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if there is a kernel for tensors of a device and dtype; it may be built now."""
    return torch.device(device).type == "cpu" and dtype in DTYPES and load() is not None


def can_decode(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if the kernel computes with these: of its dtypes, no gradients, no graph.

    The kernel reads memory, which tensors of torch.func and FakeTensorMode do not have.
    """
    given = query, key, value
    return (
        not is_differentiated(*given)
        and not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) and not is_wrapped(x) for x in given)
        and len({x.dtype for x in given}) == 1
        and has_kernel(query.device, query.dtype)
    )


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmarks: Tensor,
    past: int,
    padding: Tensor,
    block: int,
    choice: Choice,
    scaling: float,
) -> Tensor:
    """Attend with the newest T tokens to local keys and chosen blocks, where `can_decode`.

    Args:
        query: [B, H, T, D].
        key, value: [B, H or fewer, S, D], the queries' own among them.
        landmarks: [B, H or fewer, n, D] of all complete blocks, and maybe more.
        past: the slot of the first query among the keys.
        padding: the slots of padding that rows begin with, [1 or B] on the host.

    Returns:
        [B, H, T, D].

    Raises:
        ValueError: fewer keys or landmarks than are read, or tensors that do not fit together.
    """
    batch, heads, time, width = query.shape
    shared = key.shape[1]
    choices = 1 if choice.share == "layer" else shared
    own = (past + time - 1 - int(padding.min())) // block
    most = max(0, own - choice.local + 1)
    _check(query, key, value, landmarks, past + time, most, choice)
    room = min(choice.top_k + choice.sink, most)
    read = most + 2 * (room + choice.local) * block
    small = batch * shared * width * read < SMALL
    call = _Call(
        0, 1 if small else torch.get_num_threads(), batch, heads, shared, choices, time, width,
        past, block, choice.top_k, choice.local, choice.sink, most, room, scaling=scaling,
    )  # fmt: skip
    others = {
        "padding": padding.expand(batch).contiguous(),
        "scores": torch.empty(batch * heads * time * most),
        "places": torch.empty(batch * choices * time * room, dtype=torch.int32),
        "out": torch.empty(query.shape, dtype=query.dtype),
    }
    kept = call.hand_over(dict(zip(_STRIDED, (query, key, value, landmarks), strict=True)), others)
    load()(ctypes.byref(call))
    del kept
    return others["out"]


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    landmarks: Tensor,
    keys: int,
    blocks: int,
    choice: Choice,
) -> None:
    """Check what the kernel, which looks at no shape, would read beyond."""
    batch, heads, _, width = query.shape
    shared = key.shape[1]
    fits = (
        key.shape == value.shape
        and key.shape[::3] == (batch, width)
        and landmarks.shape[:2] == (batch, shared)
        and landmarks.shape[3] == width
        and heads % shared == 0
        and len({x.dtype for x in (query, key, value, landmarks)}) == 1
    )
    if not fits or key.shape[2] < keys or landmarks.shape[2] < blocks or choice.local < 1:
        shapes = [list(x.shape) for x in (query, key, value, landmarks)]
        raise ValueError(
            f"queries, keys, values and landmarks {shapes} do not fit: {keys} keys and the "
            f"landmarks of {blocks} blocks are read, of one dtype, with at least one local block"
        )
