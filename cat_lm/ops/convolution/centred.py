"""Convolution along time that reads both sides: for encoders, never for what predicts tokens."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops.convolution.api import head_conv


def centred_conv(x: Tensor, filters: Tensor, *, backend: str = "auto") -> Tensor:
    """Convolve x [B, T, H, D] by filters [H, W], W odd, whose middle tap is a position's own.

    `head_conv` of x moved (W − 1)/2 steps to the past; zeros are read beyond both ends.

    Raises:
        ValueError: a window without a middle.
    """
    window = filters.shape[-1]
    if window % 2 == 0:
        raise ValueError(f"window={window}: a centred filter needs an odd number of taps")
    ahead = window // 2
    padded = F.pad(x, (0, 0, 0, 0, 0, ahead))
    return head_conv(padded, filters, backend=backend)[:, ahead:]
