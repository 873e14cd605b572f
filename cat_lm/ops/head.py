"""`head_conv`: one causal filter for each head, shared by the head's channels; backend dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from cat_lm.ops.documents import document_runs
from cat_lm.ops.reference import head_conv_reference
from cat_lm.ops.toeplitz import head_conv_toeplitz

BACKENDS = ("reference", "toeplitz")


def choose_backend(dtype: torch.dtype, window: int, backend: str = "auto") -> tuple[str, str]:
    """The backend that serves a head convolution and the reason.

    Args:
        dtype: the dtype of the inputs.
        window: W.
        backend: "auto", or a name of `BACKENDS` that must serve.

    Raises:
        ValueError: the name is unknown, or no backend serves the dtype.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend={backend!r}: choose auto or one of {', '.join(BACKENDS)}")
    if not dtype.is_floating_point:
        raise ValueError(f"inputs of {dtype} cannot be convolved; use a floating-point dtype")
    if backend != "auto":
        return backend, "asked for by name"
    if window == 1:
        return "reference", "a window of 1 is one product"
    return "toeplitz", f"matrix products, exact for every device and window (W={window})"


def head_conv(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution along time, with one filter for each head.

        y[b,t,h,:] = bias[h,:] + sum_{j=0}^{W−1} F[h,j] x[b,t−j,h,:],

    where inputs before the start, and those of another document, are zeros.

    Args:
        x: [B, T, H, D], with any strides.
        filters: [H, W], lag 0 first. Used in the dtype of x, as a linear layer's weight is under
            autocast; products are summed in fp32 where x has half precision.
        bias: [H, D].
        document_ids: [B, T] integers; a change of the id starts a new document.
        initial_state: [B, W−1, H, D], the inputs before x; zeros if absent.
        return_state: also return the last W−1 inputs, [B, W−1, H, D], to go on from.
        backend: "auto", "reference" or "toeplitz"; see `choose_backend`.

    Returns:
        y [B, T, H, D] in the dtype of x, or (y, state).

    Raises:
        ValueError: shapes that do not fit, a backend that cannot serve, or document ids together
            with a state, which belongs to no document.
    """
    _check_shapes(x, filters, bias, document_ids, initial_state)
    window, past = filters.shape[1], 0
    if document_ids is not None and (initial_state is not None or return_state):
        raise ValueError("document_ids cannot be used together with a state")
    if initial_state is not None:
        x, past = torch.cat([initial_state.to(x.dtype), x], dim=1), window - 1
    runs = None if document_ids is None else document_runs(document_ids)

    name, _ = choose_backend(x.dtype, window, backend)
    convolve = {"reference": head_conv_reference, "toeplitz": head_conv_toeplitz}[name]
    y = convolve(x, filters.to(x.dtype), runs)[:, past:]
    if bias is not None:
        y = y + bias.to(y.dtype)
    return (y, _last_inputs(x, window)) if return_state else y


def _last_inputs(x: Tensor, window: int) -> Tensor:
    missing = max(0, window - 1 - x.shape[1])
    last = x[:, max(0, x.shape[1] - window + 1) :]
    return torch.nn.functional.pad(last, (0, 0, 0, 0, missing, 0))


def _check_shapes(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    if x.ndim != 4:
        raise ValueError(f"x must be [B, T, H, D], not {list(x.shape)}")
    batch, time, heads, width = x.shape
    if time < 1:
        raise ValueError("x has no time steps")
    if filters.ndim != 2 or filters.shape[0] != heads or filters.shape[1] < 1:
        raise ValueError(f"filters must be [{heads}, W] for x {list(x.shape)}")
    expected = {
        "bias": (bias, (heads, width)),
        "document_ids": (document_ids, (batch, time)),
        "initial_state": (initial_state, (batch, filters.shape[1] - 1, heads, width)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
