"""`python -m eval.speed conv`: convolutions against each other, and against copying memory.

A case is a shape, a dtype, a kind of convolution and a window. Its contenders are those of
`kernels`. Each is checked on the very tensors to be timed, then all are timed in turn. One that is
wrong or fails is refused: its row says why and holds no time. The bytes that a kernel has to move
over the time taken, against the bandwidth of a plain copy, say how near to the floor it is.

Two distances from the expectation in float64 must be within the tolerance: ‖y - ŷ‖ / ‖ŷ‖, which a
small error everywhere moves, and max|y - ŷ| / max|ŷ|, which one wrong element moves. A result that
is not finite fails both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cat_lm import ops
from cat_lm.ops.convolution import kinds
from eval.speed.choices import QKV
from eval.speed.kernels import Contender, ConvCase, work_of
from eval.speed.timing import copy_bandwidth, log, time_in_turn, times_as_fast, without_home

DIRECTIONS = ("forward", "forward_backward")
# The baseline that users would write without this project; its layouts' names begin with it.
RIVAL = "conv1d"
# Rounding in float32 stays far below; tf32, near 3e-4, does not pass for float32.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclass(frozen=True)
class ConvOptions:
    """The options of the benchmark, which times all combinations of their values."""

    shapes: Sequence[tuple[int, int, int, int]]  # B, T, H, D
    dtypes: Sequence[str]
    conv_types: Sequence[str]
    windows: Sequence[int]
    kernels: Sequence[str]
    repeats: int


def conv_speed(options: ConvOptions, device: torch.device) -> dict[str, Any]:
    """Check and time all cases; `refused` of the result lists the kernels that are wrong."""
    cases = [
        ConvCase(conv_type, *shape, window, dtype, str(device))
        for shape in options.shapes
        for dtype in options.dtypes
        for conv_type in options.conv_types
        for window in options.windows
    ]
    # cuDNN would round float32 inputs to tf32; here float32 means float32 for all kernels.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    log(f"copy bandwidth of {device}")
    copy = copy_bandwidth(device, [case.tensor_bytes for case in cases], options.repeats)
    results, refused = [], []
    for number, case in enumerate(cases, start=1):
        said = case.describe()
        log(f"case {number} of {len(cases)}: {said}")
        rate = max(copy[case.tensor_bytes], copy[max(copy)])
        results.append(measure(case, options, rate))
        for row in results[-1]["kernels"]:
            if row["refused"]:
                refused.append({"case": said, "kernel": row["kernel"], "reason": row["refused"]})
    return {"cases": results, "refused": refused}


def measure(case: ConvCase, options: ConvOptions, copy_rate: float) -> dict[str, Any]:
    """Return every contender's row of a case, who is absent, and what cat_lm itself would use.

    Args:
        copy_rate: bytes a second.
    """
    work, names = work_of(case), options.kernels
    if case.conv_type == QKV:
        names = [name for name in names if name in ops.BACKENDS]
    elif case.kind.name not in kinds.BUILT_IN:
        names = dict.fromkeys(("reference", *names))  # A plugin's kind has only this backend.
    contenders, absent = work.contenders(names)
    choice = ops.choose_backend(**case.backend_arguments)
    runs = ops.BACKENDS.get(choice.name).describe(case.kind.name, case.torch_dtype, case.window)
    expected, floors = work.expected(), work.floors()
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for contender in contenders:
        name = contender.kernel.name
        rows[name] = {"kernel": name, "timed": contender.kernel.timed}
        rows[name] |= _check_results(contender, expected, case.dtype)
        if rows[name]["refused"] is None:
            calls |= {(name, direction): getattr(contender, direction) for direction in DIRECTIONS}
    device = torch.device(case.device)
    timings = time_in_turn(calls, device, options.repeats, title=case.describe())
    for direction in DIRECTIONS:
        timed = {name: timing for (name, way), timing in timings.items() if way == direction}
        compared = against_rival({name: timing.seconds for name, timing in timed.items()})
        for name, timing in timed.items():
            rate = floors[direction] / timing.median
            rows[name][direction] = {
                "seconds": timing.record(),
                "bytes_per_second": rate,
                "of_copy_bandwidth": rate / copy_rate,
                **compared[name],
            }
    return {
        "case": asdict(case),
        "backend": {"name": choice.name, "reason": choice.reason, "runs": without_home(runs)},
        "floor_bytes": floors,
        "copy_bytes_per_second": copy_rate,
        "kernels": list(rows.values()),
        "absent": absent,
    }


def against_rival(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Compare every contender with torch's conv1d in the layout that it is fastest in.

    Args:
        seconds: seconds of the rounds, by contender, in one direction.

    Returns:
        By contender: the rival's name, how many times as fast as it (median and range over the
        rounds); all None where it has no time.
    """
    rivals = [name for name in seconds if name.startswith(RIVAL)]
    rival = min(rivals, key=lambda name: statistics.median(seconds[name]), default=None)
    found = {}
    for name, own in seconds.items():
        ratio = times_as_fast(own, seconds[rival]) if rival else {"median": None, "range": None}
        found[name] = {
            "rival": rival,
            "times_as_fast_as_conv1d": ratio["median"],
            "times_as_fast_range": ratio["range"],
        }
    return found


def _check_results(
    contender: Contender, expected: Mapping[str, Tensor], dtype: str
) -> dict[str, Any]:
    """Return the `errors` of a contender's results, and why it is `refused`, or None."""
    # Fill reused memory with NaN, so that an element that is never written shows.
    for tensor in expected.values():
        torch.full(tensor.shape, float("nan"), dtype=getattr(torch, dtype), device=tensor.device)
    try:
        found = contender.results()
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines() or ["no message"]
        return {"errors": None, "refused": f"failed with {type(error).__name__}: {reason[0]}"}
    errors = {name: _distances(found[name], expected[name]) for name in expected}
    tolerance = TOLERANCES[dtype]
    wrong = [
        f"{name} is off by {kinds['norm']:.2g} in norm, {kinds['largest']:.2g} at most"
        for name, kinds in errors.items()
        # The comparison must be False for NaN.
        if not all(value <= tolerance for value in kinds.values())
    ]
    refused = f"{'; '.join(wrong)} (tolerance {tolerance:g})" if wrong else None
    return {"errors": errors, "refused": refused}


def _distances(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Compute the two distances of the module's text; infinite where shapes differ.

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
