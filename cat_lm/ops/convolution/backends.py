"""The table of convolution backends, and the choice among them.

All backends read zeros before the start, and across document borders given as positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cat_lm.core.registry import Registry
from cat_lm.ops.convolution import kinds, triton
from cat_lm.ops.convolution.cpu import kernel as cpu
from cat_lm.ops.convolution.kinds import reference
from cat_lm.ops.runtime import triton_launch
from cat_lm.ops.runtime.backends import BackendChoice, choose

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Backend:
    """A way to compute convolutions.

    Attributes:
        name: the value of `conv_backend`.
        convolve: (kind's name, x, filters, bias, positions) to y, as `reference.convolve`.
        why_not: (device, dtype) to why it cannot serve, as a clause; None where it can.
        describe: (kind's name, dtype, W) to the words that say what runs.
        kinds: the kinds that it has kernels for; None for all.
        rotates: the kinds of which `convolve` also takes cosines and sines, to rotate its results.
        packs: the kinds of which `convolve_packed` convolves and rotates q, k and v of one tensor.
        convolve_packed: an operator of `packed_operator`.
    """

    name: str
    convolve: Callable[..., Tensor]
    why_not: Callable[[torch.device, torch.dtype], str | None]
    describe: Callable[[str, torch.dtype, int], str]
    kinds: Iterable[str] | None = None
    rotates: Iterable[str] = ()
    packs: Iterable[str] = ()
    convolve_packed: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None

    def obstacle(self, conv_type: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot serve convolutions of a kind; None if it can."""
        obstacle = self.why_not(device, dtype)
        if obstacle is None and self.kinds is not None and conv_type not in self.kinds:
            return f"it has no kernel for {conv_type} filters"
        return obstacle


def _check(backend: Backend) -> None:
    if unknown := set(backend.kinds or ()) - set(kinds.BUILT_IN):
        raise ValueError(f"backend {backend.name!r}: has kernels for unknown kinds {unknown}")


BACKENDS: Registry[Backend] = Registry(
    "backend",
    Backend,
    check=_check,
    others=("auto",),
    entries=(
        Backend("reference", reference.convolve, lambda *_: None, reference.describe),
        Backend(
            "cpu",
            cpu.convolve,
            cpu.why_not,
            cpu.describe,
            kinds=kinds.KERNEL_NUMBERS,
            rotates=cpu.OF_WHOLE_HEADS,
            packs=cpu.OF_WHOLE_HEADS,
            convolve_packed=cpu.cpu_conv_qkv,
        ),
        Backend(
            "triton",
            triton.convolve,
            triton_launch.why_not,
            triton.describe,
            kinds=triton.KINDS,
            rotates=triton.KINDS,
            packs=triton.PACKED,
            convolve_packed=triton.triton_conv_qkv,
        ),
    ),
)


def choose_backend(
    conv_type: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    window: int,
    heads: int,
    head_dim: int,
    backend: str = "auto",
) -> BackendChoice:
    """Return the backend that serves a convolution, and the reason.

    `auto` takes `triton` on a GPU, `cpu` on a CPU, and `reference`, which serves everything slowly,
    where these cannot.

    Args:
        conv_type: a kind's name (`cat_lm.ops.convolution.kinds`).
        device: where the inputs are.
        dtype: the dtype of the inputs.
        window, heads, head_dim: W, H and D.
        backend: auto, or the name of a backend that must serve.

    Raises:
        ValueError: the name is unknown, the backend asked for cannot serve, or none can.
    """
    device = torch.device(device)
    kinds.get(conv_type)
    if window < 1:
        raise ValueError(f"window={window}: a filter needs at least 1 tap")
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise ValueError(f"inputs of {dtype} cannot be convolved; use one of {names}")

    def why_not(name: str) -> str | None:
        return BACKENDS.get(name).obstacle(conv_type, device, dtype)

    fast = "cpu" if device.type == "cpu" else "triton"
    return choose("this convolution", backend, device, why_not, (fast,), "reference")


def serving_backend(conv_type: str, x: Tensor, window: int, backend: str) -> str:
    """Return the name of the backend that `choose_backend` chooses for inputs [B, T, H, …, D]."""
    sizes = {"window": window, "heads": x.shape[2], "head_dim": x.shape[-1]}
    how = {"device": x.device, "dtype": x.dtype, "backend": backend}
    return choose_backend(conv_type, **sizes, **how).name
