"""ZeRO-1 in fp32, ZeRO-2 and ZeRO-3: the device itself leaves out a step that is not finite.

DeepSpeed's own steps (of DeepSpeedZeroOptimizer and its _Stage3) ask the device whether there is an
overflow, whether the norm is finite, and that again for each group before it clips: up to four
times the host waits. Here the norm that is not finite goes on as infinite, and fused AdamW leaves
out the step, as it does under a gradient scaler; the bits are the same. (`Bf16Step` does the same
for ZeRO-1 in bf16, whose optimizer is another.)
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class PartitionedStep:
    """Takes the place of what decides about a step in `deepspeed`'s optimizer."""

    def __init__(self, deepspeed: DeepSpeedEngine) -> None:
        self._optimizer = optimizer = deepspeed.optimizer
        self._step, optimizer.step = optimizer.step, self.step
        self._module = sys.modules[type(optimizer).__module__]
        if deepspeed.zero_optimization_stage() == 3:
            self._norms, optimizer._get_norm_groups = optimizer._get_norm_groups, self.norms
        else:
            self._norm, optimizer.scaled_global_norm = optimizer.scaled_global_norm, self.norm
            optimizer.check_grad_overflow = False  # the norm tells it, too

    def norms(self) -> list[torch.Tensor]:
        """Return the norms of ZeRO-3's groups, of which DeepSpeed computes the gradient's."""
        norms = self._norms()
        self._note(self._module.combine_grad_norm_groups(norms))
        return norms

    def norm(self, *given: Any, **named: Any) -> torch.Tensor:
        """Return the gradients' norm, infinite where DeepSpeed's is not finite or its mark, −1."""
        return self._note(torch.as_tensor(self._norm(*given, **named)))

    def _note(self, norm: torch.Tensor) -> torch.Tensor:
        """Have AdamW know whether a norm is good; an infinite one in the place of a bad one."""
        is_good = norm.isfinite() & (norm >= 0)
        self._optimizer.optimizer.found_inf = (~is_good).float()
        return torch.where(is_good, norm, math.inf)

    def step(self, *given: Any) -> None:
        """Step, and ask the device nothing."""
        module = self._module
        asks, module.is_invalid_grad_norm = module.is_invalid_grad_norm, lambda _: False
        try:
            self._step(*given)
        finally:
            module.is_invalid_grad_norm = asks
