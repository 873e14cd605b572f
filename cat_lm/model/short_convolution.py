"""The short convolution of recurrent models, one filter for each channel and SiLU after it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.modules.context import short_convolution
from cat_lm.model.sequence import SequenceGroup
from cat_lm.ops import BACKENDS, choose_backend


class ShortConvolution(nn.Conv1d):
    """SiLU(bias + sum over j < W of F_j x_{t−j}), in the names and the layout of `nn.Conv1d`.

    `weight` is [C, 1, W] with the oldest lag first. Its bias starts at 0.

    Args:
        std: of the normal distribution that the filters start from; none: uniform in ±1/√W, as
            torch draws a convolution.
    """

    no_decay = ("weight", "bias")
    sequence_group: SequenceGroup | None = None

    def __init__(self, channels: int, window: int, bias: bool, std: float | None = None) -> None:
        super().__init__(channels, channels, window, groups=channels, bias=bias)
        self.conv_backend, self.std = "auto", std

    def initial_values(self) -> dict[str, Tensor]:
        """Return what the parameters start from, by name."""
        weight, bound = torch.empty_like(self.weight), 1 / math.sqrt(self.kernel_size[0])
        drawn = weight.uniform_(-bound, bound) if self.std is None else weight.normal_(0, self.std)
        values = {"weight": drawn}
        return values if self.bias is None else values | {"bias": torch.zeros_like(self.bias)}

    def forward(self, x: Tensor, name: str = "inputs", **how: Any) -> Tensor:
        """Compute [B, T, C] of x [B, T, C].

        Args:
            name: of the last inputs in the state.
            how: document_ids, padding_mask and state, as a mixer takes them.
        """
        filters = self.weight.transpose(0, 1).flip(-1)
        bias = None if self.bias is None else self.bias[None]
        before = 0
        if self.sequence_group is not None:
            before = self.kernel_size[0] - 1
            (x,) = self.sequence_group.with_halo(before, x)
            how |= {"document_ids": self.sequence_group.part(how.get("document_ids"), before)}
        y = short_convolution(
            x[:, :, None], filters, bias, name=name, backend=self.conv_backend, **how
        )
        return F.silu((y[:, before:] if before else y).squeeze(2))


def describe_backend(
    window: int,
    channels: Iterable[int],
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> str:
    """Describe in one line what computes short convolutions of so many channels, and why.

    Raises:
        ValueError: the backend asked for cannot serve.
    """
    lines = []
    for count in channels:
        shape = {"window": window, "heads": 1, "head_dim": count}
        choice = choose_backend("depthwise", device=device, dtype=dtype, backend=backend, **shape)
        what = BACKENDS.get(choice.name).describe("depthwise", dtype, window)
        lines.append(f"short (W={window}): {choice.name}, {choice.reason}; {what}")
    return "; ".join(dict.fromkeys(lines))
