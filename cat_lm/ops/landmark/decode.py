"""Calls of decode.cpp, the C++ kernel that attends with the newest tokens on a CPU.

One call scores landmarks, chooses blocks and attends to them; it copies nothing of the past.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor as is_wrapped

from cat_lm.ops.landmark.select import Choice
from cat_lm.ops.runtime.compiler import SHARED, Sources
from cat_lm.ops.runtime.native import Kernel
from cat_lm.ops.runtime.operators import is_differentiated

# By their numbers in the kernel.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STREAMS = ("query", "key", "value", "landmarks")
# `DecodeCall` of decode.cpp; `work` is the numbers of keys, values and landmarks that are read.
KERNEL = Kernel(
    "decode",
    Sources("landmark", (Path(__file__).with_name("decode.cpp"), *SHARED)),
    integers=(
        *("dtype", "threads", "batch", "heads", "shared", "choices", "time", "width", "past"),
        *("block", "top_k", "local", "sink", "most", "room"),
    ),
    strided=_STREAMS,
    floats=("scaling",),
    pointers=(*_STREAMS, "padding", "scores", "places", "out"),
    small=1 << 16,
)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if there is a kernel for tensors of a device and dtype; it may be built now."""
    return torch.device(device).type == "cpu" and dtype in DTYPES and KERNEL.is_built


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
    streams = query, key, value, landmarks
    # The kernel does not check shapes.
    fits = (
        key.shape == value.shape
        and key.shape[::3] == (batch, width)
        and landmarks.shape[:2] == (batch, shared)
        and landmarks.shape[3] == width
        and heads % shared == 0
        and len({x.dtype for x in streams}) == 1
    )
    if not fits or key.shape[2] < past + time or landmarks.shape[2] < most or choice.local < 1:
        raise ValueError(
            f"queries, keys, values and landmarks {[list(x.shape) for x in streams]} do not fit: "
            f"{past + time} keys and the landmarks of {most} blocks are read, of one dtype, with "
            "at least one local block"
        )
    room = min(choice.top_k + choice.sink, most)
    out = torch.empty(query.shape, dtype=query.dtype)
    KERNEL(
        {
            **dict(zip(_STREAMS, streams, strict=True)),
            "padding": padding.expand(batch),
            "scores": torch.empty(batch * heads * time * most),
            "places": torch.empty(batch * choices * time * room, dtype=torch.int32),
            "out": out,
        },
        work=batch * shared * width * (most + 2 * (room + choice.local) * block),
        **{"dtype": DTYPES[query.dtype], "batch": batch, "heads": heads, "shared": shared},
        **{"choices": choices, "time": time, "width": width, "past": past, "block": block},
        **{"top_k": choice.top_k, "local": choice.local, "sink": choice.sink},
        **{"most": most, "room": room, "scaling": scaling},
    )
    return out
