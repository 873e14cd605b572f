"""Linear attention over feature maps, and the base of GLA, DeltaNet and Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.mixers.parts.attention import Streams, make_convolution
from cat_lm.mixers.parts.base import ConvolutionOptions, FilterOptions, stream_settings
from cat_lm.model.context import Context
from cat_lm.model.streams.short_convolution import ShortConvolution
from cat_lm.ops.convolution.kinds import STREAMS
from cat_lm.ops.recurrence import backends
from cat_lm.ops.recurrence.backends import Recurrence
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.runtime.documents import document_runs
from cat_lm.ops.runtime.precision import without_autocast

# A recurrence with the signature of those in `cat_lm.ops.recurrence`.
Operator = Callable[..., Any]


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, context: Context, eps: float = 1e-12
) -> Tensor:
    """Compute o_t = Σ_{s≤t} (q_t·k_s) v_s / Σ_{s≤t} q_t·k_s for feature maps q, k [B, T, H, F].

    Exact, for any feature map with positive products; sums are in fp32 at least. Quadratic in T;
    with a state, which holds both sums, linear.
    """
    k, document_ids, dtype = context.without_padding(k), context.documents, v.dtype
    widest = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(widest), k.to(widest)
    if context.state is not None:
        # A constant extra value of 1 gives the normaliser.
        values, never = F.pad(v.to(widest), (0, 1), value=1.0), q.new_zeros(*q.shape[:3], 1, 1)
        sums = context.recur(decaying_scan, q, k, values, never, q.new_ones(1, 1, 1))
        return (sums[..., :-1] / (sums[..., -1:] + eps)).to(dtype)
    with without_autocast(q):
        scores = torch.einsum("bthf,bshf->bhts", q, k).tril()
        if document_ids is not None:
            runs = document_runs(document_ids)
            scores = scores * (runs[:, :, None] == runs[:, None])[:, None]
        y = torch.einsum("bhts,bshd->bthd", scores, v.to(widest))
    return (y / (scores.sum(dim=-1).transpose(1, 2)[..., None] + eps)).to(dtype)


class LinearAttention(nn.Module):
    """LinCAT: linear attention over convolved queries, keys and values, with φ = elu + 1."""

    def __init__(self, options: ConvolutionOptions, width: int) -> None:
        super().__init__()
        self.streams = Streams(options, stream_settings(options, width))
        self.out_proj = nn.Linear(width, width, bias=options.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.streams(x, context)
        return self.out_proj(linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, context).flatten(2))


class GatedNorm(nn.RMSNorm):
    """RMSNorm of each head, times SiLU of a gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * F.silu(gate)


class LinearMixer(nn.Module):
    """Projections, short convolutions and the choice of an operator, in fla's names.

    Args:
        width: C.
        heads: H.
        keys, values: channels of all keys and of all values.
        window: W of the short convolutions of queries, keys and values; 0 for none.
        conv_std: the standard deviation of the filters at initialization, see `ShortConvolution`.
        is_gated: whether the output is multiplied by SiLU of a projection.

    Attributes:
        recurrence: the recurrence that is computed.
        is_by_name: whether it is a mixer by name, which this project's own operators compute on
            every device: those of packages train no stack of models.
    """

    recurrence: ClassVar[Recurrence]
    is_by_name = False

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
    ) -> None:
        super().__init__()
        self.heads, self.activates, self.convolution = heads, False, None
        for stream, channels in zip(STREAMS, (keys, keys, values), strict=True):
            self.add_module(f"{stream}_proj", nn.Linear(width, channels, bias=False))
            if window:
                convolution = ShortConvolution(channels, window, bias=False, std=conv_std)
                self.add_module(f"{stream}_conv1d", convolution)
        if is_gated:
            self.g_proj = nn.Linear(width, values, bias=False)
        self.o_proj = nn.Linear(values, width, bias=False)

    def filter_streams(self, options: FilterOptions) -> None:
        """Return the filter and activation of the streams for a mixer's options, or None without a
        window.
        """
        if options.shared_kv:
            self.v_proj = None
        width, values = self.k_proj.in_features, self.o_proj.in_features
        settings = stream_settings(options, width, value_width=values // self.heads)
        self.is_by_name, self.activates = True, options.activation == "silu"
        self.convolution = make_convolution(settings)

    def streams(self, x: Tensor, context: Context) -> list[Tensor]:
        """Return queries, keys and values [B, T, H, D] for x [B, T, C]."""
        made = []
        for stream in STREAMS:
            project = getattr(self, f"{stream}_proj")
            y = made[1] if project is None else project(x)
            if hasattr(self, f"{stream}_conv1d"):
                y = getattr(self, f"{stream}_conv1d")(y, context, name=f"{stream}_inputs")
            made.append(y)
        if self.convolution is None:
            made = [self.of_heads(y) for y in made]
        else:
            made = self.convolution(context, *made)
        return list(map(F.silu, made) if self.activates else made)

    def of_heads(self, x: Tensor) -> Tensor:
        """Split the channels, [B, T, H D] to [B, T, H, D]."""
        return x.unflatten(-1, (self.heads, -1))

    def operator(self, v: Tensor, backend: str) -> Operator:
        """Choose the operator that computes the recurrence of such values. Raises ValueError if
        none can.

        Args:
            backend: `context.mixer_backend`.
        """
        if self.is_by_name:
            backend = "auto"
        elif backend != "auto" or v.is_cuda:  # On a CPU the operators choose a backend themselves.
            backend = backends.choose_backend(self.recurrence, v.device, v.dtype, backend).name
        return self.computed_by(backend)

    def computed_by(self, backend: str) -> Operator:
        """Return a backend's operator; `auto` chooses by the tensors."""
        raise NotImplementedError
