"""Cross-entropy of logits and its gradient in their place: one Triton kernel, a program a row.

A row is read twice: for the sum of its exponentials, which is kept relative to the largest logit so
far, and for the gradient. A program has so many threads that two share a multiprocessor and their
rows stay in the cache in between: memory sees each logit read once and written once, in the dtype
of the product that made it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.ops.runtime.triton_launch import next_power_of_2, on_device_of

THREADS = 1024
_LONGEST_BLOCK = 8 * THREADS  # 16 bytes of bf16 a thread


@triton.jit
def cross_entropy_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    vocabulary,
    stride,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
):
    """The loss of a row of logits and, with WANTS_GRADIENT, softmax − one-hot in its place.

    A label outside of the vocabulary makes both NaN. What lies between the vocabulary and the next
    row is read and written too, without meaning: masks that end at a stride of whole vectors leave
    the accesses to be 16 bytes wide where those that end at an odd vocabulary would not.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    columns = tl.arange(0, BLOCK)
    if label == IGNORED:
        tl.store(losses_ptr + row, 0.0)
        if WANTS_GRADIENT:
            nothing = tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty)
            for first in range(0, vocabulary, BLOCK):
                tl.store(logits_ptr + first + columns, nothing, mask=first + columns < stride)
    else:
        largest = -float("inf")
        sums = tl.zeros([BLOCK], dtype=tl.float32)
        for first in range(0, vocabulary, BLOCK):
            logits = tl.load(logits_ptr + first + columns, mask=first + columns < stride, other=0.0)
            logits = tl.where(first + columns < vocabulary, logits.to(tl.float32), -float("inf"))
            before, largest = largest, tl.maximum(largest, tl.max(logits, axis=0))
            sums = sums * tl.exp(before - largest) + tl.exp(logits - largest)
        log_sum = largest + tl.log(tl.sum(sums, axis=0))
        known = (label >= 0) & (label < vocabulary)
        log_sum = tl.where(known, log_sum, float("nan"))
        score = tl.load(logits_ptr + label, mask=known, other=0.0).to(tl.float32)
        tl.store(losses_ptr + row, log_sum - score)
        if WANTS_GRADIENT:
            tl.debug_barrier()  # Wait until every thread has read the label's logit.
            for first in range(0, vocabulary, BLOCK):
                inside = first + columns < stride
                logits = tl.load(logits_ptr + first + columns, mask=inside, other=0.0)
                gradient = tl.exp(logits.to(tl.float32) - log_sum)
                gradient = tl.where(first + columns == label, gradient - 1.0, gradient)
                gradient = gradient.to(logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + first + columns, gradient, mask=inside)


def cross_entropy_(logits: Tensor, labels: Tensor, losses: Tensor, wants_gradient: bool) -> None:
    """Fill `losses` and, if wanted, replace the logits by the gradient of the losses' sum.

    Args:
        logits: [N, V], in fp32 or half of it; what lies between rows of V numbers is written over.
        labels: [N] integers, 0 … V−1, or −100 for a loss and a gradient of 0.
        losses: fp32 [N], to be filled: −log softmax(logits)[label] in nats.
    """
    vocabulary, warp = logits.shape[1], 32 if torch.version.hip is None else 64
    block = min(_LONGEST_BLOCK, max(128, next_power_of_2(vocabulary)))
    with on_device_of(logits):
        cross_entropy_kernel[(logits.shape[0],)](
            logits_ptr=logits,
            labels_ptr=labels.contiguous(),
            losses_ptr=losses,
            vocabulary=vocabulary,
            stride=logits.stride(0),
            IGNORED=IGNORE_INDEX,
            WANTS_GRADIENT=wants_gradient,
            BLOCK=block,
            num_warps=max(1, min(THREADS, block // 8) // warp),
        )
