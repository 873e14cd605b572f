"""Causal softmax attention for training on a CPU, by causal.cpp."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from cat_lm.ops.runtime.compiler import SHARED, Sources, processor_features
from cat_lm.ops.runtime.fake import computing_device
from cat_lm.ops.runtime.flops import attention_flops, flops
from cat_lm.ops.runtime.native import Kernel
from cat_lm.ops.runtime.operators import (
    custom_op,
    has_tangent,
    refuse_second_derivative,
    register_in_turn,
)

# By their numbers in causal.cpp.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SHORTEST = 64  # queries: a tile of the kernel; on shorter rows torch's is faster
_STREAMS = ("query", "key", "value", "out", "d_out", "d_query", "d_key", "d_value")
# `AttentionCall` of causal.cpp; `work` is the numbers of the scores.
KERNEL = Kernel(
    "causal_attention",
    Sources("causal_attention", (Path(__file__).with_name("causal.cpp"), *SHARED)),
    integers=("dtype", "threads", "batch", "heads", "time", "width"),
    strided=_STREAMS,
    floats=("scale",),
    pointers=(*_STREAMS, "log_sums", "workspace"),
    small=1 << 13,
)


def serves_training(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the kernel is to compute causal attention of these tensors, cast to `dtype`.

    It is for training, where torch's takes up to twice its time in fp32 and three times in bf16,
    and for as many keys as queries. Without a derivative torch's own computes, whose bits are those
    of transformers' models; so it does in half precision where the processor multiplies matrices
    (AMX), which this kernel does not use.
    """
    streams = query, key, value
    return (
        computing_device(query).type == "cpu"
        and query.shape == key.shape == value.shape
        and query.shape[2] >= SHORTEST
        and query.dtype == key.dtype == value.dtype
        and dtype in DTYPES
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in streams)
        and not has_tangent(*streams)
        and (dtype == torch.float32 or not _has_amx())
        and KERNEL.is_built
    )


@functools.cache
def _has_amx() -> bool:
    return "amx_bf16" in processor_features()


@flops(attention_flops)
def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute softmax(scale Q Kᵀ) V over the keys up to each query; sums are in fp32.

    Args:
        query, key, value: [B, H, T, D] in fp32, bf16 or fp16.
        scale: factor of the scores.

    Returns:
        [B, T, H, D]. A second derivative raises NotImplementedError.
    """
    return _attend(query, key, value, scale)[0]


@custom_op("cat_lm::cpu_causal_attention")
def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, D], and log sum_j exp(scale q·k_j) [B, H, T] in fp32."""
    out, log_sums = _room(query, key, value, scale)
    _run(scale, query=query, key=key, value=value, out=out.transpose(1, 2), log_sums=log_sums)
    return out, log_sums


@_attend.register_fake
def _room(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, time, width = query.shape
    sums = query.new_empty(batch, heads, time, dtype=torch.float32)
    return query.new_empty(batch, time, heads, width), sums


@custom_op("cat_lm::cpu_causal_attention_backward")
def _differentiate(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    found = _gradients(d_out, query, key, value, out, log_sums, scale)
    given = {"query": query, "key": key, "value": value, "log_sums": log_sums}
    given |= {"out": out.transpose(1, 2), "d_out": d_out.transpose(1, 2)}
    _run(scale, **given, **dict(zip(_STREAMS[-3:], found, strict=True)))
    return found


@_differentiate.register_fake
def _gradients(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _run(scale: float, **tensors: Tensor) -> None:
    query = tensors["query"]
    numbers = dict(zip(("batch", "heads", "time", "width"), query.shape, strict=True))
    work = query.shape[:3].numel() * query.shape[2]
    KERNEL(tensors, work=work, dtype=DTYPES[query.dtype], scale=scale, **numbers)


def _setup_context(ctx, inputs, output):
    *streams, ctx.scale = inputs
    ctx.save_for_backward(*streams, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, _):
    if d_out is None:
        return (None,) * 4
    refuse_second_derivative("attention's kernel on a CPU", "set model.attn_implementation: eager")
    return *_differentiate(d_out, *ctx.saved_tensors, ctx.scale), None


_attend.register_autograd(_backward, setup_context=_setup_context)
register_in_turn(_attend, _differentiate)
