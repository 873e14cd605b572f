"""Read padding, documents and decoding state: the rules that all mixers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cat_lm.ops import convolve
from cat_lm.ops.convolution import kinds
from cat_lm.ops.long_filter.api import continued, long_conv
from cat_lm.ops.long_filter.filters import Modes

# Tensors by name, rows first; see cat_lm/mixers/base.py.
State = dict[str, Tensor]


def without_padding(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Put zeros where there is padding. x [B, T, …], padding_mask [B, T] bool."""
    if padding_mask is None:
        return x
    return x.masked_fill(~padding_mask.view(*padding_mask.shape, *[1] * (x.dim() - 2)), 0.0)


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast half precision to fp32: rates are exponentials, and a rounded one is another rate."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def short_convolution(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    *,
    name: str,
    conv_type: str = "depthwise",
    backend: str = "auto",
    document_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    state: State | None = None,
) -> Tensor:
    """Convolve x [B, T, H, D] causally along time, after the inputs that `state` holds.

    Args:
        filters: of the shape that the kind says.
        bias: [H, D].
        name: of the last W−1 inputs in the state.
        conv_type: the kind's name.
        backend: what computes it, see `cat_lm.ops.BACKENDS`.
    """
    x = without_padding(x, padding_mask)
    past = kinds.get(conv_type).window_of(filters) - 1
    before = inputs_before(x, past, name, padding_mask, state)
    how = {"document_ids": document_ids, "initial_state": before, "backend": backend}
    return convolve(conv_type, x, filters, bias, **how)


def long_convolution(
    x: Tensor,
    modes: Modes,
    name: str,
    *,
    document_ids: Tensor | None = None,
    padding_mask: Tensor | None = None,
    state: State | None = None,
) -> Tensor:
    """Convolve x [B, T, H, D] by filters as long as it, after what `state` holds under `name`."""
    x = without_padding(x, padding_mask)
    if state is None:
        return long_conv(x, modes, document_ids=document_ids)
    y, after = continued(x, modes, None, state.get(name), padding_mask)
    state[name] = after.detach()
    return y


def inputs_before(
    x: Tensor, past: int, name: str, padding_mask: Tensor | None, state: State | None
) -> Tensor | None:
    """Take the last `past` inputs [B, past, …] before x [B, T, …] from the state, and put in x's.

    Returns:
        None without a state, or where nothing before is read.
    """
    if state is None or not past:
        return None
    before = state.get(name, x[:, :0])
    if before.shape[1] < past:
        before = x.new_zeros(x.shape[0], past, *x.shape[2:])
    state[name] = _last_inputs(torch.cat([before, x.detach()], dim=1), past, padding_mask)
    return before


def _last_inputs(history: Tensor, past: int, padding_mask: Tensor | None) -> Tensor:
    """Take the last inputs that are no padding after the last real token, [B, past, …]."""
    if padding_mask is None:
        return history[:, -past:].clone()
    trailing = (padding_mask.flip(1).cumsum(dim=1) == 0).sum(dim=1)  # [B]
    first = history.shape[1] - past - trailing
    times = first[:, None] + torch.arange(past, device=history.device)
    rows = torch.arange(len(history), device=history.device)[:, None]
    return history[rows, times]


def from_state(
    operator: Callable[..., Any],
    *streams: Tensor,
    document_ids: Tensor | None = None,
    state: State | None = None,
) -> Tensor:
    """Run a recurrence, from the memory that `state` holds, if any, and on into it."""
    if state is None:
        return operator(*streams, document_ids=document_ids)
    y, last = operator(
        *streams,
        document_ids=document_ids,
        initial_state=state.get("memory"),
        return_state=True,
    )
    state["memory"] = last.detach()
    return y
