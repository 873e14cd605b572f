"""Small runs for tests: a configuration over a prepared folder, and what a run recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def run_values(data: Path, output_dir: Path, **train: Any) -> dict[str, Any]:
    """A configuration that trains in seconds; `train` changes keys of that section."""
    return {
        "model": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "conv_type": "head",
            "conv_window": 4,
            # Dropout makes every step depend on the generators' states.
            "hidden_dropout": 0.1,
        },
        "data": {"path": str(data), "context_length": 32},
        "optimizer": {"lr": 3e-3, "warmup_steps": 3, "weight_decay": 0.1},
        "train": {
            "output_dir": str(output_dir),
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "max_steps": 12,
            "precision": "fp32",
            "log_every_steps": 4,
            **train,
        },
        "validation": {"every_steps": 6, "max_tokens": 512},
        "checkpoint": {"every_steps": 5, "keep_last": 2},
        "logging": {"tensorboard": False},
    }


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple]:
    """(step, loss, gradient norm) of each step and (step, validation loss): what must be exact."""
    return [
        (r["step"], r["val_loss"]) if "val_loss" in r else (r["step"], r["loss"], r["grad_norm"])
        for r in records(run)
    ]
