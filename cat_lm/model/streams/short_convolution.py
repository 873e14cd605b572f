"""The short convolution of recurrent layers: one filter for each channel, and SiLU after it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.context import Context
from cat_lm.ops import BACKENDS, choose_backend, convolve


def convolve_channels(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    context: Context,
    *,
    name: str,
) -> Tensor:
    """Convolve each channel of x [B, T, C] along time, after the inputs that the state holds.

    Args:
        filters: [1, C, W], lag 0 first.
        bias: [1, C].
        name: of the last W−1 inputs in the state.
    """
    x = context.without_padding(x)[:, :, None]  # one head of all channels
    window = filters.shape[-1]
    y = convolve(
        "depthwise",
        x,
        filters,
        bias,
        document_ids=context.documents,
        initial_state=context.inputs_before(name, x, window) if window > 1 else None,
        backend=context.conv_backend,
    )
    return y.squeeze(2)


class ShortConvolution(nn.Conv1d):
    """SiLU(bias + sum over j < W of F_j x_{t−j}), in the names and the layout of `nn.Conv1d`.

    `weight` is [C, 1, W] with the oldest lag first.

    Args:
        std: of the normal distribution that the filters start from; none: uniform in ±1/√W, as
            torch draws a convolution. The bias starts at 0.
        starts_as_torch: whether both start as torch draws them, the bias uniform in ±1/√W too.
    """

    no_decay = ("weight", "bias")

    def __init__(
        self,
        channels: int,
        window: int,
        bias: bool,
        std: float | None = None,
        starts_as_torch: bool = False,
    ) -> None:
        super().__init__(channels, channels, window, groups=channels, bias=bias)
        self.std, self.starts_as_torch = std, starts_as_torch

    def initial_values(self) -> dict[str, Tensor]:
        """Return what the parameters start from, by name."""
        if self.starts_as_torch:
            return {}
        weight, bound = torch.empty_like(self.weight), 1 / math.sqrt(self.kernel_size[0])
        drawn = weight.uniform_(-bound, bound) if self.std is None else weight.normal_(0, self.std)
        values = {"weight": drawn}
        return values if self.bias is None else values | {"bias": torch.zeros_like(self.bias)}

    def forward(self, x: Tensor, context: Context, name: str = "inputs") -> Tensor:
        """Compute [B, T, C] of x [B, T, C].

        Args:
            name: of the last inputs in the state.
        """
        filters = self.weight.transpose(0, 1).flip(-1)
        bias = None if self.bias is None else self.bias[None]
        before = 0
        if context.group is not None:
            before = self.kernel_size[0] - 1
            (x,) = context.group.with_halo(before, x)
            context = context.part(before)
        y = convolve_channels(x, filters, bias, context, name=name)
        return F.silu(y[:, before:] if before else y)


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
