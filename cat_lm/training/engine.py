"""The training engine: DeepSpeed runs one optimizer step over one global batch.

The host reads the numbers of a step while the device computes the next one. DeepSpeed's own steps
would make the host wait up to four times, to test whether the gradient norm is finite and whether
to clip. `Bf16Step` and `PartitionedStep` replace these parts with the same formulas and the same
order of summation, so that results are bit-identical. A step that is not finite is skipped by the
optimizer on the device, as fused AdamW does under a gradient scaler.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cat_lm import optimizers
from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.core.numbers import IGNORE_INDEX
from cat_lm.model.sequence import SequenceGroup
from cat_lm.ops.runtime.cpu import make_process_ready
from cat_lm.ops.runtime.documents import document_borders
from cat_lm.ops.runtime.precision import sum_products_in_fp32
from cat_lm.training.building import (
    allocate_meta_tensors,
    broadcast_buffers,
    choose_document_attention,
    needs_exact_masters,
    optimizer_groups,
)
from cat_lm.training.checkpoint.optimizer_state import fill_weights
from cat_lm.training.distributed import (
    Ranks,
    collective_timeout,
    import_deepspeed,
    silence_deepspeed,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import nn
    from transformers import PreTrainedModel

    from cat_lm.model.hf.causal_lm import CausalOutput

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class StepResult:
    """The result of a step: mean loss in nats per scored token, over all ranks and micro-batches.

    `flags` are the sums over all ranks of the flags given to the step. `auxiliary` is the mean of
    the layers' auxiliary losses, None for models without them.
    """

    loss: float
    grad_norm: float
    skipped: bool
    flags: tuple[float, ...] = ()
    auxiliary: float | None = None


class Moment:
    """A point in the device's queue of work; on a GPU it is an event in the current stream."""

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
        """Return the seconds since `earlier` by the device's clock; both must have passed."""
        if self._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._seconds - earlier._seconds


class LaunchedStep:
    """A step that a GPU may still be computing; `result` waits for it, and for no later one."""

    def __init__(
        self,
        numbers: torch.Tensor,
        applied: bool,
        has_auxiliary: bool = False,
        *,
        started: Moment,
    ) -> None:
        """Queue a copy of the step's numbers to the host.

        Args:
            numbers: float64 on the device: scored tokens, gradient norm, loss summed over these
                tokens, the mean of the layers' auxiliary losses if there are any, and the flags.
            applied: False for a step that DeepSpeed has skipped on the host.
            has_auxiliary: whether `numbers` has the auxiliary loss.
            started: the moment before the step.
        """
        self._has_auxiliary = has_auxiliary
        self._applied, self._numbers, self._started = applied, numbers, started
        if numbers.device.type == "cuda":
            # The copy is queued now; a later one would wait for the steps that are launched next.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        self._ended = Moment(numbers.device)

    def result(self) -> StepResult:
        """Return the result; this is the only place where the host waits for a step."""
        self._ended.wait()
        items, grad_norm, total_loss, *flags = self._numbers.tolist()
        auxiliary = flags.pop(0) if self._has_auxiliary else None
        skipped = not (self._applied and math.isfinite(grad_norm))
        return StepResult(total_loss / max(items, 1), grad_norm, skipped, tuple(flags), auxiliary)

    def seconds(self, after: LaunchedStep | None = None) -> float:
        """Return the step's seconds on the device, counted from the end of the step `after`.

        By the host's clock the first step would take twice as long, and the last one no time.
        """
        return self._ended.seconds_since(self._started if after is None else after._ended)


# DeepSpeed adds it to the norm before the division (clip_tensors_by_global_norm).
_EPSILON = 1e-6


class Bf16Step:
    """Replace parts of DeepSpeed's BF16_Optimizer (ZeRO-1 in bf16): from gradients to the step.

    DeepSpeed converts each gradient to fp32 before it adds it to a sum that it has set to zero,
    reduces a copy of the sums, and launches a kernel per parameter for the norm and for clipping.
    """

    def __init__(self, deepspeed: DeepSpeedEngine, grad_clip: float) -> None:
        self._deepspeed, self._optimizer = deepspeed, deepspeed.optimizer
        self._grad_clip = grad_clip
        self._optimizer.step = self.step
        self._optimizer._update_hp_grad = self.accumulate
        self._optimizer.clear_hp_grads = self.forget
        deepspeed._reduce_non_expert_gradients = self.reduce

    @torch.no_grad()
    def accumulate(
        self, parameter: nn.Parameter, group: int, index: int, *, clear_lp_grads: bool
    ) -> None:
        """Add a micro-batch's gradient to the sum in fp32; the first one of a step replaces it."""
        if parameter.grad is None:
            return
        total = self._optimizer.fp32_groups_gradients[group][index]
        gradient = parameter.grad.view(total.shape)
        has_sum = self._optimizer.fp32_groups_has_gradients[group]
        total.add_(gradient) if has_sum[index] else total.copy_(gradient)
        has_sum[index] = True
        parameter._hp_grad = total
        if clear_lp_grads:
            parameter.grad.zero_()

    def forget(self) -> None:
        """Have the next gradients replace the sums, which are not set to zero."""
        sums = self._optimizer.fp32_groups_gradients
        self._optimizer.fp32_groups_has_gradients = [[False] * len(group) for group in sums]

    def reduce(self, gradients: list[torch.Tensor], _: int) -> None:
        """Average the flat gradients over the ranks, in place."""
        found = self._optimizer.fp32_groups_has_gradients
        for sums, has_sum in zip(self._optimizer.fp32_groups_gradients, found, strict=True):
            for index, total in enumerate(sums):
                if not has_sum[index]:  # The parameter had no part in this rank's losses.
                    total.zero_()
                    has_sum[index] = True  # Its mean over the ranks counts in the norm.
        for gradient in gradients:
            self._deepspeed.allreduce_bucket(
                [gradient], dp_group=self._deepspeed.seq_data_parallel_group
            )

    @torch.no_grad()
    def step(self) -> None:
        """Clip and step; if the norm is not finite, set it to infinity and change nothing."""
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
    """Replace the host's decisions in a step of ZeRO-1 in fp32, ZeRO-2 and ZeRO-3.

    DeepSpeed reads the overflow, the norm, and the norm again for each group before clipping. Here
    the device replaces a norm that is not finite by infinity, and the optimizer skips the step.
    """

    def __init__(self, deepspeed: DeepSpeedEngine) -> None:
        self._optimizer = optimizer = deepspeed.optimizer
        self._step, optimizer.step = optimizer.step, self.step
        self._module = sys.modules[type(optimizer).__module__]
        if deepspeed.zero_optimization_stage() == 3:
            self._norms, optimizer._get_norm_groups = optimizer._get_norm_groups, self.norms
        else:
            self._norm, optimizer.scaled_global_norm = optimizer.scaled_global_norm, self.norm
            optimizer.check_grad_overflow = False  # The norm shows an overflow, too.

    def norms(self) -> list[torch.Tensor]:
        """Return the gradient norms of ZeRO-3's groups, which DeepSpeed combines."""
        norms = self._norms()
        self._mark_bad_norm(self._module.combine_grad_norm_groups(norms))
        return norms

    def norm(self, *given: Any, **named: Any) -> torch.Tensor:
        """Return the gradient norm; infinity if it is not finite or DeepSpeed's error value −1."""
        return self._mark_bad_norm(torch.as_tensor(self._norm(*given, **named)))

    def _mark_bad_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Make the optimizer skip a step with a bad norm, and return infinity for a bad norm."""
        is_good = norm.isfinite() & (norm >= 0)
        self._optimizer.optimizer.found_inf = (~is_good).float()
        return torch.where(is_good, norm, math.inf)

    def step(self, *given: Any) -> None:
        """Step without reading the norm on the host."""
        module = self._module
        asks, module.is_invalid_grad_norm = module.is_invalid_grad_norm, lambda _: False
        try:
            self._step(*given)
        finally:
            module.is_invalid_grad_norm = asks


def sequence_group(config: RunConfig, ranks: Ranks) -> SequenceGroup | None:
    """Return the group of P ranks that share this rank's sequences (a collective); None for P = 1.

    Raises UserError if P does not divide the number of ranks.
    """
    parts, shares = config.train.sequence_parallel, config.count_rank_groups(ranks.world_size)
    if parts == 1:
        return None
    timeout = timedelta(minutes=collective_timeout(config.train.hang_minutes))
    groups = [
        torch.distributed.new_group(range(share * parts, (share + 1) * parts), timeout=timeout)
        for share in range(shares)
    ]
    return SequenceGroup(parts, ranks.rank % parts, groups[ranks.rank // parts])


def _check_compiler(device: torch.device) -> None:
    """Raise UserError on a CPU without a C++ compiler, which torch.compile needs there."""
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers):
        raise UserError("train.compile=True: there is no C++ compiler, which a CPU needs for it")


class Engine:
    """Train `model` by DeepSpeed with the configured optimizer and precision.

    Every rank starts with the parameters and buffers of rank 0.

    The loss is the mean over the scored tokens of the whole global batch, over all ranks and
    accumulation steps, so that 1 x 8 and 8 x 1 micro-batches give the same step.
    """

    def __init__(self, model: PreTrainedModel, config: RunConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.accumulation_steps = config.accumulation_steps(ranks.world_size)
        self._plain = config.train.zero_stage == 0
        self._objective = config.objective
        apart = choose_document_attention(config, model, ranks.device)
        # The host computes the document boundaries, because reading them from a GPU would wait.
        self._gives_borders = apart is not None and apart.name != "mask"
        self.sequence_group = sequence_group(config, ranks)
        if self.sequence_group is not None:
            model.set_sequence_group(self.sequence_group)
        sum_products_in_fp32()
        make_process_ready(ranks.device)
        restores = needs_exact_masters(config)
        exact = None
        if restores and ranks.is_first:
            exact = {n: w.detach().to("cpu", copy=True) for n, w in model.named_parameters()}
        if config.train.precision == "bf16" and not self._plain:
            model.to(torch.bfloat16)
        allocate_meta_tensors(model, ranks.device)
        model.to(ranks.device).train()
        broadcast_buffers(model, ranks)
        kind, options = optimizers.chosen(config.optimizer)
        groups = optimizer_groups(model, kind, config.optimizer, options)
        optimizer = kind.build(groups, config.optimizer, options)
        with silence_deepspeed():
            self.deepspeed, self.optimizer, _, _ = import_deepspeed().initialize(
                model=model,
                optimizer=optimizer,
                config=config.deepspeed(ranks.world_size),
            )
        if config.train.precision == "bf16" and config.train.zero_stage == 1:
            Bf16Step(self.deepspeed, config.optimizer.grad_clip)
        elif config.train.zero_stage > 0:
            PartitionedStep(self.deepspeed)
        self.model = model
        kind.attach(optimizer, self)
        if restores:
            fill_weights(self, exact)
        # Weights are equal on all ranks, but dropout must differ from here on.
        torch.manual_seed(config.train.seed + 1_000_003 * (ranks.rank + 1))
        if config.train.compile:
            _check_compiler(ranks.device)
            # Compile in place, which keeps the names in the state dict.
            model.compile()

    def train_step(self, batch: Batch, lr: float, flags: Sequence[float] = ()) -> StepResult:
        """Run one optimizer step on this rank's part of the global batch and wait for it."""
        return self.launch_step(batch, lr, flags).result()

    def launch_step(self, batch: Batch, lr: float, flags: Sequence[float] = ()) -> LaunchedStep:
        """Launch one optimizer step on this rank's part of the global batch, without waiting.

        Loss, norm and flags are read together, by the result. (In stages 2 and 3 DeepSpeed itself
        waits for some numbers: see README.md.)

        Args:
            flags: numbers that are summed over all ranks together with the loss.
        """
        started = Moment(self.ranks.device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        micro_batches = self._micro_batches(batch)
        scored = self._sum_over_ranks(
            int((self._sequence_part(batch)["labels"] != IGNORE_INDEX).sum())
        )
        # DeepSpeed averages over ranks and accumulation steps; this divisor undoes both.
        share = scored.clamp(min=1) / (self.ranks.world_size * self.accumulation_steps)
        share = share.squeeze()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        norm, auxiliary = total, torch.zeros_like(total)
        for number, micro_batch in enumerate(micro_batches, start=1):
            outputs = self._forward(micro_batch, num_items_in_batch=share.float())
            loss = self._training_loss(outputs)
            total += outputs.loss.detach().double() * share
            if (own := _auxiliary_loss(outputs)) is not None:
                passes = self.ranks.world_size * self.accumulation_steps
                auxiliary += own.detach().double() / passes
            if number == self.accumulation_steps:
                # A loss that is not finite makes the gradient norm bad on every rank, so that all
                # skip the step without exchanging their losses here.
                loss = loss * torch.where(total.isfinite(), 1.0, math.nan)
            self.deepspeed.backward(loss)
            if self._plain and number == self.accumulation_steps:
                norm = self._clip_gradients()
            self.deepspeed.step()
        if not self._plain:
            norm = torch.as_tensor(self.deepspeed.get_global_grad_norm())
        collects = getattr(self.model, "collects_losses", False)
        sums = self._sum_over_ranks(total, *([auxiliary] if collects else []), *flags)
        numbers = torch.cat((scored, norm.to(sums).reshape(1), sums))
        applied = self.deepspeed.was_step_applied()
        return LaunchedStep(numbers, applied, collects, started=started)

    def _sum_over_ranks(self, *numbers: float | torch.Tensor) -> torch.Tensor:
        """Return the sum of each number over all ranks, float64 on the device, without waiting."""
        given = [torch.as_tensor(number, dtype=torch.float64).reshape(1) for number in numbers]
        sums = torch.cat([self._to_device(number) for number in given])
        if self.ranks.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Return (sum of losses in nats, scored tokens) of this rank's part of a batch."""
        self.deepspeed.eval()
        total, scored, one = 0.0, 0, torch.ones((), device=self.ranks.device)
        for micro_batch in self._micro_batches(batch):
            total += self._forward(micro_batch, num_items_in_batch=one).loss.item()
            scored += int((micro_batch["shift_labels"] != IGNORE_INDEX).sum())
        self.deepspeed.train()
        return total, scored

    def _forward(
        self, micro_batch: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor
    ) -> CausalOutput:
        # The divisor is a tensor, because torch.compile makes a new graph for every Python number.
        return self.deepspeed(
            **micro_batch, num_items_in_batch=num_items_in_batch, skip_logits=True, use_cache=False
        )

    def _training_loss(self, outputs: CausalOutput) -> torch.Tensor:
        """Return the training loss of a micro-batch: its loss and the layers' auxiliary losses."""
        own = _auxiliary_loss(outputs)
        if own is None:
            return outputs.loss
        # Even with weight 0 the loss gives every parameter a gradient, which ZeRO waits for.
        return self._objective.token_weight * outputs.loss + self._objective.own_weight * own

    def _micro_batches(self, batch: Batch) -> list[dict[str, torch.Tensor]]:
        size = self.config.train.micro_batch_size
        rows, batch = len(batch["input_ids"]), self._sequence_part(batch)
        tensors = {
            "shift_labels" if name == "labels" else name: torch.from_numpy(rows_of_name)
            for name, rows_of_name in batch.items()
        }
        parts = [
            {name: tensor[start : start + size] for name, tensor in tensors.items()}
            for start in range(0, rows, size)
        ]
        if self._gives_borders:
            for part in parts:
                part["document_borders"] = document_borders(part["document_ids"])
        moved = [{name: self._to_device(tensor) for name, tensor in part.items()} for part in parts]
        if self._gives_borders and self.config.train.compile:
            # Mark the document count dynamic; otherwise the first two counts get a graph each.
            for part in moved:
                torch._dynamo.maybe_mark_dynamic(part["document_borders"], 0)
        return moved

    def _sequence_part(self, batch: Batch) -> Batch:
        """Cut this rank's tokens and labels out of shared sequences; document ids stay whole."""
        if self.sequence_group is None:
            return batch
        tokens = self.sequence_group.span(batch["input_ids"].shape[1])
        return batch | {name: batch[name][:, tokens] for name in ("input_ids", "labels")}

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device asynchronously, through pinned memory."""
        if self.ranks.device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self.ranks.device, non_blocking=True)

    def _clip_gradients(self) -> torch.Tensor:
        """Clip the gradients at stage 0, and make the optimizer skip a step that is not finite."""
        limit = self.config.optimizer.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.found_inf = (~norm.isfinite()).float()
        return norm


def _auxiliary_loss(outputs: CausalOutput) -> torch.Tensor | None:
    """Return the layers' auxiliary loss; None for models of transformers, which have none."""
    return getattr(outputs, "auxiliary_loss", None)
