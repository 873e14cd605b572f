"""Next-token cross-entropy of a linear head that does not hold the logits of the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.ops.loss import cross_entropy_cpu
from cat_lm.ops.runtime.operators import custom_op, refuse_second_derivative
from cat_lm.ops.runtime.triton_launch import DTYPES, INSTALLED

if INSTALLED:
    from cat_lm.ops.loss import cross_entropy_triton

# The logits of one chunk, in elements, but in Triton's kernel. Larger chunks are not faster.
CHUNK_ELEMENTS = 16 * 1024 * 1024
# In Triton's kernel, the bytes of a chunk in the compute dtype, and the most chunks that a batch is
# cut into, whatever their bytes: the head's weight and its gradient in fp32 are read anew, and
# written, for each.
KERNEL_CHUNK_BYTES = 512 * 1024 * 1024
MOST_KERNEL_CHUNKS = 8
_ROWS_OF_A_TILE = 128  # rows per tile of a matrix product; a chunk has whole tiles

# Takes logits [N, V], labels [N], losses [N] to be filled, and whether the gradient is wanted.
Kernel = Callable[[Tensor, Tensor, Tensor, bool], None]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over labelled positions of −log softmax(hidden · weightᵀ)[label].

    Logits exist for one chunk of positions at a time: in the compute dtype (autocast's if it is on,
    else that of `hidden`), then in fp32 for the softmax. Where a gradient is wanted, the same pass
    computes it, with the gradient of `weight` summed over chunks in fp32, so that logits are
    neither kept nor computed twice. A kernel, of Triton on a GPU and of C++ on a CPU, turns the
    logits of a chunk into their gradient where they lie, and computes in fp32 without storing
    logits in it. Second and forward-mode derivatives raise NotImplementedError.

    Args:
        hidden: [..., C].
        weight: [V, C].
        labels: [...] with values in 0 … V−1, or −100 where nothing is scored.

    Returns:
        The sum in nats, a fp32 scalar (fp64 for fp64 inputs); 0 if nothing is scored.
    """
    device_type = hidden.device.type
    compute_dtype = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)
    wanted = [torch.is_grad_enabled() and part.requires_grad for part in (hidden, weight)]
    total, _, _ = _summed_loss(
        hidden.flatten(0, -2), weight, labels.flatten(), compute_dtype, *wanted
    )
    return total


@custom_op("cat_lm::linear_cross_entropy")
def _summed_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    compute_dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and the gradients of hidden [N, C] and weight [V, C], empty if not wanted.

    An operator of torch's, so that torch.compile does not unroll the loop over chunks, whose number
    changes with every sequence length.
    """
    total, d_hidden, d_weight = _room(
        hidden, weight, labels, compute_dtype, wants_hidden, wants_weight
    )
    total.zero_(), d_weight.zero_()
    sums, wanted = (total, d_hidden, d_weight), (wants_hidden, wants_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        kernel = _kernel(hidden.device, compute_dtype)
        _add_chunks(kernel, hidden, weight.to(compute_dtype), labels, sums, wanted)
    return sums


def _add_chunks(
    kernel: Kernel | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    wanted: tuple[bool, bool],
) -> None:
    """Add to the sums of `_summed_loss`, chunk by chunk; `weight` has the compute dtype.

    The kernel's chunks take turns in the same memory; Triton's rows are padded to whole vectors.
    """
    total, d_hidden, d_weight = sums
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    length, stride = max(1, CHUNK_ELEMENTS // vocabulary), vocabulary
    if kernel and kernel is not cross_entropy_cpu.cross_entropy_:
        length, stride = kernel_chunk(tokens, vocabulary, weight.itemsize)
    if kernel:
        room, losses = weight.new_empty(min(length, tokens), stride), total.new_empty(tokens)
    for start in range(0, tokens, length):
        rows = 0, start, min(length, tokens - start)
        inputs = hidden.narrow(*rows).to(weight.dtype)
        if kernel:
            d_logits = room.narrow(0, 0, rows[2]).narrow(1, 0, vocabulary)
            torch.mm(inputs, weight.T, out=d_logits)
            chunk = labels.narrow(*rows), losses.narrow(*rows)
            kernel(d_logits, *chunk, any(wanted))
        else:
            logits = (inputs @ weight.T).to(total.dtype)
            loss, d_logits = _chunk(logits, labels.narrow(*rows), any(wanted))
            total += loss
            d_logits = d_logits.to(weight.dtype) if any(wanted) else d_logits
        if wanted[0]:
            torch.mm(d_logits, weight, out=d_hidden.narrow(*rows))
        if wanted[1]:
            _add_product(d_weight, d_logits, inputs)
    if kernel:
        torch.sum(losses, dim=0, out=total)


def kernel_chunk(tokens: int, vocabulary: int, itemsize: int) -> tuple[int, int]:
    """Return the number of positions whose logits the kernel computes at a time, and a row's size.

    Args:
        tokens: N, the positions of a batch.
        vocabulary: V.
        itemsize: bytes of a logit in the compute dtype.
    """
    stride = -(-vocabulary // 64) * 64
    chunks = -(-tokens * stride * itemsize // KERNEL_CHUNK_BYTES)
    length = max(1, -(-tokens // max(1, min(chunks, MOST_KERNEL_CHUNKS))))
    return -(-length // _ROWS_OF_A_TILE) * _ROWS_OF_A_TILE, stride


def _kernel(device: torch.device, compute_dtype: torch.dtype) -> Kernel | None:
    """Return the kernel that serves, or None for torch's operators."""
    if device.type == "cuda" and INSTALLED and compute_dtype in DTYPES:
        return cross_entropy_triton.cross_entropy_
    cpu = cross_entropy_cpu
    if device.type == "cpu" and compute_dtype in cpu.DTYPES and cpu.KERNEL.is_built:
        return cpu.cross_entropy_
    return None


@_summed_loss.register_fake
def _room(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    compute_dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sum_dtype = torch.promote_types(compute_dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=sum_dtype),
        hidden.new_empty(hidden.shape if wants_hidden else (0,), dtype=compute_dtype),
        weight.new_empty(weight.shape if wants_weight else (0,), dtype=sum_dtype),
    )


def _setup_context(ctx, inputs, output):
    hidden, weight = inputs[:2]
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.set_materialize_grads(False)  # Zeros for the outputs that are gradients would be large.


def _backward(ctx, d_total, *_):
    if d_total is None:
        return (None,) * 6
    refuse_second_derivative("the loss of labels", "compute the loss from the logits")
    gradients = [
        (gradient * d_total).to(dtype) if wanted else None
        for gradient, dtype, wanted in zip(
            ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True
        )
    ]
    return *gradients, None, None, None, None


_summed_loss.register_autograd(_backward, setup_context=_setup_context)


def _chunk(logits: Tensor, labels: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the loss and, where `logits` lie, its gradient: softmax(logits) − one-hot(label)."""
    scored = labels != IGNORE_INDEX
    target = labels.where(scored, 0)[:, None]
    log_sum = logits.logsumexp(dim=1, keepdim=True)
    loss = (log_sum - logits.gather(1, target)).where(scored[:, None], 0.0).sum()
    if wants_gradient:
        logits.sub_(log_sum).exp_()
        logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=logits.dtype))
        logits.masked_fill_(~scored[:, None], 0.0)
    return loss, logits


def _add_product(d_weight: Tensor, d_logits: Tensor, inputs: Tensor) -> None:
    """Add a chunk's contribution to the gradient of the weight [V, C]."""
    if d_logits.dtype == d_weight.dtype:
        d_weight.addmm_(d_logits.T, inputs)
    elif d_logits.is_cuda:  # Only CUDA adds a product of half precision to fp32.
        torch.addmm(d_weight, d_logits.T, inputs, out_dtype=d_weight.dtype, out=d_weight)
    else:
        d_weight += d_logits.T @ inputs


class LanguageModelHead(nn.Linear):
    """The output projection, which also computes the loss.

    The loss is computed inside this module's forward because engines that shard parameters (ZeRO-3,
    FSDP) hold the whole weight only while the module that owns it runs.
    """

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [..., V] of `hidden` [..., C]; with `labels` [...], the summed cross-entropy."""
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, labels)
