"""The base of GLA, DeltaNet and Gated DeltaNet, in flash-linear-attention's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.model.context import Context
from cat_lm.model.streams.short_convolution import ShortConvolution
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.recurrence import backends
from cat_lm.ops.recurrence.backends import Recurrence

Operator = Callable[..., Any]  # a recurrence, as those of `cat_lm.ops.recurrence`


class GatedNorm(nn.RMSNorm):
    """RMSNorm of each head, times SiLU of a gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * F.silu(gate)


class LinearMixer(nn.Module):
    """Projections, short convolutions and the choice of an operator.

    Args:
        width: C.
        heads: H.
        keys, values: channels of all keys and of all values.
        window: W of the short convolutions of queries, keys and values; 0 for none.
        conv_std: of the filters at the start, see `ShortConvolution`.
        is_gated: whether the output is multiplied by SiLU of a projection.
        operator: computes the recurrence in place of the backend that suits the device.

    Attributes:
        recurrence: what is computed.
    """

    recurrence: ClassVar[Recurrence]

    def __init__(
        self,
        width: int,
        heads: int,
        keys: int,
        values: int,
        *,
        window: int = 0,
        conv_std: float | None = None,
        is_gated: bool = True,
        operator: Operator | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.own_operator = heads, operator
        for stream, channels in zip(STREAMS, (keys, keys, values), strict=True):
            self.add_module(f"{stream}_proj", nn.Linear(width, channels, bias=False))
            if window:
                convolution = ShortConvolution(channels, window, bias=False, std=conv_std)
                self.add_module(f"{stream}_conv1d", convolution)
        if is_gated:
            self.g_proj = nn.Linear(width, values, bias=False)
        self.o_proj = nn.Linear(values, width, bias=False)

    def streams(self, x: Tensor, context: Context) -> list[Tensor]:
        """Make queries, keys and values [B, T, H, D] of x [B, T, C]."""
        made = []
        for stream in STREAMS:
            y = self.get_submodule(f"{stream}_proj")(x)
            if hasattr(self, f"{stream}_conv1d"):
                y = self.get_submodule(f"{stream}_conv1d")(y, context, name=f"{stream}_inputs")
            made.append(self.of_heads(y))
        return made

    def of_heads(self, x: Tensor) -> Tensor:
        """Split the channels, [B, T, H D] to [B, T, H, D]."""
        return x.unflatten(-1, (self.heads, -1))

    def operator(self, v: Tensor, backend: str) -> Operator:
        """Choose what computes the recurrence of such values. Raises ValueError: it cannot.

        Args:
            backend: `context.mixer_backend`.
        """
        if self.own_operator is not None:
            return self.own_operator
        if backend != "auto" or v.is_cuda:  # on a CPU the operators choose by themselves
            backend = backends.choose_backend(self.recurrence, v.device, v.dtype, backend).name
        return self.computed_by(backend)

    def computed_by(self, backend: str) -> Operator:
        """Return a backend's operator; that of auto chooses by its tensors."""
        raise NotImplementedError
