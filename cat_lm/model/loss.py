"""Next-token cross-entropy of a linear head that never holds the logits of the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cat_lm.labels import IGNORE_INDEX

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
    wanted = [torch.is_grad_enabled() and part.requires_grad for part in (hidden, weight)]
    total, _, _ = _summed_loss(
        hidden.flatten(0, -2), weight, labels.flatten(), compute_dtype, *wanted
    )
    return total


@torch.library.custom_op("cat_lm::linear_cross_entropy", mutates_args=())
def _summed_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    compute_dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the gradients of hidden [N, C] and weight [V, C], empty if not wanted.

    An operator of torch's, so that torch.compile does not unroll the loop over chunks, whose number
    changes with every sequence length.
    """
    scored = labels != IGNORE_INDEX
    total, d_hidden, d_weight = _room(hidden, weight, compute_dtype, wants_hidden, wants_weight)
    total.zero_(), d_weight.zero_()
    with torch.autocast(hidden.device.type, enabled=False):
        compute_weight = weight.to(compute_dtype)
        length = max(1, CHUNK_ELEMENTS // weight.shape[0])
        for start in range(0, hidden.shape[0], length):
            chunk = slice(start, start + length)
            inputs = hidden[chunk].to(compute_dtype)
            logits = (inputs @ compute_weight.T).to(total.dtype)
            wants_gradient = wants_hidden or wants_weight
            loss, d_logits = _chunk(logits, labels[chunk], scored[chunk], wants_gradient)
            total += loss
            if d_logits is None:
                continue
            d_logits = d_logits.to(compute_dtype)
            if wants_hidden:
                torch.mm(d_logits, compute_weight, out=d_hidden[chunk])
            if wants_weight:
                _add_product(d_weight, d_logits, inputs)
    return total, d_hidden, d_weight


def _room(
    hidden: Tensor,
    weight: Tensor,
    compute_dtype: torch.dtype,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the results of `_summed_loss`."""
    sum_dtype = torch.promote_types(compute_dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=sum_dtype),
        hidden.new_empty(hidden.shape if wants_hidden else (0,), dtype=compute_dtype),
        weight.new_empty(weight.shape if wants_weight else (0,), dtype=sum_dtype),
    )


@_summed_loss.register_fake
def _(hidden, weight, labels, compute_dtype, wants_hidden, wants_weight):
    return _room(hidden, weight, compute_dtype, wants_hidden, wants_weight)


def _setup_context(ctx, inputs, output):
    hidden, weight = inputs[:2]
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = hidden.dtype, weight.dtype
    ctx.set_materialize_grads(False)  # zeros for the outputs that are gradients would be large


def _backward(ctx, d_total, *_):
    if d_total is None:
        return (None,) * 6
    gradients = [
        (gradient * d_total).to(dtype) if wanted else None
        for gradient, dtype, wanted in zip(
            ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True
        )
    ]
    return *gradients, None, None, None, None


_summed_loss.register_autograd(_backward, setup_context=_setup_context)


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
