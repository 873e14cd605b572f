"""Initialization of the layers of Mamba and Mamba-2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Starts:
    """The initialization of the parameters of a Mamba or Mamba-2 layer.

    Attributes:
        fastest, slowest: the bounds of Δ, which is spread evenly in its logarithm.
        floor: what smaller Δ are raised to.
        layers: by whose root the output's projection is divided; None for not at all.
        by: family, linear layers from the model's normal distribution but for Δ's and the
            output's; torch, all linear layers and the convolution as torch draws them, but for
            these two; zoology, as torch but for the linear layers, which start as the model's.
    """

    fastest: float = 0.1
    slowest: float = 1e-3
    floor: float = 0.0
    layers: int | None = None
    by: str = "family"

    def steps(self, count: int) -> Tensor:
        """Draw softplus⁻¹(Δ) [count]."""
        low, high = math.log(self.slowest), math.log(self.fastest)
        steps = (low + (high - low) * torch.rand(count)).exp().clamp(min=self.floor)
        return steps + torch.log(-torch.expm1(-steps))

    def output(self, weight: Tensor) -> Tensor:
        """Draw a projection that writes to the residual stream, as torch draws a linear layer."""
        bound = 1 / math.sqrt(weight.shape[1])
        if self.layers is not None:
            bound /= math.sqrt(self.layers)
        return torch.empty_like(weight).uniform_(-bound, bound)
