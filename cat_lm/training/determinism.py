"""The same bits from the same batch on a GPU, and what attention is computed by.

On a CPU the same run gives the same bits as it is. On a GPU a backward pass may add with atomics,
in whatever order threads arrive; torch's attention does (cuDNN's, and flash attention's by
default), the kernels of this project do not.
"""

from __future__ import annotations

import os

import torch

# The sizes of its workspace with which cuBLAS promises the same bits (its manual, 2.1.4).
_WORKSPACES = (":4096:8", ":16:8")
_REFUSED = "does not have a deterministic implementation"


def make_deterministic() -> None:
    """Have every operator give the same bits each time, for the rest of the process.

    torch takes kernels without atomics, and refuses operators that have none; of attention's
    kernels, cuDNN's is left out. flash-attn is no operator of torch, and is told by transformers.
    Must come before the first matrix product on a GPU.
    """
    os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _WORKSPACES[0]
    torch.use_deterministic_algorithms(True)
    # Writing to all memory before its use finds errors of code; it is not needed for equal bits.
    torch.utils.deterministic.fill_uninitialized_memory = False


def refused_operator(error: BaseException) -> str | None:
    """Name the operator that torch refused as it has no deterministic form, or None."""
    name, refused, _ = str(error).partition(f" {_REFUSED}")
    return name.split()[-1] if refused else None


def attention_kernels(loss: torch.Tensor) -> str:
    """Name the attention kernels whose backward passes belong to `loss`, by its graph.

    torch chooses among its own for every call, by device, dtype, mask and shape.
    """
    found, seen, ahead = set(), set(), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().split("::")[-1]
        if "Compiled" in name:
            found.add("inside the compiled graph")
        elif "Attention" in name or "Attn" in name:
            found.add(name.partition("Backward")[0])
        ahead += [following for following, _ in node.next_functions]
    return ", ".join(sorted(found)) or "no fused kernel"
