"""The run's configuration: typed and validated YAML, `a.b=c` overrides, DeepSpeed's config.

A run is one YAML file. `base: other.yaml` (relative to the file) takes another file's values
first; the override `base=FILE` puts another base in its place. Overrides come last. All errors are
gathered and shown at once; an unknown key is an error that names the nearest known one. This module
imports neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    SerializeAsAny,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from cat_lm import architectures
from cat_lm.architectures import Architecture, ModelSection
from cat_lm.config_rules import inconsistencies
from cat_lm.config_sections import (
    CheckpointSection,
    DataSection,
    LoggingSection,
    OptimizerSection,
    Section,
    TrainSection,
    ValidationSection,
)
from cat_lm.errors import UserError
from cat_lm.io.files import write_text
from cat_lm.io.own_files import set_aside
from cat_lm.io.readers import clipped, parse_yaml, read_text, read_yaml, resolve, short
from cat_lm.ops.landmark.options import DENSE

# A chain of files; more of them are a mistake.
_MOST_BASES = 32
# Gradients that are reduced together. DeepSpeed's own 5e8 are all that a model of 370M has: their
# reduction would begin when the backward pass ends, beside which it should be.
GRADIENT_BUCKET = 10**8
_BASE = "base="  # begins the override that names another base
_MOST_LINES = 20


def _known_architecture(name: Any) -> Any:
    if name not in architectures.names():
        raise ValueError(f"must be one of {', '.join(architectures.names())}")
    return name


class _Named(BaseModel):
    """Hold what of `model:` says which keys the others may be."""

    architecture: Annotated[Any, AfterValidator(_known_architecture)] = architectures.DEFAULT


def _by_architecture(values: Any, check: ValidatorFunctionWrapHandler) -> ModelSection:
    """Read `model:` as the section of the architecture that it names."""
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
        """The family of the model."""
        return architectures.get(self.model.architecture)

    def num_parameters(self, vocab_size: int) -> int:
        """Count the model's parameters; `model.vocab_size` comes before the tokenizer's."""
        return self.architecture.num_parameters(self.model, vocab_size)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.context_length

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; a budget in tokens is never exceeded (but for one step)."""
        if self.train.max_steps is not None:
            return self.train.max_steps
        return max(1, self.train.max_tokens // self.tokens_per_step)

    def steps_of(self, name: Literal["warmup", "decay"]) -> int:
        """The length of the warm-up or of WSD's decay in steps, whichever way it was given."""
        steps = getattr(self.optimizer, f"{name}_steps")
        tokens = getattr(self.optimizer, f"{name}_tokens")
        if steps is not None:
            return steps
        return math.ceil((tokens or 0) / self.tokens_per_step)

    def row_shares(self, world_size: int) -> int:
        """Into how many shares ranks divide the sequences of a batch: P of them have one together.

        Raises:
            UserError: `train.sequence_parallel`, P, does not divide the ranks.
        """
        parts = self.train.sequence_parallel
        if world_size % parts:
            raise UserError(
                f"train.sequence_parallel={parts}: must divide the number of ranks, {world_size}"
            )
        return world_size // parts

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches a rank computes per step.

        Raises:
            UserError: the global batch does not divide into whole micro-batches, or ranks not into
                groups that share sequences.
        """
        shares = self.row_shares(world_size)
        per_pass = self.train.micro_batch_size * shares
        if self.train.global_batch_size % per_pass:
            parts = self.train.sequence_parallel
            ranks = "ranks" if parts == 1 else "ranks / train.sequence_parallel"
            number = f"{world_size}" if parts == 1 else f"{world_size} / {parts}"
            raise UserError(
                f"train.global_batch_size={self.train.global_batch_size} is not a multiple of "
                f"train.micro_batch_size x {ranks} = {self.train.micro_batch_size} x {number} "
                f"= {per_pass}"
            )
        return self.train.global_batch_size // per_pass

    def with_precision(self, precision: Literal["bf16", "fp32"]) -> RunConfig:
        """This configuration with `auto` decided."""
        train = self.train.model_copy(update={"precision": precision})
        return self.model_copy(update={"train": train})

    def as_trained(self, section: ModelSection) -> ModelSection:
        """Give the section of this run's model as a step computes it.

        That is with attention to all keys where landmarks are only taught.
        """
        if self.train.landmark_loss not in DENSE:
            return section
        # Which SDPA computes, whatever computes chosen blocks.
        dense = {"attention": "softmax", "attn_implementation": "sdpa"}
        return section.model_copy(update={"attention_options": None} | dense)

    def deepspeed(self, world_size: int) -> dict[str, Any]:
        """DeepSpeed's configuration, derived here and nowhere else; precision must be decided.

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

    def save(self, path: Path | str) -> Path | None:
        """Write the resolved configuration as YAML.

        Returns:
            Where a file went that stood there and was no resolved configuration: someone's own
            YAML, with its comments, may lie in the run's folder.
        """
        path, aside = Path(path), None
        if os.path.lexists(path) and not _is_dumped(path):
            aside = set_aside(path)
        write_text(path, self.to_yaml())
        return aside

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def _is_dumped(path: Path) -> bool:
    """Tell whether a file is what a program writes of its own values: no comment, no choice."""
    try:
        text = read_text(path)
        return yaml.safe_dump(parse_yaml(text, str(path)), sort_keys=False) == text
    except UserError:
        return False


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run's configuration.

    Args:
        path: a YAML file; its `base:` names another one to start from.
        overrides: strings `section.key=value`, the value in YAML syntax; the last one wins.
            `base=FILE`, from the working directory, takes the place of the file's own `base:`.

    Raises:
        UserError: with one line for every error found.
    """
    bases = [text for text in overrides if text.startswith(_BASE)]
    other = bases[-1].removeprefix(_BASE) if bases else None
    values = _read_with_bases(Path(path), (), other)
    errors: list[str] = []
    # What architecture it is decides which keys there are.
    for override in sorted(overrides, key=lambda o: not o.startswith("model.architecture=")):
        if not override.startswith(_BASE):
            _apply_override(values, override, errors)
    errors += _unknown_keys(values)
    config = None
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        errors += [_describe(e) for e in found if e["type"] != "extra_forbidden"]
    if config is not None:
        errors += inconsistencies(config)
    if errors:
        if len(errors) > _MOST_LINES:
            errors[_MOST_LINES:] = [f"… and {len(errors) - _MOST_LINES} more"]
        lines = errors[0] if len(errors) == 1 else "".join(f"\n  {line}" for line in errors)
        raise UserError(f"{path}: {lines}")
    return config


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


def _read_with_bases(
    path: Path, seen: tuple[Path, ...], other: str | None = None
) -> dict[str, Any]:
    """Read a file's values over those of its base, or of `other` in its base's place."""
    place = resolve(path)
    if place in seen:
        raise UserError(f"{place}: 'base' leads back to the file itself")
    if len(seen) > _MOST_BASES:
        raise UserError(f"{place}: is the base of a base of …, more than {_MOST_BASES} of them")
    values = read_yaml(place if seen else path, "configuration file")
    if not isinstance(values, dict):
        found = "is empty" if values is None else f"holds {_kind(values)}"
        raise UserError(f"{path}: {found}; must hold sections such as 'model:' and 'train:'")
    base = values.pop("base", None)
    if base is None:
        if other is not None:
            raise UserError(f"override {short(_BASE + other)}: {path} has no base: to replace")
        return values
    base, folder = (base, place.parent) if other is None else (other, Path())
    if not isinstance(base, str) or not base.strip():
        raise UserError(f"{path}: base={short(base)}: must be a file name")
    return _merged(_read_with_bases(folder / base, (*seen, place)), values)


def _kind(value: Any) -> str:
    return f"a list, {short(value)}" if isinstance(value, list) else short(value)


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key. A key's value is replaced whole: a mixture is one value."""
    result = dict(base)
    for section, content in values.items():
        both = isinstance(content, dict) and isinstance(result.get(section), dict)
        result[section] = {**result[section], **content} if both else content
    return result


def _apply_override(values: dict[str, Any], override: str, errors: list[str]) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot or not key or "." in key:
        errors.append(f"override {short(override)}: must have the form section.key=value")
        return
    try:
        value = text if _is_text(values, section, key, text) else parse_yaml(text, short(override))
    except UserError as error:
        errors.append(f"override {error}")
        return
    if not isinstance(values.get(section, {}), dict):
        return  # reported with the section itself
    values[section] = {**values.get(section, {}), key: value}


def _is_text(values: dict[str, Any], section: str, key: str, text: str) -> bool:
    """Tell whether a key takes any text, such as a path: `#` and `:` mean nothing in it."""
    if section not in RunConfig.model_fields:
        return False
    known = _section_of(values, section).model_fields.get(key)
    if known is None:
        return False
    # A key that may be left out is still emptied by YAML's word for it.
    return known.annotation is str or (known.annotation == str | None and text != "null")


def _section_of(values: dict[str, Any], name: str) -> type[Section]:
    """Find a section's class; of an architecture that is not known, what all have."""
    content = values.get(name, {})
    if name == "model" and isinstance(content, dict):
        asked = content.get("architecture", architectures.DEFAULT)
        if asked in architectures.names():
            return architectures.get(asked).Section
    return RunConfig.model_fields[name].annotation


def known_keys(values: dict[str, Any]) -> dict[str, list[str]]:
    """List the keys of every section of a configuration with these values."""
    return {name: list(_section_of(values, name).model_fields) for name in RunConfig.model_fields}


def _unknown_keys(values: dict[str, Any]) -> list[str]:
    known = known_keys(values)
    dotted = [f"{section}.{key}" for section, keys in known.items() for key in keys]
    errors = []
    for section, content in values.items():
        if section not in known:
            errors.append(_unknown(section, list(known)))
        elif not isinstance(content, dict):
            errors.append(f"{clipped(section)}: must be a section with keys, not {short(content)}")
        elif _section_of(values, section) is not ModelSection:
            names = [f"{section}.{key}" for key in content if key not in known[section]]
            errors += [_unknown(name, dotted, _owner(name)) for name in names]
    return errors


def _owner(name: str) -> str:
    """Name the architectures that have a key of `model:`, for the error of one that has not."""
    section, _, key = name.partition(".")
    owners = [
        other
        for other in architectures.names()
        if section == "model" and key in architectures.get(other).Section.model_fields
    ]
    return f" (it is one of model.architecture={' or '.join(owners)})" if owners else ""


def _unknown(name: str, known: list[str], owner: str = "") -> str:
    # A right key in the wrong section is nearer than a similar key in this one.
    same_key = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    # A key of another architecture is no slip, and may well have no counterpart here.
    cutoff = 0.8 if owner else 0.0
    near = same_key or difflib.get_close_matches(name[:60], known, n=1, cutoff=cutoff)
    nearest = f"; the nearest known one is {near[0]}" if near else ""
    return f"{clipped(name)}: unknown key{owner}{nearest}"


def _describe(error: dict[str, Any]) -> str:
    # Unions add their member's name to the location; the first two parts name the key, and of a
    # mixture the third the folder.
    parts = 3 if error["loc"][:2] == ("data", "mixture") else 2
    name = clipped(".".join(str(part) for part in error["loc"][:parts]))
    if error["type"] == "missing":
        return f"{name}: is missing"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message = f"{message[0].lower()}{message[1:]}"
    if message.startswith("rope_parameters."):
        return f"model.{message}"  # which names the key inside, and its value
    return f"{name}={clipped(repr(error['input']))}: {message}"
