"""`python -m eval.speed lengths`: long filters by the length of the text, beside what they replace.

At every length: head filters of W taps; each kind of long filter in chunks, as models compute it;
the same filter by a Fourier transform, from the same learned numbers, which is quick and not causal
in its rounding; and causal attention of the same heads. Before a convolution is timed, what it
computes and its gradients, of x and of all that is learned, are compared with a Fourier transform
in float64. All contenders of a length take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm.ops import head_conv
from cat_lm.ops.long_filter import filters
from cat_lm.ops.long_filter.api import choose_backend, long_conv, state_size
from cat_lm.ops.long_filter.chunks import taps_of
from eval.common.text_table import aligned
from eval.speed.conv.check import distances, verdict
from eval.speed.progress import say
from eval.speed.timing import time_in_turn, times_as_fast

DIRECTIONS = ("forward", "forward_backward")
ATTENTION = "causal attention (sdpa)"


@dataclass(frozen=True)
class LengthOptions:
    """Choose what to time.

    Attributes:
        lengths: T.
        batch, heads, head_dim: B, H, D.
        window: W of the head filters.
        state: N of the long filters.
    """

    lengths: Sequence[int]
    batch: int
    heads: int
    head_dim: int
    window: int
    state: int
    dtype: str
    repeats: int
    seed: int = 0


@dataclass(frozen=True)
class _Contender:
    """A function of its inputs; `names` of their gradients and `taps` [H, W or T] of all but x.

    Attention has neither: it is no convolution, and torch's own.
    """

    name: str
    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...] = ()
    taps: Callable[..., Tensor] | None = None

    @torch.no_grad()
    def forward(self) -> Tensor:
        return self.call(*self.inputs)

    def forward_backward(self, learned: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
        """Compute the gradients of `learned`, which are the inputs as leaves."""
        return torch.autograd.grad(self.call(*learned), learned, dy)


def _leaves(inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Copy inputs, in a dtype of their own or `dtype`, so that they take gradients."""
    return tuple(one.detach().to(dtype or one.dtype, copy=True).requires_grad_() for one in inputs)


def length_speed(options: LengthOptions, device: torch.device) -> dict[str, Any]:
    """Check and time all contenders at every length; `refused` lists those that are wrong."""
    rows, refused = [], []
    for time in options.lengths:
        say(f"{time} tokens")
        shape = (options.batch, time, options.heads, options.head_dim)
        generator = torch.Generator(device=device).manual_seed(options.seed)
        x, dy = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
        x, dy = (one.to(getattr(torch, options.dtype)) for one in (x, dy))
        found = []
        for one in _contenders(options, x, generator):
            wrong = None if one.taps is None else _verdict(one, dy, options.dtype)
            if wrong is None:
                found.append(one)
            else:
                refused.append({"time": time, "contender": one.name, "reason": wrong})
        rows += _timed(found, head_filters(options.window), dy, options.repeats, device)
    dtype = torch.promote_types(getattr(torch, options.dtype), torch.float32)
    backends = {
        name: choose_backend(device, dtype, state_size(_modes(name, options, device)))._asdict()
        for name in filters.names()
    }
    return {"case": asdict(options), "backends": backends, "rows": rows, "refused": refused}


def _modes(name: str, options: LengthOptions, device: torch.device) -> filters.Modes:
    """Compute a kind's filters as a fresh model has them with `conv_init: residual`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        numbers = filters.get(name).start_as("residual", options.heads, options.state)
    return filters.get(name).modes_of(numbers.to(device), options.state)


def head_filters(window: int) -> str:
    """Name the contender of `window` taps that others are compared with."""
    return f"head filters, W={window}"


def _contenders(options: LengthOptions, x: Tensor, generator: torch.Generator) -> list[_Contender]:
    """List what computes something of x [B, T, H, D]."""
    time, window = x.shape[1], options.window
    taps = torch.randn((options.heads, window), generator=generator, device=x.device)
    taps = (taps / window**0.5).to(x.dtype)
    found = [
        _Contender(head_filters(window), head_conv, (x, taps), ("dx", "dtaps"), lambda taps: taps)
    ]
    for name in filters.names():
        modes = {
            part: numbers
            for part, numbers in _modes(name, options, x.device)._asdict().items()
            if numbers is not None
        }
        inputs, names = (x, *modes.values()), ("dx", *(f"d{part}" for part in modes))
        for way, call in (("chunks", _chunked), ("Fourier", _transformed)):
            title = f"{name}, N={options.state}, {way}"
            found.append(_Contender(title, call, inputs, names, partial(_taps, time)))
    heads = tuple(x.transpose(1, 2) for _ in range(3))
    return [*found, _Contender(ATTENTION, _attention, heads)]


def _taps(time: int, *parts: Tensor) -> Tensor:
    return taps_of(filters.Modes(*parts), time)


def _chunked(x: Tensor, *parts: Tensor) -> Tensor:
    return long_conv(x, filters.Modes(*parts))


def _transformed(x: Tensor, *parts: Tensor) -> Tensor:
    return _fourier(x, _taps(x.shape[1], *parts))


def _fourier(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve [B, T, H, D] by taps [H, any number], in fp32 at least."""
    time, dtype = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    size = 2 * time
    spectrum = torch.fft.rfft(x.to(dtype), n=size, dim=1)
    # Taps of lags that no token has would come round to the first tokens.
    filters_ = torch.fft.rfft(taps[:, :time].to(dtype), n=size, dim=1)
    y = torch.fft.irfft(spectrum * filters_.T[None, :, :, None], n=size, dim=1)[:, :time]
    return y.to(x.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return y.transpose(1, 2)


def _expected(one: _Contender, dy: Tensor) -> dict[str, Tensor]:
    """Compute y and all gradients in float64, by a Fourier transform of the taps."""
    x, *learned = _leaves(one.inputs, torch.float64)
    y = _fourier(x, one.taps(*learned))
    gradients = torch.autograd.grad(y, (x, *learned), dy.double())
    return {"y": y.detach(), **dict(zip(one.names, gradients, strict=True))}


def _verdict(one: _Contender, dy: Tensor, dtype: str) -> str | None:
    """None for a convolution whose y and gradients are right, else what is wrong with it."""
    expected = _expected(one, dy)
    gradients = one.forward_backward(_leaves(one.inputs), dy)
    found = {"y": one.forward(), **dict(zip(one.names, gradients, strict=True))}
    return verdict({name: distances(found[name], expected[name]) for name in expected}, dtype)


def _timed(
    contenders: Sequence[_Contender], head: str, dy: Tensor, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Time both directions of all contenders in turn; a row for each."""
    calls, time = {}, dy.shape[1]
    for one in contenders:
        both = partial(one.forward_backward, _leaves(one.inputs), dy)
        calls |= {(one.name, "forward"): one.forward, (one.name, "forward_backward"): both}
    timings = time_in_turn(calls, device, repeats, title=f"{time} tokens")
    rows = [{"time": time, "contender": one.name} for one in contenders]
    for way in DIRECTIONS:
        seconds = {one.name: timings[one.name, way].seconds for one in contenders}
        for row, one in zip(rows, contenders, strict=True):
            ratios = against_rivals(seconds[one.name], seconds, head)
            row[way] = {"seconds": timings[one.name, way].record(), **ratios}
    return rows


def against_rivals(
    own: Sequence[float], seconds: Mapping[str, Sequence[float]], head: str
) -> dict[str, dict[str, Any] | None]:
    """Compare a contender with head filters and with attention, by rounds.

    Args:
        own: seconds of the rounds, in one direction.
        seconds: of the same rounds, by contender.
        head: the name of the head filters.

    Returns:
        How many times as fast as each it is, summed up; None where that one was refused.
    """
    rivals = {"times_as_fast_as_head": head, "times_as_fast_as_attention": ATTENTION}
    return {
        key: times_as_fast(own, seconds[rival]) if rival in seconds else None
        for key, rival in rivals.items()
    }


def length_lines(record: dict[str, Any]) -> list[str]:
    """Write the record as lines: a table, and what was refused."""
    case = record["case"]
    shape = f"B={case['batch']}, H={case['heads']}, D={case['head_dim']}, {case['dtype']}"
    backends = ", ".join(f"{name} by {one['name']}" for name, one in record["backends"].items())
    header = ("", "T", "forward ms", "range", "of head filters", "of attention")
    header += ("fwd+bwd ms", "range", "of head filters", "of attention")
    rows = [
        (row["contender"], f"{row['time']:,}", *(x for way in DIRECTIONS for x in _cells(row[way])))
        for row in record["rows"]
    ]
    wrong = [
        f"refused: {one['contender']} at {one['time']} tokens: {one['reason']}"
        for one in record["refused"]
    ]
    how = "of head filters, of attention: how many times as fast, in median (and range)"
    return [f"{shape}; long filters: {backends}; {how}", aligned(header, rows), *wrong]


def _cells(found: dict[str, Any]) -> list[str]:
    low, high = found["seconds"]["range"]
    cells = [f"{1e3 * found['seconds']['median']:.2f}", f"{1e3 * low:.2f}-{1e3 * high:.2f}"]
    for key in ("times_as_fast_as_head", "times_as_fast_as_attention"):
        if (ratio := found[key]) is None:
            cells.append("-")
        else:
            least, most = ratio["range"]
            cells.append(f"{ratio['median']:.2f} ({least:.2f}-{most:.2f})")
    return cells
