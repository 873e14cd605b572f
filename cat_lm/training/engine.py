"""The model in DeepSpeed's engine: one optimizer step over one global batch.

The numbers of a step travel to the host behind it, while it computes the next one. DeepSpeed's own
steps ask the device whether the norm is finite and whether to clip, so that the host waits up to
four times. `Bf16Step` and `PartitionedStep` take their place with the same formulas and the same
order of sums, so that the bits are the same, too; the optimizer itself
leaves out a step that is not finite, as fused AdamW does under a gradient scaler.
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
    begins_again_in_fp32,
    documents_apart,
    give_memory,
    optimizer_groups,
    share_buffers,
)
from cat_lm.training.checkpoint.optimizer_state import fill_weights
from cat_lm.training.distributed import Ranks, import_deepspeed, patience, quiet

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from transformers import PreTrainedModel

    from cat_lm.model.hf.causal_lm import CausalOutput

Batch = dict[str, np.ndarray]


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
        """Copy the numbers to the host behind the step, which `started` before its first launch.

        They are float64 on the device: scored tokens, gradient norm, loss summed over them, the
        mean of the layers' own losses if they have any, and the flags. `applied` is False for a
        step of which the host knows that it was skipped.
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
        """Tell the optimizer whether a norm is good, and return an infinite one for a bad one."""
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


def sequence_group(config: RunConfig, ranks: Ranks) -> SequenceGroup | None:
    """Join the P ranks that share this one's sequences, a collective; None for P = 1.

    Raises UserError where P does not divide the ranks.
    """
    parts, shares = config.train.sequence_parallel, config.count_rank_groups(ranks.world_size)
    if parts == 1:
        return None
    timeout = timedelta(minutes=patience(config.train.hang_minutes))
    groups = [
        torch.distributed.new_group(range(share * parts, (share + 1) * parts), timeout=timeout)
        for share in range(shares)
    ]
    return SequenceGroup(parts, ranks.rank % parts, groups[ranks.rank // parts])


def _check_compiler(device: torch.device) -> None:
    """Refuse torch.compile on a CPU without a C++ compiler, with which it writes its code."""
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers):
        raise UserError("train.compile=True: there is no C++ compiler, which a CPU needs for it")


class Engine:
    """Trains `model` by DeepSpeed with `optimizer.name`, in the configuration's precision.

    Every rank begins with the first one's parameters and buffers, whatever its own were.

    The loss is the sum over the scored tokens of the whole global batch, over all ranks and
    accumulation steps, divided by their number; so 1 x 8 and 8 x 1 micro-batches are one step.
    """

    def __init__(self, model: PreTrainedModel, config: RunConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.accumulation_steps = config.accumulation_steps(ranks.world_size)
        self._plain = config.train.zero_stage == 0
        self._objective = config.objective
        apart = documents_apart(config, model, ranks.device)
        # The host has the documents; a GPU that counted them would make it wait.
        self._gives_borders = apart is not None and apart.name != "mask"
        self.sequence_group = sequence_group(config, ranks)
        if self.sequence_group is not None:
            model.set_sequence_group(self.sequence_group)
        sum_products_in_fp32()
        make_process_ready(ranks.device)
        restores = begins_again_in_fp32(config)
        exact = None
        if restores and ranks.is_first:
            exact = {n: w.detach().to("cpu", copy=True) for n, w in model.named_parameters()}
        if config.train.precision == "bf16" and not self._plain:
            model.to(torch.bfloat16)
        give_memory(model, ranks.device)
        model.to(ranks.device).train()
        share_buffers(model, ranks)
        kind, options = optimizers.chosen(config.optimizer)
        groups = optimizer_groups(model, kind, config.optimizer, options)
        optimizer = kind.build(groups, config.optimizer, options)
        with quiet():
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
        # The weights are the same on every rank; the dropout from here on must not be.
        torch.manual_seed(config.train.seed + 1_000_003 * (ranks.rank + 1))
        if config.train.compile:
            _check_compiler(ranks.device)
            # In place: the names in the state dict stay the same.
            model.compile()

    def train_step(self, batch: Batch, lr: float, flags: Sequence[float] = ()) -> StepResult:
        """One optimizer step on this rank's rows of the global batch, waited for."""
        return self.launch_step(batch, lr, flags).result()

    def launch_step(self, batch: Batch, lr: float, flags: Sequence[float] = ()) -> LaunchedStep:
        """One optimizer step on this rank's rows of the global batch.

        The host waits for none of the device's numbers; loss, norm and flags come together by the
        result. (DeepSpeed waits for some of its own in stages 2 and 3: see README.md.)

        Args:
            flags: numbers to be summed over all ranks on the way, without a collective of theirs.
        """
        started = Moment(self.ranks.device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        micro_batches = self._micro_batches(batch)
        scored = self._summed(int((self._own_part(batch)["labels"] != IGNORE_INDEX).sum()))
        # DeepSpeed averages over ranks and accumulation steps; this divisor undoes both.
        share = scored.clamp(min=1) / (self.ranks.world_size * self.accumulation_steps)
        share = share.squeeze()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        norm, auxiliary = total, torch.zeros_like(total)
        for number, micro_batch in enumerate(micro_batches, start=1):
            outputs = self._outputs(micro_batch, num_items_in_batch=share.float())
            loss = self._weighted(outputs)
            total += outputs.loss.detach().double() * share
            if (own := _own_losses(outputs)) is not None:
                passes = self.ranks.world_size * self.accumulation_steps
                auxiliary += own.detach().double() / passes
            if number == self.accumulation_steps:
                # One rank's bad loss makes every rank's gradient norm bad, so all skip the step;
                # no rank has to wait for the others' losses here.
                loss = loss * torch.where(total.isfinite(), 1.0, math.nan)
            self.deepspeed.backward(loss)
            if self._plain and number == self.accumulation_steps:
                norm = self._clip()
            self.deepspeed.step()
        if not self._plain:
            norm = torch.as_tensor(self.deepspeed.get_global_grad_norm())
        collects = getattr(self.model, "collects_losses", False)
        sums = self._summed(total, *([auxiliary] if collects else []), *flags)
        numbers = torch.cat((scored, norm.to(sums).reshape(1), sums))
        applied = self.deepspeed.was_step_applied()
        return LaunchedStep(numbers, applied, collects, started=started)

    def _summed(self, *numbers: float | torch.Tensor) -> torch.Tensor:
        """Sum each number over all ranks, in float64 on the device, which the host goes on from."""
        given = [torch.as_tensor(number, dtype=torch.float64).reshape(1) for number in numbers]
        sums = torch.cat([self._sent(number) for number in given])
        if self.ranks.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """Return the summed losses in nats and the scored tokens of this rank's rows, or part."""
        self.deepspeed.eval()
        total, scored, one = 0.0, 0, torch.ones((), device=self.ranks.device)
        for micro_batch in self._micro_batches(batch):
            total += self._outputs(micro_batch, num_items_in_batch=one).loss.item()
            scored += int((micro_batch["shift_labels"] != IGNORE_INDEX).sum())
        self.deepspeed.train()
        return total, scored

    def _outputs(
        self, micro_batch: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor
    ) -> CausalOutput:
        # The divisor is a tensor, as torch.compile makes a graph for each plain number.
        return self.deepspeed(
            **micro_batch, num_items_in_batch=num_items_in_batch, skip_logits=True, use_cache=False
        )

    def _weighted(self, outputs: CausalOutput) -> torch.Tensor:
        """Return what a micro-batch is trained on: its loss, and the layers' own."""
        own = _own_losses(outputs)
        if own is None:
            return outputs.loss
        # With weight 0 every parameter still has a gradient, which every ZeRO stage waits for.
        return self._objective.token_weight * outputs.loss + self._objective.own_weight * own

    def _micro_batches(self, batch: Batch) -> list[dict[str, torch.Tensor]]:
        size = self.config.train.micro_batch_size
        rows, batch = len(batch["input_ids"]), self._own_part(batch)
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
        moved = [{name: self._sent(tensor) for name, tensor in part.items()} for part in parts]
        if self._gives_borders and self.config.train.compile:
            for part in moved:  # else the first two numbers of documents would get a graph each
                torch._dynamo.maybe_mark_dynamic(part["document_borders"], 0)
        return moved

    def _own_part(self, batch: Batch) -> Batch:
        """Cut this rank's tokens out of whole rows where ranks share them; not the documents."""
        if self.sequence_group is None:
            return batch
        tokens = self.sequence_group.span(batch["input_ids"].shape[1])
        return batch | {name: batch[name][:, tokens] for name in ("input_ids", "labels")}

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the host's tensor to the device, without waiting for what that still computes."""
        if self.ranks.device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.pin_memory()
        return tensor.to(self.ranks.device, non_blocking=True)

    def _clip(self) -> torch.Tensor:
        """Stage 0: clip the reduced gradients; the optimizer skips a step that is not finite."""
        limit = self.config.optimizer.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.found_inf = (~norm.isfinite()).float()
        return norm


def _own_losses(outputs: CausalOutput) -> torch.Tensor | None:
    """Return the layers' own loss; transformers' models, timed beside ours, have none."""
    return getattr(outputs, "auxiliary_loss", None)
