"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from cat_lm.config import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of a step (the first is 1, the last is `config.total_steps`).

    Linear warm-up from `initial_lr`, reaching `lr` at the last warm-up step. Then `constant`;
    `cosine` down to `min_lr` at the last step; or `wsd`: constant, and linear to `min_lr` over
    the last decay steps (warm-up, stable, decay; arXiv:2404.06395).
    """
    optimizer = config.optimizer
    warmup = config.steps_of("warmup")
    if step <= warmup:
        return optimizer.initial_lr + (optimizer.lr - optimizer.initial_lr) * step / warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    if optimizer.schedule == "cosine":
        share = cosine(step - warmup, config.total_steps - warmup)
    else:
        share = min(1.0, max(0, config.total_steps - step) / config.steps_of("decay"))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * share


def cosine(step: int, steps: int) -> float:
    """Return (1 + cos(pi step / steps)) / 2, which falls from 1 to 0; 0 after `steps`."""
    done = min(1.0, step / max(1, steps))
    return (1 + math.cos(math.pi * done)) / 2
