"""The objective of a training step: the tokens' loss, and losses that layers have of their own.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OWN_WEIGHT = 0.3  # of layers' own losses, where nothing else is said


@dataclass(frozen=True)
class Objective:
    """The loss of a step, token_weight · the tokens' loss + own_weight · the layers' own.

    Attributes:
        name: of the layers' own loss, in metrics and in the log.
        token_weight, own_weight: of the two losses.
        trains_all: whether all weights learn; else only those that the layers' own losses reach.
        section: keys of the model's section by which a step computes otherwise than the model.
        said: the key and value of the configuration that decide it, in messages.
    """

    name: str = "auxiliary_loss"
    token_weight: float = 1.0
    own_weight: float = OWN_WEIGHT
    trains_all: bool = True
    section: Mapping[str, Any] = field(default_factory=dict)
    said: str = "the tokens' loss"
