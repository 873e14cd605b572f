"""Attention whose maps the values' filters mix over heads and keys (`conv_mixing: maps`)."""

from __future__ import annotations

from typing import Any

from cat_lm.model.attention import Pattern


class MapMixing(Pattern):
    """sum_h sum_j F[j,i,h] A_h[t,m+j] instead of A_i[t,m], see `MapMixingCore`."""

    name = "map_mixing"
    title = "mixed attention maps"
    words = "mixing attention maps"
    # Flash attention requires values as wide as keys.
    implementations = ("eager", "sdpa", "flex_attention")
    takes_transforms = False

    def reads_neighbours(self, model: Any) -> bool:
        return model.conv_window > 1

    def build(self, config: Any) -> Any:
        from cat_lm.model.attention.modules.map_mixing import MapMixingCore

        return MapMixingCore()


ENTRY = MapMixing()
