"""The convolutions as their definitions read: a sum over lags of delayed inputs.

With x [B, T, H, D] and lag 0 first in every filter F:

    head        y[b,t,h,:] = bias[h,:] + sum_j F[h,j]   x[b,t−j,h,:]          F [H, W]
    depthwise   y[b,t,h,d] = bias[h,d] + sum_j F[h,d,j] x[b,t−j,h,d]          F [H, D, W]
    multihead   y[b,t,i,:] = bias[i,:] + sum_h sum_j F[j,i,h] x[b,t−j,h,:]    F [W, H_out, H_in]

(CAT, Definition 1 and section 3.1; depthwise is the short convolution of Primer, Mamba, DeltaNet).
Every other backend is tested against this one, and this one against a loop over numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.convolution import kinds
from cat_lm.ops.runtime.precision import at_least_fp32, without_autocast


def convolve(
    conv_type: str | kinds.Kind,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """One of the sums above, on any device, in fp32 where x has half precision.

    Args:
        conv_type: the kind's name.
        x: [B, T, H, D].
        filters: as above, in the dtype of x.
        bias: [H, D], or none.
        positions: [B, T], the position of each token in its document. An input j steps back counts
            if j ≤ positions[b,t]. Without it only the left edge limits.

    Returns:
        y [B, T, H, D] in the dtype of x.
    """
    return sum_of_lags(kinds.of(conv_type), x, filters, bias, positions)


def sum_of_lags(
    kind: kinds.Kind,
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Compute `convolve` for a kind, which need not be registered."""
    window, sum_dtype = kind.window_of(filters), at_least_fp32(x)
    taps, y = filters.to(sum_dtype), torch.zeros(x.shape, dtype=sum_dtype, device=x.device)
    with without_autocast(x):
        for lag, delayed in _delayed_inputs(x.to(sum_dtype), window, positions):
            y = y + kind.term(taps, lag, delayed)
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def gradients(
    conv_type: str, dy: Tensor, x: Tensor, filters: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, filters and bias of `convolve`, without a graph, by the same sums.

        dx[s] = sum_j F_jᵀ dy[s+j],     dF_j = sum_t dy[t] x[t−j]

    For kinds of the table, whose `add_lag` is symmetric but for the heads that it mixes.
    """
    kind = kinds.get(conv_type)
    window, sum_dtype, time = kind.window_of(filters), at_least_fp32(x), x.shape[1]
    taps, dy, inputs = (s.to(sum_dtype) for s in (filters, dy, x))
    summed = [axis for axis, name in enumerate("BTHD") if name not in kind.filter_axes]
    dx, df = torch.zeros_like(inputs), torch.zeros_like(taps)
    back = taps.mT if kind.mixes_heads else taps
    for lag, delayed in _delayed_inputs(inputs, window, positions):
        own = df.select(kind.window_axis, lag)
        if kind.mixes_heads:
            own.copy_(torch.einsum("bthd,btid->hi", dy, delayed))
        else:  # einsum is up to 20 times as slow here.
            own.copy_((dy * delayed).sum(dim=summed))
        seen = dy[:, lag:]
        if positions is not None:
            seen = torch.where((positions[:, lag:] >= lag)[:, :, None, None], seen, 0.0)
        dx[:, : time - lag] += kind.term(back, lag, seen)
    return dx.to(x.dtype), df.to(filters.dtype), dy.sum(dim=(0, 1)).to(x.dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first R channels of x [B, T, H, D] by cosines and sines [B or 1, T, R]."""
    width = cosines.shape[-1]
    cosines, sines = cosines[:, :, None].to(x.dtype), sines[:, :, None].to(x.dtype)
    turned, passed = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat([-second, first], dim=-1) * sines
    return torch.cat([turned, passed], dim=-1)


@functools.cache
def check_kind(kind: kinds.Kind) -> None:
    """Check what `kinds.register`, which imports no torch, cannot: axes and sum fit each other.

    Raises:
        ValueError: `add_lag` gives no [B, T, H, D], or another output than the newest W tokens give
            alone, or filters that are the identity change something.
    """
    time, heads, width, window = 6, 4, 5, 3
    shape = kind.filter_shape(heads, width, window)
    named = f"conv_type {kind.name!r}: add_lag, with filter_axes={kind.filter_axes},"
    with torch.device("cpu"), torch.no_grad():
        x = torch.arange(float(time * heads * width)).view(1, time, heads, width).double().cos()
        taps = torch.arange(float(math.prod(shape))).sin().view(shape)
        try:
            y = sum_of_lags(kind, x, taps)
            same = sum_of_lags(kind, x, kind.identity(heads, width, window))
        except (RuntimeError, IndexError, TypeError) as error:
            said = " ".join(str(error).split())
            raise ValueError(
                f"{named} cannot compute with filters {list(shape)}: {said}"
            ) from error
        if y.shape != x.shape:
            raise ValueError(f"{named} makes {list(y.shape)} of inputs {list(x.shape)}")
        for now in range(time):
            newest = x[:, max(0, now - window + 1) : now + 1]
            if not torch.allclose(sum_of_lags(kind, newest, taps)[:, -1], y[:, now]):
                raise ValueError(f"{named} reads other tokens than the newest W")
        if not torch.equal(same, x):
            raise ValueError(f"{named} changes its input with 1 at lag 0 and 0 elsewhere")


def describe(conv_type: str, dtype: torch.dtype, window: int) -> str:
    """Return a description of the backend."""
    return f"plain torch, lag by lag ({window} passes)"


def _delayed_inputs(
    x: Tensor, window: int, positions: Tensor | None
) -> Iterator[tuple[int, Tensor]]:
    """(j, x delayed by j) for the lags j of a window that reach into x [B, T, H, D].

    Zeros stand before the start and, given `positions` [B, T], before the start of a document.
    """
    for lag in range(min(window, x.shape[1])):
        delayed = F.pad(x[:, : x.shape[1] - lag], (0, 0, 0, 0, lag, 0))
        if positions is not None:
            delayed = torch.where((positions >= lag)[:, :, None, None], delayed, 0.0)
        yield lag, delayed
