"""Choose the methods by which a model's positions are scaled, and check what a model got."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cat_lm.core.errors import UserError
from cat_lm.pretrained.record import read_record

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from eval.length_sweep.options import Options

METHOD_SETS = ("all", "paper")


def resolve_methods(config: PreTrainedConfig, asked: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the requested methods for a model, with `all` and `paper` expanded.

    Raises:
        UserError: a method does not exist for it; the error names those that do.
    """
    from cat_lm.model.rope_scaling import METHODS
    from cat_lm.pretrained.conversion import methods_for

    known = methods_for(config)
    if asked == ("all",):
        return known
    if asked == ("paper",):
        # Figure 1: PI with YaRN's temperature on rotary models, the temperature alone without.
        return known[:1] + tuple(m for m in known if m in ("pi+temperature", "temperature"))
    for method in asked:
        if method not in METHODS:
            every = ", ".join((*METHODS, *METHOD_SETS))
            raise UserError(f"--methods {method}: unknown; known: {every} (the last two alone)")
        if method not in known:
            raise UserError(
                f"--methods {method}: does not exist for model {name}: it has {', '.join(known)}; "
                "'all' takes what exists for each model"
            )
    return tuple(dict.fromkeys(asked))


def check_scaling(
    config: PreTrainedConfig,
    methods: tuple[str, ...],
    name: str,
    training_length: int | None,
    scope: str,
) -> None:
    """Raise UserError if a scaling cannot be made, before anything is computed."""
    from cat_lm.pretrained.conversion import scaled_fields

    scaled = [method for method in methods if method != "none"]
    if scaled and training_length is None:
        raise UserError(f"model {name}: its training length is not known; give --training-length")
    try:
        for method in scaled:
            scaled_fields(config, method, 2, training_length, scope)
    except ValueError as error:
        raise UserError(f"--methods {method}: model {name}: {error}") from None


def refuse_idle_options(asked: Options, methods: Collection[str]) -> None:
    """Raise UserError for scaling options that no requested method uses."""
    if asked.factor is not None and set(methods) == {"none"}:
        raise UserError(
            f"--factor {asked.factor:g}: does nothing with --methods none; give a method too"
        )
    if asked.temperature_scope != "logits" and set(methods) <= {"none", "pi"}:
        raise UserError(
            f"--temperature-scope {asked.temperature_scope}: does nothing with --methods "
            f"{','.join(sorted(methods))}; give a method with a temperature too"
        )


def trained_length(folder: Path, config: PreTrainedConfig) -> int | None:
    """Return the training context length from the export record, else from the configuration."""
    length = getattr(read_record(folder), "context_length", None)
    return length if length is not None else getattr(config, "max_position_embeddings", None)


def checked_scaling(model: PreTrainedModel, fields: dict[str, Any]) -> dict[str, Any]:
    """Read the loaded model's scaling, see `effective_scaling`.

    Raises:
        RuntimeError: it is not what `fields` asked for: a scaling that was dropped on the way would
            give a plausible, wrong number.
    """
    from cat_lm.model.hf.inspection import effective_scaling

    found = effective_scaling(model)
    rope = fields.get("rope_parameters", {})
    temperature = fields.get("attention_temperature", 1.0)
    if found["rope_type"] is None:
        asked = {"attention_temperature": temperature} if fields else {}
    else:
        asked = {
            "rope_type": rope.get("rope_type"),
            "rope_factor": rope.get("factor"),
            "original_length": rope.get("original_max_position_embeddings"),
            "attention_factor": rope.get("attention_factor"),
        }
        if fields.get("temperature_scope") == "rotary":
            asked["attention_factor"] = temperature**-0.5
        elif fields:
            asked["attention_temperature"] = temperature
    for name, value in asked.items():
        own = found[name]
        is_number = isinstance(value, int | float) and own is not None
        is_right = math.isclose(own, value, rel_tol=1e-9) if is_number else own == value
        if value is not None and not is_right:
            raise RuntimeError(f"the loaded model has {name} {own}, not {value}")
    return found


def scaling_text(effective: dict[str, Any]) -> str:
    """Return a loaded model's scaling in a few words."""
    if effective["rope_type"] is None:
        parts = ["no rotary positions"]  # A library's model may have other positions.
    elif effective["rope_type"] == "default":
        parts = ["rope default"]
    else:
        parts = [f"rope {effective['rope_type']} factor {effective['rope_factor']:g}"]
        if effective["original_length"]:
            parts[0] += f" of {effective['original_length']}"
        parts.append(f"attention factor {effective['attention_factor']:.4g}")
    return ", ".join([*parts, f"temperature {effective['attention_temperature']:.4g}"])
