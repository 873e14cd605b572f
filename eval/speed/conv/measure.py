"""`python -m eval.speed conv`: convolutions against each other, and against copying memory.

A case is a shape, a dtype, a kind of convolution and a window. Its contenders are this project's
backends and the libraries of `kernels`; the kind `qkv` is the whole step of `qkv`. `contest` says
how they are checked and timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cat_lm import ops
from cat_lm.ops.convolution import kinds
from eval.speed.choices import QKV
from eval.speed.conv import check, qkv
from eval.speed.conv.contest import Contender, Rules, hold
from eval.speed.conv.floor import forward_backward_bytes, forward_bytes
from eval.speed.conv.kernels import ConvCase, Kernel, kernels_for
from eval.speed.machine import copy_bandwidth, without_home
from eval.speed.progress import say


@dataclass(frozen=True)
class ConvOptions:
    """Choose what to time: all combinations of shapes, dtypes, conv_types and windows."""

    shapes: Sequence[tuple[int, int, int, int]]  # B, T, H, D
    dtypes: Sequence[str]
    conv_types: Sequence[str]
    windows: Sequence[int]
    kernels: Sequence[str]
    repeats: int
    cuda_graphs: bool = True
    seed: int = 0


def conv_speed(options: ConvOptions, device: torch.device) -> dict[str, Any]:
    """Checks and times all cases; `refused` of the result lists the kernels that are wrong."""
    cases = [
        ConvCase(conv_type, *shape, window, dtype, str(device))
        for shape in options.shapes
        for dtype in options.dtypes
        for conv_type in options.conv_types
        for window in options.windows
    ]
    # cuDNN would round float32 inputs to tf32; what is called float32 here is float32 for all.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    say(f"copy bandwidth of {device}")
    copy = copy_bandwidth(device, [case.tensor_bytes for case in cases], options.repeats)
    results = []
    for number, case in enumerate(cases, start=1):
        say(f"case {number} of {len(cases)}: {case.describe()}")
        rate = max(copy[case.tensor_bytes], copy[max(copy)])
        rules = Rules(device, options.repeats, options.cuda_graphs, rate)
        results.append(measure(case, options, rules))
    return {"cases": results, "refused": _refused(results)}


def measure(case: ConvCase, options: ConvOptions, rules: Rules) -> dict[str, Any]:
    """One case: every kernel's row, which were absent and why, and what cat_lm itself would use."""
    work = _qkv_step(case, options) if case.conv_type == QKV else _convolution(case, options)
    rows = hold(
        work.contenders, work.expected, case.dtype, work.floors, rules, title=case.describe()
    )
    return {
        "case": asdict(case),
        "backend": _backend_of(case),
        "floor_bytes": work.floors,
        "copy_bytes_per_second": rules.copy_rate,
        "kernels": rows,
        "absent": work.absent,
    }


def _refused(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "case": ConvCase(**result["case"]).describe(),
            "kernel": row["kernel"],
            "reason": row["refused"],
        }
        for result in results
        for row in result["kernels"]
        if row["refused"]
    ]


@dataclass(frozen=True)
class Work:
    """A piece of work: who does it, what must come out, the fewest bytes moved, who is absent."""

    contenders: list[Contender]
    expected: dict[str, Tensor]
    floors: dict[str, int]
    absent: dict[str, str]


def _convolution(case: ConvCase, options: ConvOptions) -> Work:
    generator = torch.Generator(device=case.device).manual_seed(options.seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=case.device).to(case.torch_dtype)

    x, dy = draw(case.shape), draw(case.shape)
    filters = draw(case.filter_shape) / case.window**0.5
    names = options.kernels
    if case.kind.name not in kinds.BUILT_IN:
        names = dict.fromkeys(("reference", *names))  # which is all that a plugin's kind has
    kernels, absent = kernels_for(case, names)
    return Work(
        [_contender(kernel, x, filters, dy) for kernel in kernels],
        check.expected_results(case.conv_type, x, filters, dy),
        {
            "forward": forward_bytes(x.nbytes, x.nbytes, filters.nbytes),
            "forward_backward": forward_backward_bytes(
                x.nbytes, x.nbytes, filters.nbytes, filters.nbytes
            ),
        },
        absent,
    )


def _qkv_step(case: ConvCase, options: ConvOptions) -> Work:
    inputs = qkv.Inputs(case, options.seed)
    backends = [name for name in options.kernels if name in ops.BACKENDS]
    kernels, absent = kernels_for(case, backends)
    contenders = qkv.contenders_for(inputs, [kernel.name for kernel in kernels])
    return Work(contenders, qkv.expected_results(inputs), inputs.floors(), absent)


def _backend_of(case: ConvCase) -> dict[str, str]:
    """Name the backend that this project itself would use, and why."""
    choice = ops.choose_backend(**case.backend_arguments)
    runs = ops.BACKENDS.get(choice.name).describe(case.kind.name, case.torch_dtype, case.window)
    return {"name": choice.name, "reason": choice.reason, "runs": without_home(runs)}


def _contender(kernel: Kernel, x: Tensor, filters: Tensor, dy: Tensor) -> Contender:
    """A kernel with its inputs and filters in its own layout."""
    arrange_gradient = kernel.arrange_gradient or kernel.arrange
    x, dy = kernel.arrange(x).detach(), arrange_gradient(dy)
    filters = kernel.arrange_filters(filters).contiguous().requires_grad_()
    learned = (x.clone().requires_grad_(), filters)
    forward_backward = partial(_forward_backward, kernel.convolve, learned, dy)

    def results() -> dict[str, Tensor]:
        y, (dx, dfilters) = forward_backward()
        dfilters = kernel.restore_filters(dfilters)
        return {"y": kernel.restore(y), "dx": kernel.restore(dx), "dfilters": dfilters}

    def forward() -> Tensor:
        # Keeps nothing for a backward pass.
        with torch.no_grad():
            return kernel.convolve(x, filters)

    return Contender(kernel.name, kernel.timed, results, forward, forward_backward)


def _forward_backward(
    convolve: Callable[[Tensor, Tensor], Tensor], learned: tuple[Tensor, Tensor], dy: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    y = convolve(*learned)
    return y, torch.autograd.grad(y, learned, dy)
