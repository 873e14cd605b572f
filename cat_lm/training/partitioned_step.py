"""ZeRO-1 in fp32 and ZeRO-2: the device itself leaves out a step that is not finite.

DeepSpeed's own step (DeepSpeedZeroOptimizer.step) asks the device whether there is an overflow,
whether the norm is finite, and that again for each group before it clips: up to four times the host
waits. Here the norm that is not finite goes on as infinite, and fused AdamW leaves out the step, as
it does under a gradient scaler; the bits are the same. (`Bf16Step` does the same for ZeRO-1 in
bf16, whose optimizer is another.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class PartitionedStep:
    """Takes the place of what decides about a step in `deepspeed`'s DeepSpeedZeroOptimizer."""

    def __init__(self, deepspeed: DeepSpeedEngine) -> None:
        self._optimizer = optimizer = deepspeed.optimizer
        self._step, self._norm = optimizer.step, optimizer.scaled_global_norm
        optimizer.step, optimizer.scaled_global_norm = self.step, self.norm
        optimizer.check_grad_overflow = False  # the norm tells it, too

    def norm(self, *given: Any, **named: Any) -> torch.Tensor:
        """Give the gradients' norm, infinite where DeepSpeed's is not finite or its mark, −1."""
        norm = torch.as_tensor(self._norm(*given, **named))
        is_good = norm.isfinite() & (norm >= 0)
        self._optimizer.optimizer.found_inf = (~is_good).float()
        return torch.where(is_good, norm, math.inf)

    def step(self, *given: Any) -> None:
        """Step, and ask the device nothing."""
        from deepspeed.runtime.zero import stage_1_and_2

        asks, stage_1_and_2.is_invalid_grad_norm = (
            stage_1_and_2.is_invalid_grad_norm,
            lambda _: False,
        )
        try:
            self._step(*given)
        finally:
            stage_1_and_2.is_invalid_grad_norm = asks
