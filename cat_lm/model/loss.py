"""Next-token cross-entropy of a linear head that never holds the logits of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100

# The logits of one chunk, in elements: 64 MiB in fp32. Larger chunks are not faster.
CHUNK_ELEMENTS = 16 * 1024 * 1024


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum over labelled positions of −log softmax(hidden · weightᵀ)[label].

    Logits exist for one chunk of positions at a time: in the compute dtype (autocast's if it is on,
    else that of `hidden`), then in fp32 for the softmax. Where a gradient is wanted, the same pass
    computes it, with the gradient of `weight` summed over chunks in fp32, so that logits are
    neither kept nor computed twice.

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
    wants_gradient = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(
        hidden.flatten(0, -2), weight, labels.flatten(), compute_dtype, wants_gradient
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, compute_dtype, wants_gradient):
        scored = labels != IGNORE_INDEX
        wanted = [wants_gradient and needed for needed in ctx.needs_input_grad[:2]]
        sum_dtype = torch.promote_types(compute_dtype, torch.float32)
        total = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        d_hidden = torch.empty_like(hidden, dtype=compute_dtype) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=sum_dtype) if wanted[1] else None

        with torch.autocast(hidden.device.type, enabled=False):
            compute_weight = weight.to(compute_dtype)
            length = max(1, CHUNK_ELEMENTS // weight.shape[0])
            for start in range(0, hidden.shape[0], length):
                chunk = slice(start, start + length)
                inputs = hidden[chunk].to(compute_dtype)
                logits = (inputs @ compute_weight.T).to(sum_dtype)
                loss, d_logits = _chunk(logits, labels[chunk], scored[chunk], any(wanted))
                total += loss
                if d_logits is None:
                    continue
                d_logits = d_logits.to(compute_dtype)
                if d_hidden is not None:
                    torch.mm(d_logits, compute_weight, out=d_hidden[chunk])
                if d_weight is not None:
                    _add_product(d_weight, d_logits, inputs)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total):
        gradients = [
            None if gradient is None else (gradient * d_total).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *gradients, None, None, None


def _chunk(
    logits: Tensor, labels: Tensor, scored: Tensor, wants_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss of a chunk and, in place of `logits`, its gradient: softmax(logits) − one-hot(label)."""
    target = labels.where(scored, 0)[:, None]
    log_sum = logits.logsumexp(dim=1, keepdim=True)
    loss = (log_sum - logits.gather(1, target)).where(scored[:, None], 0.0).sum()
    if not wants_gradient:
        return loss, None
    d_logits = logits.sub_(log_sum).exp_()
    d_logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=logits.dtype))
    return loss, d_logits.masked_fill_(~scored[:, None], 0.0)


def _add_product(d_weight: Tensor, d_logits: Tensor, inputs: Tensor) -> None:
    if d_logits.dtype == d_weight.dtype:
        d_weight.addmm_(d_logits.T, inputs)
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
