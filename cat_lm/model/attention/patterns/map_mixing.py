"""Attention whose maps the values' filters mix over heads and keys (`conv_mixing: maps`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cat_lm.model.attention.base import Pattern

if TYPE_CHECKING:
    from torch import nn


class MapMixing(Pattern):
    """sum_h sum_j F[j,i,h] A_h[t,m+j] in place of A_i[t,m], see `MapMixingCore`."""

    name = "map_mixing"
    title = "mixed attention maps"
    words = "mixing attention maps"
    # Of flash attention, values must be as wide as keys.
    implementations = ("eager", "sdpa", "flex_attention")
    takes_transforms = False

    def reads_neighbours(self, model: Any) -> bool:
        """Return True if maps of keys side by side are mixed."""
        return model.conv_window > 1

    def build(self, config: Any) -> nn.Module:
        """Make the module, which has no parameters: the filters are the convolution's."""
        from cat_lm.model.attention.modules.map_mixing import MapMixingCore

        return MapMixingCore()


ENTRY = MapMixing()
