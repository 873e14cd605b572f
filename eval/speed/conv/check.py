"""Check that a kernel computes the convolution, on the very tensors to be timed.

The expectation is the kind's definition (`Kind.add_lag`), lag by lag in float64, a sequence at a
time; of the kernels only the reference shares code with it. Two distances must be within the
tolerance: ‖y − ŷ‖ / ‖ŷ‖, which a small error everywhere moves, and max|y − ŷ| / max|ŷ|, which one
wrong element moves. A result that is not finite fails both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.convolution import kinds

# Rounding in float32 stays far below; tf32, near 3e-4, does not pass for float32.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 3e-3}


def expected_results(conv_type: str, x: Tensor, filters: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, dx and dfilters by the definition, in float64, for x and dy [B, T, H, D]."""
    x, taps, dy = x.detach(), filters.detach().double(), dy.detach()
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    dx, dfilters = torch.zeros_like(y), torch.zeros_like(taps)
    kind = kinds.get(conv_type)
    time, window = x.shape[1], kind.window_of(taps)
    for row in range(x.shape[0]):
        inputs, gradients = x[row].double(), dy[row].double()  # [T, H, D]
        for lag in range(min(window, time)):
            # What a tap of this lag reads, and what it writes to.
            read, written = inputs[: time - lag], gradients[lag:]
            into_y, into_dx = y[row, lag:], dx[row, : time - lag]
            y_part, dx_part, dtaps = _of_one_lag(kind, taps, lag, read, written)
            into_y += y_part
            into_dx += dx_part
            dfilters += dtaps
    return {"y": y, "dx": dx, "dfilters": dfilters}


def _of_one_lag(
    kind: kinds.Kind, taps: Tensor, lag: int, read: Tensor, written: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One lag's part of y, of dx and of dfilters, by the kind's own definition."""
    read, taps = read.requires_grad_(), taps.requires_grad_()
    y = kind.add_lag(taps, lag, read[None])[0]
    return y.detach(), *torch.autograd.grad(y, (read, taps), written)


def distances(found: Tensor, expected: Tensor) -> dict[str, float]:
    """The two distances of the module's text; infinite where shapes differ.

    Where nothing but zeros is expected, as a gradient of what one token does not read, nothing else
    is right: the distances are 0 or infinite.
    """
    if found.shape != expected.shape:
        return {"norm": float("inf"), "largest": float("inf")}
    difference = found.detach().double() - expected
    if not expected.any():
        distance = float("inf") if difference.any() else 0.0
        return {"norm": distance, "largest": distance}
    return {
        "norm": float(difference.norm() / expected.norm()),
        "largest": float(difference.abs().max() / expected.abs().max()),
    }


def verdict(errors: dict[str, dict[str, float]], dtype: str) -> str | None:
    """None for results that are right, else what is wrong with them."""
    tolerance = TOLERANCES[dtype]
    wrong = [
        f"{name} is off by {kinds['norm']:.2g} in norm, {kinds['largest']:.2g} at most"
        for name, kinds in errors.items()
        # Not `>`: a NaN must not pass.
        if not all(value <= tolerance for value in kinds.values())
    ]
    return f"{'; '.join(wrong)} (tolerance {tolerance:g})" if wrong else None
