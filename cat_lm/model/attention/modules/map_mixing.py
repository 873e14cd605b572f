"""Multi-head convolution of attention maps (`conv_mixing: maps`).

With A_h the maps of head h after the softmax, V_i the values of head i and F [W, H_out, H_in] the
filters, lag 0 first, the maps are mixed over heads and over W keys:

    A'_i[t,m] = sum_h sum_j F[j,i,h] A_h[t,m+j],        Y_i = A'_i V_i.

This is causal, as A_h[t,m+j] is zero for m+j > t. Summing over m first moves the filter from the
maps to the values:

    Y_i = sum_h A_h (F_{i,h} * V_i),     (F_{i,h} * V_i)[m] = sum_j F[j,i,h] V_i[m−j],

so that any attention function serves: head h attends to the H D channels of all F_{i,h} * V_i side
by side (`mix_values` of `cat_lm.ops.convolution.maps`), and its outputs are summed over h
(`sum_over_maps`). With a cache few queries meet many keys, and the maps, then small, are mixed.

V_i includes its bias. With one head this is the convolution of the values, except that the filter
meets the bias b too: outputs differ by b (sum_j F_j − 1), and more within W−1 tokens of the start.

The paper (CAT, section 3.1) says that Table 2 also examines convolving maps, without an equation.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import repeat_kv

from cat_lm.model.attention.modules.call import AttentionCall, softmax, visible_keys
from cat_lm.ops.convolution.maps import close_gaps, places_of_real_keys, reopen_gaps, sum_over_maps


class MapMixingCore(nn.Module):
    """Attends with mixed maps: by mixing values or, after a cache, the maps."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, extra: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with values that are zero at padding; the returned maps are the unmixed A.

        Args:
            extra: `mix_values` [B, T, H, H D], or after a cache the filters [W, H, H].
        """
        shared = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, shared), repeat_kv(value, shared)
        if not call.continues:
            output, maps = call.attend(query, key, extra.transpose(1, 2))
            return sum_over_maps(output), maps
        visible = visible_keys(call.mask, query, key)
        place = None if visible is None else places_of_real_keys(visible[:, 0, -1])
        maps = softmax(query @ key.mT * call.scaling, visible, call.dropout, query.dtype)
        return (_mixed_maps(maps, extra, place) @ value).transpose(1, 2), maps


def _mixed_maps(maps: Tensor, filters: Tensor, place: Tensor | None) -> Tensor:
    """Return A' of A [B, H, T, S]; `place` [B, S] is from `places_of_real_keys`."""
    batch, _, time, _ = maps.shape
    if place is not None:
        # The index m+j counts real keys: padding after a prompt must not separate them.
        maps = close_gaps(maps, place)
    windows = F.pad(maps, (0, filters.shape[0] - 1)).transpose(1, 2).flatten(0, 1)
    # conv1d correlates: tap j multiplies the map at m + j.
    mixed = F.conv1d(windows, filters.permute(1, 2, 0).to(maps.dtype))
    mixed = mixed.unflatten(0, (batch, time)).transpose(1, 2)
    return mixed if place is None else reopen_gaps(mixed, place)
