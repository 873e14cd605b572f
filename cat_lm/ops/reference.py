"""The convolution as its definition reads: a sum over lags of delayed inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def head_conv_reference(x: Tensor, filters: Tensor, runs: Tensor | None = None) -> Tensor:
    """y[b,t,h,:] = sum_j F[h,j] x[b,t−j,h,:], with zeros before the start.

    Args:
        x: [B, T, H, D].
        filters: [H, W], lag 0 first.
        runs: [B, T] document numbers; inputs of another document are read as zeros.

    Sums in fp32 where x has half precision, and returns the dtype of x.
    """
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=sum_dtype, device=x.device)
    for lag, delayed in delayed_inputs(x, filters.shape[1], runs):
        y = y + filters[:, lag, None].to(sum_dtype) * delayed.to(sum_dtype)
    return y.to(x.dtype)


def delayed_inputs(x: Tensor, window: int, runs: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """(j, x delayed by j) for the lags j of a window that reach into x [B, T, H, D].

    Zeros stand before the start and, given `runs` [B, T], where the input is of another document.
    """
    for lag in range(min(window, x.shape[1])):
        delayed = _delay(x, lag)
        if runs is not None:
            same_document = _delay(runs, lag, fill=-1) == runs
            delayed = torch.where(same_document[:, :, None, None], delayed, 0.0)
        yield lag, delayed


def _delay(x: Tensor, lag: int, fill: float = 0) -> Tensor:
    """x[:, t − lag], with `fill` before the start."""
    padding = (0, 0) * (x.ndim - 2) + (lag, 0)
    return F.pad(x[:, : x.shape[1] - lag], padding, value=fill)
