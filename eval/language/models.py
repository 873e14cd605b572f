"""The models of `configs/study/models.yaml`: named overrides of a scale's recipe."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cat_lm.config import RunConfig
from cat_lm.core.readers import read_yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "configs/study/models.yaml"
NOPE = "_nope"  # The suffix of a model without positions.
POSITIONED = ("attention", "tfpp", "bytes")  # The families that have RoPE by default.


@functools.cache
def _file() -> dict[str, Any]:
    return read_yaml(FILE)


def _entry(model: str) -> dict[str, Any]:
    return _file()["models"][model.removesuffix(NOPE)]


def label(model: str) -> str:
    """Return a model's display name."""
    return _entry(model)["label"] + ", NoPE" * model.endswith(NOPE)


def in_order(models: Iterable[str]) -> tuple[str, ...]:
    """Return models in the file's order, those without positions last."""
    known = list(_file()["models"])
    return tuple(
        sorted(set(models), key=lambda m: (known.index(m.removesuffix(NOPE)), m.endswith(NOPE)))
    )


@functools.cache
def configuration(
    model: str,
    recipe: str,
    data: str,
    tokens: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    output_dir: str = "runs/study",
) -> RunConfig:
    """Return a model's configuration.

    Args:
        recipe: `cpu` or `gpu`.
        data: prepared by data_prep.
        tokens: number of training tokens, the warm-up being a twentieth of them; None: as the
            recipe says.
        lr: with the recipe's ratio of the least rate to it; None: the recipe's.
    """
    entry = dict(_entry(model))
    family = entry.pop("family", "attention")
    of_optimizer = entry.pop("optimizer", {})
    del entry["label"]
    values = {name: dict(section) for name, section in _file()["recipes"][recipe].items()}
    for name, section in _file()["families"][family][recipe].items():
        values[name] |= section
    values["model"] |= entry
    if family in POSITIONED:
        values["model"]["position_embedding"] = "none" if model.endswith(NOPE) else "rope"
    values["data"] |= {"path": data}
    values["train"] |= {"seed": seed, "output_dir": output_dir}
    values["optimizer"] |= of_optimizer
    optimizer = values["optimizer"]
    if tokens is not None:
        values["train"]["max_tokens"] = tokens
        optimizer |= {"warmup_steps": None, "warmup_tokens": tokens // 20}
    if lr is not None:
        optimizer |= {"lr": lr, "min_lr": lr * optimizer["min_lr"] / optimizer["lr"]}
    return RunConfig.model_validate(values)


def deciding(config: RunConfig) -> dict[str, Any]:
    """Return the configuration values that decide a training's results; no paths or logging."""
    values = config.model_dump(mode="json")
    values["data"].pop("path")
    for section in ("logging", "checkpoint"):
        values.pop(section)
    for key in ("output_dir", "resume", "reset_optimizer", "log_every_steps"):
        values["train"].pop(key)
    return values
