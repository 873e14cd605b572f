"""The short convolution of recurrent models, one filter for each channel and SiLU after it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import short_convolution


class ShortConvolution(nn.Conv1d):
    """SiLU(bias + sum over j < W of F_j x_{t−j}), in the names and the layout of `nn.Conv1d`.

    `weight` is [C, 1, W] with the oldest lag first. Starts as torch draws it, its bias at 0.
    """

    no_decay = ("weight", "bias")

    def __init__(self, channels: int, window: int, bias: bool) -> None:
        super().__init__(channels, channels, window, groups=channels, bias=bias)
        self.conv_backend = "auto"

    def initial_values(self) -> dict[str, Tensor]:
        """Give what the parameters start from, by name."""
        bound = 1 / math.sqrt(self.kernel_size[0])
        values = {"weight": torch.empty_like(self.weight).uniform_(-bound, bound)}
        return values if self.bias is None else values | {"bias": torch.zeros_like(self.bias)}

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        """Compute [B, T, C] of x [B, T, C].

        Args:
            how: document_ids, padding_mask and state, as a mixer takes them.
        """
        filters = self.weight.transpose(0, 1).flip(-1)
        bias = None if self.bias is None else self.bias[None]
        y = short_convolution(
            x[:, :, None], filters, bias, name="inputs", backend=self.conv_backend, **how
        )
        return F.silu(y.squeeze(2))
