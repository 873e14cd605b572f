"""The scan of decaying_scan.py for fp32 on a CPU, by decaying_scan.cpp."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cat_lm.ops.runtime.compiler import SHARED, Sources
from cat_lm.ops.runtime.native import Kernel

# `ScanCall` of decaying_scan.cpp; `work` is the numbers of state over all steps.
KERNEL = Kernel(
    "scan",
    Sources("scan", (Path(__file__).with_name("decaying_scan.cpp"), *SHARED)),
    integers=(
        *("threads", "rows", "time", "heads", "keys", "values", "every", "models"),
        *("rate_keys", "rate_values", "a_heads", "a_keys", "a_values"),
    ),
    pointers=(
        *("q", "k", "v", "rate", "a", "initial", "out", "last", "kept", "grad", "grad_last"),
        *("dq", "dk", "dv", "drate", "da", "dinitial", "workspace"),
    ),
    small=1 << 16,
)


def forward(every: int, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute as `decaying_scan_torch.forward`."""
    q, k, v, rate, a, initial = inputs
    models, batch, time, heads, keys = q.shape
    out, last = (torch.empty(s.shape, dtype=s.dtype) for s in (v, initial))
    kept = q.new_empty(models, batch, -(-time // every), heads, keys, v.shape[-1])
    given = {"q": q, "k": k, "v": v, "rate": rate, "a": a, "initial": initial}
    _run(every, **given, out=out, last=last, kept=kept)
    return out, last, kept


def backward(
    every: int, kept: Tensor, grad: Tensor, grad_last: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Compute as `decaying_scan_torch.backward`."""
    q, k, v, rate, a = inputs
    dq, dk, dv, dinitial = (torch.empty(s.shape, dtype=s.dtype) for s in (q, k, v, grad_last))
    drate = torch.zeros(rate.shape, dtype=rate.dtype)
    models, batch, _, heads, _ = q.shape
    da = a.new_zeros(models, batch, heads, *a.shape[2:])
    gradients = {"dq": dq, "dk": dk, "dv": dv, "drate": drate, "da": da, "dinitial": dinitial}
    given = {"q": q, "k": k, "v": v, "rate": rate, "a": a, **gradients}
    _run(every, kept=kept, grad=grad, grad_last=grad_last, **given)
    return dq, dk, dv, drate, da.sum(dim=1).sum_to_size(a.shape), dinitial


def _run(every: int, **tensors: Tensor) -> None:
    q, v, rate, a = (tensors[name] for name in ("q", "v", "rate", "a"))
    models, batch, time, heads, keys = q.shape
    numbers = {"rows": models * batch, "time": time, "heads": heads, "keys": keys}
    numbers |= {"values": v.shape[-1], "every": every, "models": models}
    numbers |= dict(zip(("rate_keys", "rate_values"), rate.shape[-2:], strict=True))
    numbers |= dict(zip(("a_heads", "a_keys", "a_values"), a.shape[-3:], strict=True))
    KERNEL(tensors, work=q.numel() * v.shape[-1], **numbers)
