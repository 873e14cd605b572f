"""A run's configuration, and values derived from it: steps, micro-batches, DeepSpeed's settings."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from cat_lm import architectures
from cat_lm.architectures import Architecture, ModelSection
from cat_lm.config.sections import (
    CheckpointSection,
    DataSection,
    LoggingSection,
    OptimizerSection,
    TrainSection,
    ValidationSection,
)
from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.fields import Section, entry_of
from cat_lm.core.files import write_text
from cat_lm.core.readers import parse_yaml, read_text
from cat_lm.model.attention import Objective

# The number of gradients that are reduced together. DeepSpeed's default of 5e8 is more than a 370M
# model has, so that the reduction would not overlap with the backward pass.
GRADIENT_BUCKET = 10**8


class _Named(BaseModel):
    architecture: Annotated[Any, entry_of(architectures.ARCHITECTURES)] = architectures.DEFAULT


def _by_architecture(values: Any, check: ValidatorFunctionWrapHandler) -> ModelSection:
    if not isinstance(values, dict):
        return check(values)
    name = _Named.model_validate(values).architecture
    return architectures.get(name).Section.model_validate(values)


class RunConfig(Section):
    """The complete configuration of a run; `load_config` returns it and `save` writes it."""

    model: Annotated[SerializeAsAny[ModelSection], WrapValidator(_by_architecture)]
    data: DataSection
    optimizer: OptimizerSection
    train: TrainSection
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    logging: LoggingSection = LoggingSection()

    @property
    def architecture(self) -> Architecture:
        return architectures.get(self.model.architecture)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.context_length

    @property
    def total_steps(self) -> int:
        """Return the number of steps: at least one, and no more than a token budget allows."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        return max(1, self.train.max_tokens // self.tokens_per_step)

    def steps_of(self, name: Literal["warmup", "decay"]) -> int:
        """Return the steps of the warm-up or of WSD's decay, which may be given in tokens."""
        steps = getattr(self.optimizer, f"{name}_steps")
        tokens = getattr(self.optimizer, f"{name}_tokens") or 0
        return math.ceil(tokens / self.tokens_per_step) if steps is None else steps

    def count_rank_groups(self, world_size: int) -> int:
        """Return the number of groups of ranks among which a batch is divided.

        A group has P = `train.sequence_parallel` ranks, which share each sequence. Raises UserError
        where P does not divide the number of ranks.
        """
        parts = self.train.sequence_parallel
        if world_size % parts:
            raise UserError(
                f"train.sequence_parallel={parts}: must divide the number of ranks, {world_size}"
            )
        return world_size // parts

    def accumulation_steps(self, world_size: int) -> int:
        """Return the number of micro-batches per rank and step; `auto` counts as 1 sequence.

        Raises UserError where the ranks or the sequences of a batch cannot be divided evenly.
        """
        shares = self.count_rank_groups(world_size)
        micro = 1 if self.train.micro_batch_size == "auto" else self.train.micro_batch_size
        per_pass = micro * shares
        if self.train.global_batch_size % per_pass:
            is_shared = self.train.sequence_parallel > 1
            ranks = "ranks / train.sequence_parallel" if is_shared else "ranks"
            raise UserError(
                f"train.global_batch_size={self.train.global_batch_size} is not a multiple of "
                f"train.micro_batch_size x {ranks} = {micro} x {shares} "
                f"= {per_pass}"
            )
        return self.train.global_batch_size // per_pass

    def with_precision(self, precision: Literal["bf16", "fp32"]) -> RunConfig:
        """Return the configuration with this precision instead of `auto`."""
        train = self.train.model_copy(update={"precision": precision})
        return self.model_copy(update={"train": train})

    def with_micro_batch(self, size: int) -> RunConfig:
        """Return the configuration with this `train.micro_batch_size`."""
        train = self.train.model_copy(update={"micro_batch_size": size})
        return self.model_copy(update={"train": train})

    def as_trained(self, section: ModelSection) -> ModelSection:
        """Return a model section with the changes that the training objective makes to it."""
        return section.model_copy(update=dict(self.objective.section))

    @property
    def objective(self) -> Objective:
        return self.architecture.objective(self.model, self.train)

    def deepspeed(self, world_size: int) -> dict[str, Any]:
        """Return DeepSpeed's configuration; `train.precision` must not be `auto`.

        In bf16, ZeRO 1-3 keep bf16 parameters with fp32 master weights, accumulate and reduce
        gradients in fp32. DeepSpeed refuses that mix without ZeRO, so stage 0 keeps fp32
        parameters and computes under autocast.
        """
        stage = self.train.zero_stage
        bf16 = self.train.precision == "bf16"
        # A single rank sends nothing, but DeepSpeed would still round.
        sent_as = self.train.gradient_communication if world_size > 1 else "fp32"
        return {
            # DeepSpeed counts every rank as if it had sequences of its own.
            "train_batch_size": self.train.global_batch_size * self.train.sequence_parallel,
            "train_micro_batch_size_per_gpu": self.train.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation_steps(world_size),
            # DeepSpeed accepts few optimizer classes untested; our tests compare its results.
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": stage >= 2,
                "reduce_bucket_size": GRADIENT_BUCKET,
            },
            # A gradient is added to its fp32 sum as soon as it is computed, and then freed.
            "bf16": {
                "enabled": bf16 and stage > 0,
                "check_grad_overflow": True,
                "immediate_grad_update": True,
            },
            "torch_autocast": {"enabled": bf16 and stage == 0, "dtype": "bfloat16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": sent_as,
            # At stage 0 the engine clips, because it must know the norm first.
            "gradient_clipping": self.optimizer.grad_clip if stage > 0 else 0.0,
            "steps_per_print": None,
            "timers": {"throughput": {"enabled": False}},  # They synchronize the device.
        }

    def save(self, path: Path | str) -> None:
        """Write the resolved configuration as YAML. Raises UserError, as `check_replaceable`."""
        check_replaceable(path)
        write_text(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


def check_replaceable(path: Path | str) -> None:
    """Check that a configuration may be saved at a path.

    Raises UserError where another file is there that no run has written, such as a YAML file with
    comments.
    """
    if not os.path.lexists(path):
        return
    text, values = "", None
    try:
        text = read_text(path)
        values = parse_yaml(text, str(path))
    except UserError as error:
        if is_temporary(error):
            raise
    is_run = isinstance(values, dict) and values.keys() & RunConfig.model_fields.keys()
    if not is_run or yaml.safe_dump(values, sort_keys=False) != text:
        raise UserError(
            f"{path}: is no configuration that training wrote, and would be replaced; move it "
            "away, or give another train.output_dir"
        )


def changed_values(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return the differences of two dumped configurations: dotted key -> (old value, new value)."""
    changes = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changes |= changed_values(a, b, f"{prefix}{key}.")
        elif a != b:
            changes[prefix + key] = (a, b)
    return changes
