"""The model in DeepSpeed's engine: one optimizer step over one global batch."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch

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
    parameter_groups,
    share_buffers,
)
from cat_lm.training.checkpoint.optimizer_state import fill_weights
from cat_lm.training.distributed import Ranks, import_deepspeed, patience, quiet
from cat_lm.training.steps import Bf16Step, LaunchedStep, Moment, PartitionedStep, StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cat_lm.model.hf.causal_lm import CausalOutput

Batch = dict[str, np.ndarray]


def sequence_group(config: RunConfig, ranks: Ranks) -> SequenceGroup | None:
    """Join the neighbouring ranks that share this one's sequences, a collective; None for P = 1.

    Raises:
        UserError: P does not divide the ranks.
    """
    parts, shares = config.train.sequence_parallel, config.row_shares(ranks.world_size)
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
    """Trains `model` by DeepSpeed with AdamW, in the configuration's precision.

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
        optimizer = torch.optim.AdamW(
            parameter_groups(model, config.optimizer.weight_decay),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )
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
        result. (DeepSpeed waits for some of its own in stages 2 and 3: see cat_lm/README.md.)

        Args:
            flags: numbers to be summed over all ranks on the way, without a collective of theirs.
        """
        started = Moment(self.ranks.device)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
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
        """(sum of the negative log-likelihoods in nats, scored tokens) of this rank's rows.

        Of its part of them where ranks share sequences.
        """
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
        """Compute the losses of a micro-batch.

        Args:
            num_items_in_batch: a tensor, as torch.compile makes a graph for each plain number.
        """
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
        """Stage 0: clip the reduced gradients; AdamW leaves out the step if they are not finite."""
        limit = self.config.optimizer.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.found_inf = (~norm.isfinite()).float()
        return norm


def _own_losses(outputs: CausalOutput) -> torch.Tensor | None:
    """Return the layers' own loss; transformers' models, timed beside ours, have none."""
    return getattr(outputs, "auxiliary_loss", None)
