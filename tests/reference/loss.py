"""The cross-entropy of next tokens, row by row, in double precision."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return −log softmax(logits)[label] of each row, 0 for label −100, and the gradients."""
    losses, gradients = [], []
    for row, label in zip(logits.double(), labels.tolist(), strict=True):
        if label == -100:
            losses.append(row.new_zeros(()))
            gradients.append(torch.zeros_like(row))
            continue
        shifted = row - row.max()
        log_sum = shifted.exp().sum().log()
        losses.append(log_sum - shifted[label])
        gradient = (shifted - log_sum).exp()
        gradient[label] -= 1
        gradients.append(gradient)
    return torch.stack(losses), torch.stack(gradients)
