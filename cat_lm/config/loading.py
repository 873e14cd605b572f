"""Read a run's configuration: typed and validated YAML, with `a.b=c` overrides.

A run is one YAML file. Its key `base: other.yaml` (a path relative to the file) reads the values of
another file first; the override `base=FILE` replaces that file. Overrides are applied last. All
errors are reported together; that of an unknown key names the most similar known one.

`python train.py --keys` prints every key with its default and meaning.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from cat_lm import architectures, optimizers
from cat_lm.architectures import ModelSection
from cat_lm.callbacks import chosen
from cat_lm.config.run import RunConfig
from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.fields import Section
from cat_lm.core.readers import clipped, mismatch_text, parse_yaml, read_yaml, resolve, short
from cat_lm.model import attention
from cat_lm.model.attention import Pattern

_BASE = "base="  # how the override of `base:` begins


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run's configuration.

    Args:
        path: a YAML file; its `base:` names another one to start from.
        overrides: strings `section.key=value`, the value in YAML syntax; the last one wins.
            `base=FILE`, a path from the working directory, replaces the file's `base:`.

    Raises:
        UserError: the configuration has errors; the message has one line for each.
    """
    bases = [text for text in overrides if text.startswith(_BASE)]
    values = _read_with_bases(Path(path), (), bases[-1].removeprefix(_BASE) if bases else None)
    errors: list[str] = []
    # The architecture comes first, because it decides which keys exist.
    for override in sorted(overrides, key=lambda o: not o.startswith("model.architecture=")):
        if override not in bases:
            _apply_override(values, override, errors)
    errors += _unknown_keys(values)
    config = None
    try:
        config = RunConfig.model_validate(values)
        errors += _find_inconsistencies(config)
    except ValidationError as error:
        found = error.errors(include_url=False)
        errors += [_describe(e) for e in found if e["type"] != "extra_forbidden"]
    if errors:
        lines = errors[0] if len(errors) == 1 else "".join(f"\n  {line}" for line in errors)
        raise UserError(f"{path}: {lines}")
    return config


def _read_with_bases(
    path: Path, seen: tuple[Path, ...], other: str | None = None
) -> dict[str, Any]:
    values = read_yaml(path, "configuration file")
    if (place := resolve(path)) in seen:
        raise UserError(f"{place}: 'base' leads back to the file itself")
    if not isinstance(values, dict):
        kind = "a list, " if isinstance(values, list) else ""
        found = "is empty" if values is None else f"holds {kind}{short(values)}"
        raise UserError(f"{path}: {found}; must hold sections such as 'model:' and 'train:'")
    base = values.pop("base", None)
    if base is None:
        if other is not None:
            raise UserError(f"override {short(_BASE + other)}: {path} has no base: to replace")
        return values
    base, folder = (base, place.parent) if other is None else (other, Path())
    if not isinstance(base, str) or not base.strip():
        raise UserError(f"{path}: base={short(base)}: must be a file name")
    return _merge_values(_read_with_bases(folder / base, (*seen, place)), values)


def _merge_values(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Merge sections key by key; a key's value, such as a mixture, is replaced as a whole."""
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
    known = sections_of(values)
    kind = known[section].model_fields.get(key) if section in known else None
    # Text such as a path is no YAML, so that `#` and `:` have no meaning in it. Only `null` resets
    # an optional key.
    is_text = kind and (
        kind.annotation is str or (kind.annotation == str | None and text != "null")
    )
    try:
        value = text if is_text else parse_yaml(text, short(override))
    except UserError as error:
        errors.append(f"override {error}")
        return
    if isinstance(values.get(section, {}), dict):  # Otherwise the section itself is the error.
        values[section] = {**values.get(section, {}), key: value}


def sections_of(values: dict[str, Any]) -> dict[str, type[Section]]:
    """Return the class of every section by name; that of `model:` depends on the architecture."""
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    if isinstance(model := values.get("model", {}), dict):
        asked = model.get("architecture", architectures.DEFAULT)
        if asked in architectures.names():
            sections["model"] = architectures.get(asked).Section
    return sections


def known_keys(values: dict[str, Any]) -> dict[str, list[str]]:
    """Return the keys of every section of a configuration with these values."""
    return {name: list(section.model_fields) for name, section in sections_of(values).items()}


def _unknown_keys(values: dict[str, Any]) -> list[str]:
    known = known_keys(values)
    dotted = [f"{section}.{key}" for section, keys in known.items() for key in keys]
    errors = []
    for section, content in values.items():
        if section not in known:
            errors.append(_unknown_key_text(section, list(known)))
        elif not isinstance(content, dict):
            errors.append(f"{clipped(section)}: must be a section with keys, not {short(content)}")
        elif (
            sections_of(values)[section] is not ModelSection
        ):  # An unknown architecture has no keys.
            names = [f"{section}.{key}" for key in content if key not in known[section]]
            errors += [_unknown_key_text(name, dotted) for name in names]
    return errors


def _unknown_key_text(name: str, known: list[str]) -> str:
    section, _, key = name.partition(".")
    # The same key in another section is a better guess than a similar key in this one.
    near = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    # A key of another architecture is no typing error, and may have no counterpart in this one.
    owners = [
        other
        for other in architectures.names()
        if section == "model" and key in architectures.get(other).Section.model_fields
    ]
    owner = f" (it is one of model.architecture={' or '.join(owners)})" if owners else ""
    near = near or difflib.get_close_matches(name[:60], known, n=1, cutoff=0.8 if owners else 0.0)
    nearest = f"; the nearest known one is {near[0]}" if near else ""
    return f"{clipped(name)}: unknown key{owner}{nearest}"


def _describe(error: Any) -> str:
    # The first two parts of the location name the key; in a mixture the third is the folder.
    # Further parts are names that pydantic adds for the members of a union.
    parts = 3 if error["loc"][:2] == ("data", "mixture") else 2
    name = clipped(".".join(str(part) for part in error["loc"][:parts]))
    if error["type"] == "missing":
        return f"{name}: is missing"
    message = mismatch_text(error)
    if message.startswith("rope_parameters."):
        return f"model.{message}"  # The message names the inner key and its value.
    return f"{name}={clipped(repr(error['input']))}: {message}"


# Checks of several keys together


def _find_inconsistencies(config: RunConfig) -> list[str]:
    patterns = _checked_patterns(config)
    errors = [*_model_problems(config), *_training_problems(config)]
    errors += [problem for pattern in patterns for problem in pattern.objective_problems(config)]
    errors += _schedule_problems(config)
    errors += _optimizer_problems(config)
    errors += _callback_problems(config)
    if not errors:
        errors += _sequence_parallel_problems(config)
        errors += _duration_problems(config)
    return errors


def _checked_patterns(config: RunConfig) -> list[Pattern]:
    # The project's patterns check their keys in `train` even if the model has another pattern.
    names = attention.PATTERNS.own_names()
    chosen = getattr(config.model, "attention", None)
    if chosen in attention.PATTERNS and chosen not in names:
        names = (*names, chosen)
    return [attention.PATTERNS.get(name) for name in names]


def _model_problems(config: RunConfig) -> list[str]:
    architecture, model = config.architecture, config.model
    problems = architecture.problems(model, config.data.context_length)
    found = [f"model.{problem}" for problem in problems]
    if not found and config.data.mask_documents and not model.isolates_documents:
        found.append(
            "data.mask_documents=true: this model cannot keep documents apart "
            f"({architecture.summary(model).words}); set it to false"
        )
    return found


def _training_problems(config: RunConfig) -> list[str]:
    train, data, errors = config.train, config.data, []
    micro = train.micro_batch_size
    if micro != "auto" and train.global_batch_size % micro:
        errors.append(
            f"train.micro_batch_size={train.micro_batch_size}: must divide "
            f"train.global_batch_size={train.global_batch_size}"
        )
    if data.path is None and data.mixture is None:
        errors.append("data: one of path and mixture is needed")
    if data.path is not None and data.mixture is not None:
        errors.append("data: path and mixture exclude each other; set one of them to null")
    if train.compile and train.zero_stage == 3:
        errors.append(
            "train.compile=True: does not go with train.zero_stage=3, whose hooks break it"
        )
    return errors


def _optimizer_problems(config: RunConfig) -> list[str]:
    section, stage = config.optimizer, config.train.zero_stage
    kind, errors = optimizers.get(section.name), []
    known = {field.name for field in dataclasses.fields(kind.Options)}
    for key in optimizers.OWN_KEYS:
        if getattr(section, key) is not None and key not in known:
            errors.append(f"optimizer.{key}: has no effect with optimizer.name={kind.name}")
    if plugins.is_own(kind) and section.options:
        errors.append(
            f"optimizer.options: are of a plugin's optimizer, not of optimizer.name={kind.name}"
        )
    if stage not in kind.zero_stages:
        stages = " or ".join(map(str, kind.zero_stages))
        errors.append(
            f"train.zero_stage={stage}: does not go with optimizer.name={kind.name}; "
            f"set it to {stages}"
        )
    if not errors:
        try:
            optimizers.chosen(section)
        except UserError as error:
            errors.append(str(error))
    return errors


def _callback_problems(config: RunConfig) -> list[str]:
    train, validation, logging, errors = config.train, config.validation, config.logging, []
    if train.profile_steps is not None and train.profile_steps[0] > train.profile_steps[1]:
        errors.append(
            f"train.profile_steps={list(train.profile_steps)}: the first step is after the last"
        )
    for name in ("tasks_every_steps", "tasks_dir", "tasks_include", "tasks_rows"):
        if getattr(validation, name) is not None and not validation.tasks:
            errors.append(f"validation.{name}: has no effect without validation.tasks")
    if validation.tasks and (train.zero_stage == 3 or train.sequence_parallel > 1):
        errors.append(
            "validation.tasks: each rank must hold the whole model and whole sequences; do not go "
            "with train.zero_stage=3 and train.sequence_parallel above 1"
        )
    for name in ("wandb_entity", "wandb_group", "wandb_tags", "wandb_name"):
        if getattr(logging, name) and not logging.wandb_project:
            errors.append(f"logging.{name}: has no effect without logging.wandb_project")
    try:
        chosen(config)
    except UserError as error:
        errors.append(str(error))
    return errors


def _sequence_parallel_problems(config: RunConfig) -> list[str]:
    parts, length = config.train.sequence_parallel, config.data.context_length
    if parts == 1:
        return []
    problems = config.model.division_problems(parts, length)
    if length % parts:
        problems.insert(0, f"must divide data.context_length={length}")
    if config.train.compile:  # Tracing the exchange between ranks is untested.
        problems.append("does not go with train.compile=True; set it to false")
    return [f"train.sequence_parallel={parts}: {problem}" for problem in problems]


def _schedule_problems(config: RunConfig) -> list[str]:
    optimizer = config.optimizer
    is_wsd = optimizer.schedule == "wsd"
    errors = _length_problems(config, "train", "max", required=True)
    errors += _length_problems(config, "optimizer", "warmup", required=False)
    errors += _length_problems(config, "optimizer", "decay", required=is_wsd)
    if not is_wsd and (optimizer.decay_steps or optimizer.decay_tokens):
        errors.append(f"optimizer.schedule={optimizer.schedule}: only 'wsd' has a decay length")
    for name in ("initial_lr", "min_lr"):
        if getattr(optimizer, name) > optimizer.lr:
            errors.append(f"optimizer.{name}={getattr(optimizer, name)}: is above optimizer.lr")
    return errors


def _length_problems(config: RunConfig, section: str, name: str, required: bool) -> list[str]:
    names = (f"{name}_tokens", f"{name}_steps")
    given = [key for key in names if getattr(getattr(config, section), key) is not None]
    both = " and ".join(names)
    if len(given) > 1:
        return [f"{section}: {both} exclude each other; set the one that does not count to null"]
    return [f"{section}: one of {both} is needed"] if required and not given else []


def _duration_problems(config: RunConfig) -> list[str]:
    warmup, decay = config.steps_of("warmup"), config.steps_of("decay")
    if warmup + decay <= config.total_steps:
        return []
    return [
        f"optimizer: warm-up and decay take {warmup} + {decay} steps, but the run has only "
        f"{config.total_steps}; lower optimizer.warmup_steps (or warmup_tokens, or the decay's)"
    ]


# The text of `train.py --keys`

# Keys of a plugin may have other types, which their descriptions explain.
_KINDS = {int: "whole number", float: "number", str: "text"}
_KINDS |= {dict: "{key: value, …}", tuple: "[number, number]"}
_COLUMN = 40  # The comments begin in this column.


class ShowKeys(argparse.Action):
    """Print the configuration keys of an architecture and exit, as --help does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        print(describe_keys(values))
        parser.exit()


def describe_keys(architecture: str) -> str:
    """Return the YAML text of every key of an architecture, with its default and a comment.

    Raises UserError for an unknown architecture.
    """
    if architecture not in architectures.names():
        known = ", ".join(architectures.names())
        raise UserError(f"--keys {architecture}: no such architecture; choose one of {known}")
    lines = []
    for name, section in sections_of({"model": {"architecture": architecture}}).items():
        lines.append(f"{name}:")
        lines += [_format_key(key, field) for key, field in section.model_fields.items()]
    return "\n".join(lines)


def _format_key(key: str, field: FieldInfo) -> str:
    value = "" if field.is_required() else _as_yaml(field.get_default(call_default_factory=True))
    kind = field.annotation
    while typing.get_origin(kind) in (Annotated, typing.Union, types.UnionType):
        kind = typing.get_args(kind)[0]
    words = ["needed"] if field.is_required() else []
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if len(choices) > 1:
        words.append(" | ".join(map(str, choices)))
    elif field.is_required() or field.default is None:
        words.append(_KINDS.get(typing.get_origin(kind) or kind, ""))
    words.append(" ".join((field.description or "").split()))
    comment = "; ".join(filter(None, words))
    said = f"  {key}: {value}".rstrip()
    return f"{said:<{_COLUMN - 1}} # {comment}" if comment else said


def _as_yaml(value: Any) -> str:
    plain = TypeAdapter(Any).dump_python(value, mode="json", fallback=str)
    text = yaml.safe_dump(plain, default_flow_style=True, width=math.inf, sort_keys=False)
    return text.removesuffix("\n...\n").strip()
