"""Normalised queries and keys (`qk_norm`), before or after their convolutions, before the rotation.

For head h, with x̂ = x / |x| and rms(x) = x / sqrt(mean(x²)) over the D channels of a head:

    l2:  the logits are s_h q̂·k̂, with s_h learned from sqrt(D) (Henry et al., 2020)
    rms: q and k are rms(x) · w, with weights w of D channels each (Qwen3's)

Both before the temperature divides the logits. Of a projection with biases, what stands before the
convolution is normalised with its bias; the convolution then adds none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cat_lm.core.parameters import NothingDecays
from cat_lm.model.sequence import SequenceGroup
from cat_lm.model.streams.base import StreamCall, StreamOp

if TYPE_CHECKING:
    from cat_lm.model.attention.settings import AttentionSettings

_EPSILON = 1e-6  # of the mean square


class QueryKeyNorm(NothingDecays):
    """Holds the weights of both norms, and normalises queries or keys as `qk_norm` says."""

    def __init__(self, config: AttentionSettings):
        super().__init__()
        self.heads, self.width = config.num_attention_heads, config.head_width
        self.scales = config.qk_norm == "l2"
        for name, values in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(values))

    def initial_values(self) -> dict[str, Tensor]:
        """Return the parameters as they start."""
        if self.scales:
            return {"logit_scale": torch.full((self.heads,), math.sqrt(self.width))}
        return {"q_weight": torch.ones(self.width), "k_weight": torch.ones(self.width)}

    def forward(self, x: Tensor, stream: str, group: SequenceGroup | None = None) -> Tensor:
        """Normalise queries or keys [B, T, heads, D]; `group` are the ranks that share heads."""
        weight = None if self.scales else getattr(self, f"{stream}_weight").to(x.dtype)
        x = F.rms_norm(x, x.shape[-1:], weight, _EPSILON)
        if not self.scales or stream == "k":
            return x
        scale = self.logit_scale
        if x.shape[2] < self.heads:  # those of this rank
            scale = group.own(scale)
        # rms(q)·rms(k) / sqrt(D) = sqrt(D) q̂·k̂.
        return x * (scale / math.sqrt(self.width))[:, None].to(x.dtype)


class Norm(StreamOp):
    """Normalises queries or keys after their convolution."""

    def __call__(self, x: Tensor, call: StreamCall) -> Tensor:
        return call.norm(x, call.stream, call.context.group)
