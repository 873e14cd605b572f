"""Short convolutions of channels: those of recurrent layers, and Canon layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.context import Context
from cat_lm.model.rules import canon_places
from cat_lm.ops.convolution.api import convolve

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings


def convolve_channels(
    x: Tensor, filters: Tensor, bias: Tensor | None, context: Context, name: str
) -> Tensor:
    """Convolve each channel of x [B, T, C] along time, after the inputs that the state holds.

    Padding is read as zeros. Where ranks share sequences, the tokens before x are another's.

    Args:
        filters: [1, C, W], lag 0 first.
        bias: [1, C].
        name: the name of the stored last W−1 inputs.
    """
    window, halo = filters.shape[-1], 0
    if context.group is not None:
        halo = window - 1
        (x,) = context.group.with_halo(halo, x)
        context = context.part(halo)
    x = context.without_padding(x)[:, :, None]  # All channels form one head.
    y = convolve(
        "depthwise",
        x,
        filters,
        bias,
        document_ids=context.documents,
        positions=context.document_positions,
        initial_state=context.inputs_before(name, x, window) if window > 1 else None,
        backend=context.conv_backend,
    )
    y = y.squeeze(2)
    return y[:, halo:] if halo else y


class ShortConvolution(nn.Conv1d):
    """SiLU(bias + sum over j < W of F_j x_{t−j}), in the names and the layout of `nn.Conv1d`.

    `weight` is [C, 1, W] with the oldest lag first.

    Args:
        std: standard deviation of the normal distribution of initial filters; None: uniform in
            ±1/√W, as torch draws a convolution. The bias starts at 0.
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
        if self.starts_as_torch:
            return {}
        weight, bound = torch.empty_like(self.weight), 1 / math.sqrt(self.kernel_size[0])
        drawn = weight.uniform_(-bound, bound) if self.std is None else weight.normal_(0, self.std)
        values = {"weight": drawn}
        return values if self.bias is None else values | {"bias": torch.zeros_like(self.bias)}

    def forward(self, x: Tensor, context: Context, name: str = "inputs") -> Tensor:
        """Compute [B, T, C] of x [B, T, C].

        Args:
            name: the name of the stored last W−1 inputs.
        """
        filters = self.weight.transpose(0, 1).flip(-1)
        bias = None if self.bias is None else self.bias[None]
        return F.silu(convolve_channels(x, filters, bias, context, name))


class CanonLayer(nn.Module):
    """Adds to each of `width` channels its convolution by `canon_filter` [1, width, W].

    Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon
    Layers" (arXiv:2512.17351). For channel d of x [B, T, C], with zeros before the start and across
    documents, and lag 0 first:

        canon(x)[b, t, d] = x[b, t, d] + sum over j < W of F[d, j] · x[b, t − j, d]

    | place | of what                                                   | channels     |
    |-------|-----------------------------------------------------------|--------------|
    | A     | what attention reads, after its norm                      | C            |
    | C     | what the MLP reads, after its norm                        | C            |
    | D     | what its activation reads; of a gated MLP gate and values | I, gated 2 I |

    The place B, queries, keys and values before the rotation, is `conv_type: depthwise`: the same
    functions, which with `conv_init: residual` start alike.
    """

    no_decay = ("canon_filter",)

    def __init__(self, place: str, width: int, window: int):
        super().__init__()
        self.state_name = f"canon_{place}"
        self.canon_filter = nn.Parameter(torch.zeros(1, width, window))

    def forward(self, hidden_states: Tensor, context: Context) -> Tensor:
        """Convolve [B, T, width] and add it; padding is read as zeros."""
        name, real = self.state_name, context.without_padding(hidden_states)
        return real + convolve_channels(hidden_states, self.canon_filter, None, context, name)


class CanonBlock:
    """Places Canon layers in a family's block.

    The module's name is `canon`, of which A, C and D are those that the configuration names;
    without any there is no such module.
    """

    def _add_canon(self, config: AttentionSettings, inner: int) -> None:
        """Build the layers; `inner` is the number of channels that the activation reads."""
        widths = {"A": config.hidden_size, "C": config.hidden_size, "D": inner}
        self.canon = None
        if places := canon_places(config):
            self.canon = nn.ModuleDict(
                {place: CanonLayer(place, widths[place], config.canon_window) for place in places}
            )

    def _with_canon(self, place: str, hidden_states: Tensor, context: Context) -> Tensor:
        if self.canon is None or place not in self.canon:
            return hidden_states
        return self.canon[place](hidden_states, context)
