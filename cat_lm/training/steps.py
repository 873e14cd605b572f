"""An optimizer step whose numbers travel to the host behind it, while it computes the next one.

DeepSpeed's own steps ask the device whether the norm is finite and whether to clip, so that the
host waits up to four times. `Bf16Step` and `PartitionedStep` take their place with the same
formulas and the same order of sums, so that the bits are the same, too; fused AdamW itself leaves
out a step that is not finite, as it does under a gradient scaler.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class StepResult:
    """Hold what a step did: mean loss in nats a scored token, over all ranks and micro-batches.

    `flags` are the sums over all ranks of what each gave to the step; `auxiliary` the mean of the
    layers' own losses, None where they have none.
    """

    loss: float
    grad_norm: float
    skipped: bool
    flags: tuple[float, ...] = ()
    auxiliary: float | None = None


class Moment:
    """Mark when a device comes to where it is made: a GPU behind what it was given before."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._seconds = time.perf_counter()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Return the seconds from `earlier` on, by the device's clock, when it has passed both."""
        if self._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._seconds - earlier._seconds


class LaunchedStep:
    """Hold a step that a GPU may still compute; `result` waits for that one and none after it."""

    def __init__(
        self,
        numbers: torch.Tensor,
        applied: bool,
        has_auxiliary: bool = False,
        *,
        started: Moment,
    ) -> None:
        """Copy the numbers to the host behind the step.

        Args:
            numbers: float64 on the device: scored tokens, gradient norm, loss summed over them,
                the mean of the layers' own losses if they have any, and the flags.
            applied: whether the step was not skipped, as far as the host knows.
            has_auxiliary: whether layers have losses of their own.
            started: before the step's first launch.
        """
        self._has_auxiliary = has_auxiliary
        self._applied, self._numbers, self._started = applied, numbers, started
        if numbers.device.type == "cuda":
            # Out of the stream's order it would be read behind what is launched next.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        self._ended = Moment(numbers.device)

    def result(self) -> StepResult:
        """Read the numbers; the one place where the host waits for a step."""
        self._ended.wait()
        items, grad_norm, total_loss, *flags = self._numbers.tolist()
        auxiliary = flags.pop(0) if self._has_auxiliary else None
        skipped = not (self._applied and math.isfinite(grad_norm))
        return StepResult(total_loss / max(items, 1), grad_norm, skipped, tuple(flags), auxiliary)

    def seconds(self, after: LaunchedStep | None = None) -> float:
        """Return the device's seconds of the step, from the end of `after`, when it was read.

        By the host's clock the first step would be two, and the last one next to nothing.
        """
        return self._ended.seconds_since(self._started if after is None else after._ended)


# DeepSpeed's, added to the norm before it divides (clip_tensors_by_global_norm).
_EPSILON = 1e-6


class Bf16Step:
    """Replace the reduction and the step of DeepSpeed's BF16_Optimizer (ZeRO-1 in bf16).

    That takes the norm and clips by a kernel for each parameter, and sums the gradients over the
    ranks in a copy.
    """

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


class PartitionedStep:
    """Replace what decides about a step of ZeRO-1 in fp32, ZeRO-2 and ZeRO-3.

    There DeepSpeed asks for an overflow, for the norm, and again for each group before it clips.
    Here a norm that is not finite goes on as infinite.
    """

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
