"""A mixer that does not mix positions: the negative control, which can only guess."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cat_lm.mixers.parts.base import ALL, MixerKind, Setting
from cat_lm.model.context import Context


class LinearLayer(nn.Linear):
    """y = W x + b; positions, documents and padding have no influence."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return super().forward(x)


@dataclass(frozen=True)
class Options:
    """An empty set of options."""


class NoMixing(MixerKind):
    """A linear layer that maps each token separately."""

    name = "none"
    Options = Options
    layers = 1
    supports = ALL

    def build(self, options: Options, setting: Setting) -> nn.Module:
        return LinearLayer(setting.d_model, setting.d_model)


ENTRY = NoMixing()
