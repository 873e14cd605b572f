"""What is wrong with a run's configuration that no single key shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cat_lm.model import attention
from cat_lm.model.attention import Pattern

if TYPE_CHECKING:
    from cat_lm.config.run import RunConfig


def inconsistencies(config: RunConfig) -> list[str]:
    """Return what does not go together, a line each."""
    patterns = _patterns(config)
    errors = [*_model(config), *_training(config)]
    errors += [problem for pattern in patterns for problem in pattern.objective_problems(config)]
    errors += _schedule(config)
    if not errors:
        errors += _sequences(config)
        errors += [problem for pattern in patterns for problem in pattern.row_problems(config)]
        errors += _length(config)
    return errors


def _patterns(config: RunConfig) -> list[Pattern]:
    """List this project's patterns, of which keys of `train` are, and the model's own."""
    names = attention.PATTERNS.own_names()
    chosen = getattr(config.model, "attention", None)
    if chosen in attention.PATTERNS and chosen not in names:
        names = (*names, chosen)
    return [attention.PATTERNS.get(name) for name in names]


def _model(config: RunConfig) -> list[str]:
    architecture, model = config.architecture, config.model
    problems = architecture.problems(model, config.data.context_length)
    found = [f"model.{problem}" for problem in problems]
    if not found and config.data.mask_documents and not model.isolates_documents:
        found.append(
            "data.mask_documents=true: this model cannot keep documents apart "
            f"({architecture.summary(model).words}); set it to false"
        )
    return found


def _training(config: RunConfig) -> list[str]:
    train, data, errors = config.train, config.data, []
    if train.global_batch_size % train.micro_batch_size:
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


def _sequences(config: RunConfig) -> list[str]:
    """Return why ranks cannot share sequences."""
    parts, length = config.train.sequence_parallel, config.data.context_length
    if parts == 1:
        return []
    problems = config.model.division_problems(parts, length)
    if length % parts:
        problems.insert(0, f"must divide data.context_length={length}")
    if config.train.compile:  # never seen to trace the exchanges
        problems.append("does not go with train.compile=True; set it to false")
    return [f"train.sequence_parallel={parts}: {problem}" for problem in problems]


def _schedule(config: RunConfig) -> list[str]:
    optimizer = config.optimizer
    is_wsd = optimizer.schedule == "wsd"
    errors = _one_length(config, "train", "max", required=True)
    errors += _one_length(config, "optimizer", "warmup", required=False)
    errors += _one_length(config, "optimizer", "decay", required=is_wsd)
    if not is_wsd and (optimizer.decay_steps or optimizer.decay_tokens):
        errors.append(f"optimizer.schedule={optimizer.schedule}: only 'wsd' has a decay length")
    for name in ("initial_lr", "min_lr"):
        if getattr(optimizer, name) > optimizer.lr:
            errors.append(f"optimizer.{name}={getattr(optimizer, name)}: is above optimizer.lr")
    return errors


def _one_length(config: RunConfig, section: str, name: str, required: bool) -> list[str]:
    """Check that a length is given in tokens or in steps, not in both."""
    names = (f"{name}_tokens", f"{name}_steps")
    given = [key for key in names if getattr(getattr(config, section), key) is not None]
    both = " and ".join(names)
    if len(given) > 1:
        return [f"{section}: {both} exclude each other; set the one that does not count to null"]
    return [f"{section}: one of {both} is needed"] if required and not given else []


def _length(config: RunConfig) -> list[str]:
    """Refuse a schedule that is longer than the run."""
    warmup, decay = config.steps_of("warmup"), config.steps_of("decay")
    if warmup + decay <= config.total_steps:
        return []
    return [
        f"optimizer: warm-up and decay take {warmup} + {decay} steps, but the run has only "
        f"{config.total_steps}"
    ]
