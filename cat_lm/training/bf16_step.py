"""The step of ZeRO-1 in bf16 as the device's work alone: the host waits for no number of it.

DeepSpeed's own step (BF16_Optimizer.step) asks the device whether the norm is finite and whether to
clip, takes the norm and clips by a kernel for each parameter, and sums the gradients over the ranks
in a copy. The formulas and the order of sums are the same here, so that the bits are, too; fused
AdamW itself leaves out a step that is not finite, as it does under a gradient scaler.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# DeepSpeed's, added to the norm before it divides (clip_tensors_by_global_norm).
_EPSILON = 1e-6


class Bf16Step:
    """Takes the place of the reduction and of the step of `deepspeed`'s BF16_Optimizer."""

    def __init__(self, deepspeed: DeepSpeedEngine, grad_clip: float) -> None:
        self._deepspeed, self._optimizer = deepspeed, deepspeed.optimizer
        self._grad_clip = grad_clip
        self._optimizer.step = self.step
        deepspeed._reduce_non_expert_gradients = self.reduce

    def reduce(self, gradients: list[torch.Tensor], _: int) -> None:
        """Average the flat gradients over the ranks, where they are."""
        for gradient in gradients:
            self._deepspeed.allreduce_bucket(
                [gradient], dp_group=self._deepspeed.seq_data_parallel_group
            )

    @torch.no_grad()
    def step(self) -> None:
        """Clip and step; what is not finite changes nothing, and its norm is noted as infinite."""
        optimizer = self._optimizer
        norms = torch._foreach_norm(optimizer.get_grads_for_norm()[0], 2.0)
        norm = torch.stack(norms).pow(2.0).sum().pow(0.5)
        is_finite = norm.isfinite()
        optimizer._global_grad_norm = torch.where(is_finite, norm, math.inf)
        pieces = optimizer.fp32_groups_gradient_flat_partition
        if self._grad_clip > 0:
            torch._foreach_mul_(pieces, (self._grad_clip / (norm + _EPSILON)).clamp(max=1.0))
        for masters, gradient in zip(optimizer.fp32_groups_flat_partition, pieces, strict=True):
            masters.grad = gradient
        optimizer.optimizer.found_inf = (~is_finite).float()
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
        # DeepSpeed's engine sets the gradients to zero after every step.
