"""A run's configuration, with what follows from it: steps, micro-batches, DeepSpeed's settings."""

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

# Gradients that are reduced together. DeepSpeed's own 5e8 are all that a model of 370M has: their
# reduction would begin when the backward pass ends, beside which it should be.
GRADIENT_BUCKET = 10**8


class _Named(BaseModel):
    architecture: Annotated[Any, entry_of(architectures.ARCHITECTURES)] = architectures.DEFAULT


def _by_architecture(values: Any, check: ValidatorFunctionWrapHandler) -> ModelSection:
    if not isinstance(values, dict):
        return check(values)
    name = _Named.model_validate(values).architecture
    return architectures.get(name).Section.model_validate(values)


class RunConfig(Section):
    """Everything that decides a run. `load_config` makes one; `save` writes it resolved."""

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
        """Return the steps of the run; a budget in tokens is never exceeded (but for one step)."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        return max(1, self.train.max_tokens // self.tokens_per_step)

    def steps_of(self, name: Literal["warmup", "decay"]) -> int:
        """Return the length of the warm-up or of WSD's decay in steps, however it was given."""
        steps = getattr(self.optimizer, f"{name}_steps")
        tokens = getattr(self.optimizer, f"{name}_tokens") or 0
        return math.ceil(tokens / self.tokens_per_step) if steps is None else steps

    def row_shares(self, world_size: int) -> int:
        """Return how many groups of ranks divide a batch: P ranks have each sequence together.

        Raises UserError where P, `train.sequence_parallel`, does not divide the ranks.
        """
        parts = self.train.sequence_parallel
        if world_size % parts:
            raise UserError(
                f"train.sequence_parallel={parts}: must divide the number of ranks, {world_size}"
            )
        return world_size // parts

    def accumulation_steps(self, world_size: int) -> int:
        """Return how many micro-batches a rank computes per step; `auto` counts as 1 sequence.

        Raises UserError where ranks, or sequences, do not divide into whole groups.
        """
        shares = self.row_shares(world_size)
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
        """Return this configuration with `auto` decided."""
        train = self.train.model_copy(update={"precision": precision})
        return self.model_copy(update={"train": train})

    def with_micro_batch(self, size: int) -> RunConfig:
        """Return this configuration with another micro-batch."""
        train = self.train.model_copy(update={"micro_batch_size": size})
        return self.model_copy(update={"train": train})

    def as_trained(self, section: ModelSection) -> ModelSection:
        """Return the section of this run's model as a step computes it."""
        return section.model_copy(update=dict(self.objective.section))

    @property
    def objective(self) -> Objective:
        return self.architecture.objective(self.model, self.train)

    def deepspeed(self, world_size: int) -> dict[str, Any]:
        """Return DeepSpeed's configuration; precision must be decided.

        In bf16, ZeRO 1-3 keep bf16 parameters with fp32 master weights, accumulate and reduce
        gradients in fp32. DeepSpeed refuses that mix without ZeRO, so stage 0 keeps fp32
        parameters and computes under autocast.
        """
        stage = self.train.zero_stage
        bf16 = self.train.precision == "bf16"
        # One rank sends nothing, and DeepSpeed would round all the same.
        sent_as = self.train.gradient_communication if world_size > 1 else "fp32"
        return {
            # It counts the ranks that share a sequence as if each had its own.
            "train_batch_size": self.train.global_batch_size * self.train.sequence_parallel,
            "train_micro_batch_size_per_gpu": self.train.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation_steps(world_size),
            # DeepSpeed knows few classes of optimizers; tests hold ours to the same results.
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": stage,
                "overlap_comm": stage >= 2,
                "reduce_bucket_size": GRADIENT_BUCKET,
            },
            # Immediately: a gradient goes into its fp32 sum as it comes, and is kept no longer.
            "bf16": {
                "enabled": bf16 and stage > 0,
                "check_grad_overflow": True,
                "immediate_grad_update": True,
            },
            "torch_autocast": {"enabled": bf16 and stage == 0, "dtype": "bfloat16"},
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": sent_as,
            # Stage 0's gradients are clipped by the engine, which must see their norm first.
            "gradient_clipping": self.optimizer.grad_clip if stage > 0 else 0.0,
            "steps_per_print": None,
            "timers": {"throughput": {"enabled": False}},  # it waits for the device twice a pass
        }

    def save(self, path: Path | str) -> None:
        """Write the resolved configuration as YAML. Raises UserError, as `check_replaceable`."""
        check_replaceable(path)
        write_text(path, yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


def check_replaceable(path: Path | str) -> None:
    """Check that a configuration may be saved at a path.

    Raises UserError where a file stands there that is not as a run writes its sections, such as
    somebody's own YAML with its comments.
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
    """Compare two dumped configurations: dotted name to (old value, new value)."""
    changes = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changes |= changed_values(a, b, f"{prefix}{key}.")
        elif a != b:
            changes[prefix + key] = (a, b)
    return changes
