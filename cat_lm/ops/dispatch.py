"""`head_conv` and `multihead_conv`: checks, state, and the choice of a backend for both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cat_lm.ops.documents import document_runs
from cat_lm.ops.multihead import multihead_conv1d, multihead_conv_reference
from cat_lm.ops.reference import head_conv_reference
from cat_lm.ops.toeplitz import head_conv_toeplitz

# What computes each kind of convolution, from (x, filters, document numbers).
BACKENDS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "head": {"reference": head_conv_reference, "toeplitz": head_conv_toeplitz},
    "multihead": {"reference": multihead_conv_reference, "conv1d": multihead_conv1d},
}


def choose_backend(
    dtype: torch.dtype, window: int, backend: str = "auto", conv_type: str = "head"
) -> tuple[str, str]:
    """The backend that serves a convolution and the reason.

    Args:
        dtype: the dtype of the inputs.
        window: W.
        backend: "auto", or a name of `BACKENDS[conv_type]` that must serve.
        conv_type: "head" or "multihead".

    Raises:
        ValueError: the name is unknown, or no backend serves the dtype.
    """
    known = BACKENDS[conv_type]
    if backend not in ("auto", *known):
        raise ValueError(f"backend={backend!r}: choose auto or one of {', '.join(known)}")
    if not dtype.is_floating_point:
        raise ValueError(f"inputs of {dtype} cannot be convolved; use a floating-point dtype")
    if backend != "auto":
        return backend, "asked for by name"
    if window == 1:
        return "reference", "a window of 1 is one product"
    if conv_type == "multihead":
        return "conv1d", f"torch's convolution with heads as channels (W={window})"
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
    heads = _heads(x)
    if filters.ndim != 2 or filters.shape[0] != heads or filters.shape[1] < 1:
        raise ValueError(f"filters must be [{heads}, W] for x {list(x.shape)}")
    name, _ = choose_backend(x.dtype, filters.shape[1], backend, "head")
    convolve = BACKENDS["head"][name]
    return _with_context(
        convolve, x, filters, filters.shape[1], bias, document_ids, initial_state, return_state
    )


def multihead_conv(
    x: Tensor,
    filters: Tensor,
    bias: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution along time that mixes heads, with one filter for each pair of heads.

        y[b,t,i,:] = bias[i,:] + sum_h sum_{j=0}^{W−1} F[j,i,h] x[b,t−j,h,:]

    Args:
        filters: [W, H, H]: lag (0 first), output head, input head.
        backend: "auto", "reference" or "conv1d".

    The other arguments, the results and the errors are those of `head_conv`.
    """
    heads = _heads(x)
    if filters.ndim != 3 or filters.shape[1:] != (heads, heads) or filters.shape[0] < 1:
        raise ValueError(f"filters must be [W, {heads}, {heads}] for x {list(x.shape)}")
    name, _ = choose_backend(x.dtype, filters.shape[0], backend, "multihead")
    convolve = BACKENDS["multihead"][name]
    return _with_context(
        convolve, x, filters, filters.shape[0], bias, document_ids, initial_state, return_state
    )


def _with_context(
    convolve: Callable[..., Tensor],
    x: Tensor,
    filters: Tensor,
    window: int,
    bias: Tensor | None,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolves x after what stood before it, within its documents, and adds the bias."""
    _check_shapes(x, window, bias, document_ids, initial_state)
    if document_ids is not None and (initial_state is not None or return_state):
        raise ValueError("document_ids cannot be used together with a state")
    past = 0
    if initial_state is not None:
        x, past = torch.cat([initial_state.to(x.dtype), x], dim=1), window - 1
    runs = None if document_ids is None else document_runs(document_ids)
    y = convolve(x, filters.to(x.dtype), runs)[:, past:]
    if bias is not None:
        y = y + bias.to(y.dtype)
    return (y, _last_inputs(x, window)) if return_state else y


def _last_inputs(x: Tensor, window: int) -> Tensor:
    missing = max(0, window - 1 - x.shape[1])
    last = x[:, max(0, x.shape[1] - window + 1) :]
    return torch.nn.functional.pad(last, (0, 0, 0, 0, missing, 0))


def _heads(x: Tensor) -> int:
    if x.ndim != 4:
        raise ValueError(f"x must be [B, T, H, D], not {list(x.shape)}")
    return x.shape[2]


def _check_shapes(
    x: Tensor,
    window: int,
    bias: Tensor | None,
    document_ids: Tensor | None,
    initial_state: Tensor | None,
) -> None:
    batch, time, heads, width = x.shape
    if time < 1:
        raise ValueError("x has no time steps")
    expected = {
        "bias": (bias, (heads, width)),
        "document_ids": (document_ids, (batch, time)),
        "initial_state": (initial_state, (batch, window - 1, heads, width)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, not {list(tensor.shape)}")
