"""What is timed by `eval.speed conv`: contenders for one piece of work, and what must come out.

The work is a causal convolution of x [B, T, H, D], or `qkv`, the step from the packed projection to
attention's inputs:

    q, k, v = RoPE(conv(x_q) + b_q), RoPE(conv(x_k) + b_k), conv(x_v) + b_v

Contenders for a convolution are this project's backends, and what one would use instead. Other
libraries are given everything, filters too, as they like it best, and its making is not timed: a
filter for each of C = H·D channels, the newest input's tap last, and [B, C, T] where they want
that; torch's gets the zeros before the text, too, in two layouts, each of which is the fastest
somewhere. Contenders for `qkv` are `cat_lm.ops.head_conv_qkv`, which the triton backend does in one
kernel each way, and a convolution with its bias for each stream followed by transformers' rotation.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cat_lm import ops
from cat_lm.ops.convolution import kinds
from eval.speed.choices import QKV, QKV_KIND

ROTATED = 0.25  # rotated fraction of a head's channels, as in Pythia
Change = Callable[[Tensor], Tensor]
Outputs = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class ConvCase:
    """Describe what is convolved: x [B, T, H, D] by filters of W taps.

    `conv_type` is a kind's name, or qkv for the whole step.
    """

    conv_type: str
    batch: int
    time: int
    heads: int
    head_dim: int
    window: int
    dtype: str
    device: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.time, self.heads, self.head_dim

    @property
    def kind(self) -> kinds.Kind:
        """Return the kind of convolution; of the step `qkv`, that of each stream."""
        return kinds.get(QKV_KIND if self.conv_type == QKV else self.conv_type)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def tensor_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def backend_arguments(self) -> dict[str, Any]:
        """Return the kind and its sizes for `cat_lm.ops.choose_backend`."""
        return {
            "conv_type": self.kind.name,
            "device": self.device,
            "dtype": self.torch_dtype,
            "window": self.window,
            "heads": self.heads,
            "head_dim": self.head_dim,
        }

    def describe(self) -> str:
        return f"{self.conv_type} W={self.window} {list(self.shape)} {self.dtype}"


def _unchanged(*tensors: Tensor) -> Sequence[Tensor]:
    return tensors


@dataclass(frozen=True)
class Kernel:
    """Describe one way to do the work.

    Attributes:
        name: its row in the table.
        timed: description of what the time includes.
        call: from all inputs in the kernel's own layout to its output or outputs.
        arrange: from all that is learned to the kernel's own layout; autograd goes back through it.
        restore: from an output of the kernel to this project's layout.
        arrange_gradient: converts the gradient of an output to the kernel's own layout.
    """

    name: str
    timed: str
    call: Callable[..., Outputs]
    arrange: Callable[..., Sequence[Tensor]] = _unchanged
    restore: Change = Tensor.detach
    arrange_gradient: Change = Tensor.detach


@dataclass(frozen=True)
class Work:
    """Describe a piece of work.

    Attributes:
        learned: [B, T, …], what is convolved; then filters and bias.
        upstream: the gradients of the outputs.
        names: the names of the outputs and of the gradients of `learned`.
        define: from `learned` to the outputs, by the reference in float64.
        constants: bytes of what is read beside `learned`.
        find: from one of `choices.KERNELS` to the kernels that serve; raises `Absent`.
    """

    learned: Sequence[Tensor]
    upstream: Sequence[Tensor]
    names: Sequence[str]
    define: Callable[..., Sequence[Tensor]]
    constants: int
    find: Callable[[str], list[Kernel]]

    def expected(self) -> dict[str, Tensor]:
        """Compute outputs and gradients in float64, a sequence at a time."""
        first, *shared = self.learned
        rows = []
        for row in range(first.shape[0]):
            given = [x.detach().double().requires_grad_() for x in (first[row : row + 1], *shared)]
            outputs = self.define(*given)
            upstream = [x[row : row + 1].double() for x in self.upstream]
            gradients = torch.autograd.grad(outputs, given, upstream)
            rows.append([*(y.detach() for y in outputs), *gradients])
        batched = len(self.upstream) + 1
        columns = zip(self.names, zip(*rows, strict=True), strict=True)
        return {
            name: torch.cat(parts) if number < batched else sum(parts)
            for number, (name, parts) in enumerate(columns)
        }

    def floors(self) -> dict[str, int]:
        """Return the fewest bytes of a forward, and of a forward and a backward pass.

        Each tensor moves once a pass, in or out. A forward pass writes as many outputs as there are
        inputs. A backward pass comes later, when nothing is left in a cache: it reads the outputs'
        gradients, all constants, and for the gradients of filters and bias the inputs again, and
        writes the gradients of all that is learned.
        """
        inputs, learned = self.learned[0].nbytes, sum(x.nbytes for x in self.learned[1:])
        forward = 2 * inputs + learned + self.constants
        backward = 3 * inputs + learned + self.constants + learned
        return {"forward": forward, "forward_backward": forward + backward}

    def contenders(self, names: Iterable[str]) -> tuple[list[Contender], dict[str, str]]:
        """Return the contenders of these names, and for those that cannot serve, why."""
        found, absent = [], {}
        for name in names:
            try:
                found += [Contender(kernel, self) for kernel in self.find(name)]
            except Absent as reason:
                absent[name] = str(reason)
        return found, absent


class Contender:
    """A kernel to be timed, with inputs, filters and gradients in its own layout."""

    def __init__(self, kernel: Kernel, work: Work) -> None:
        self.kernel, self.work = kernel, work
        arranged = kernel.arrange(*(x.detach() for x in work.learned))
        self.learned = [x.detach().requires_grad_() for x in arranged]
        self.upstream = [kernel.arrange_gradient(dy) for dy in work.upstream]

    @torch.no_grad()
    def forward(self) -> Any:
        """Compute the outputs, and keep nothing for a backward pass."""
        return self.kernel.call(*self.learned)

    def forward_backward(self) -> tuple[Any, tuple[Tensor, ...]]:
        """Compute the outputs and the gradients of all that is learned."""
        outputs = self.kernel.call(*self.learned)
        return outputs, torch.autograd.grad(outputs, self.learned, self.upstream)

    def results(self) -> dict[str, Tensor]:
        """Return outputs and gradients by name, in this project's layout."""
        leaves = [x.detach().requires_grad_() for x in self.work.learned]
        outputs, own = self.forward_backward()
        gradients = torch.autograd.grad(self.kernel.arrange(*leaves), leaves, own)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        restored = [self.kernel.restore(y) for y in outputs]
        return dict(zip(self.work.names, [*restored, *gradients], strict=True))


class Absent(Exception):
    """A kernel cannot serve; the message says why."""


def work_of(case: ConvCase, seed: int = 0) -> Work:
    """Draw the tensors of a case."""
    generator = torch.Generator(device=case.device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=case.device)
        return drawn.to(case.torch_dtype)

    if case.conv_type == QKV:
        return _step_work(case, draw)
    x, dy = draw(*case.shape), draw(*case.shape)
    filters = draw(*case.kind.filter_shape(case.heads, case.head_dim, case.window))
    filters = filters / case.window**0.5

    def define(x: Tensor, filters: Tensor) -> list[Tensor]:
        return [ops.convolve(case.kind.name, x, filters, backend="reference")]

    def find(name: str) -> list[Kernel]:
        return FINDERS[name](case)

    return Work([x, filters], [dy], ("y", "dx", "dfilters"), define, 0, find)


def _own(backend: str, case: ConvCase) -> list[Kernel]:
    _check_backend(backend, case)
    convolve = partial(ops.convolve, case.kind.name, backend=backend)
    return [Kernel(backend, f"cat_lm.ops.convolve, {case.kind.name}, [B, T, H, D]", convolve)]


def _check_backend(backend: str, case: ConvCase) -> None:
    try:
        ops.choose_backend(**case.backend_arguments, backend=backend)
    except ValueError as error:
        raise Absent(str(error)) from None


def _torch_conv1d(case: ConvCase) -> list[Kernel]:
    """Find torch's convolution in the layouts that it was ever fastest in."""
    _refuse_unknown_kind(case)
    is_mixed = case.kind.mixes_heads
    groups = 1 if is_mixed else case.heads * case.head_dim

    def first(x: Tensor) -> Tensor:
        if is_mixed:
            return x.permute(0, 3, 2, 1).flatten(0, 1).contiguous()
        return x.flatten(2).transpose(1, 2).contiguous()

    def back(y: Tensor) -> Tensor:
        if is_mixed:
            return y.unflatten(0, (case.batch, case.head_dim)).permute(0, 3, 2, 1)
        return y.transpose(1, 2).unflatten(2, (case.heads, case.head_dim))

    def arrange(x: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
        x = F.pad(first(x), (case.window - 1, 0))
        taps = filters.permute(1, 2, 0).flip(2) if is_mixed else channel_taps(case, filters)
        return x, taps.contiguous()

    def arrange_channels_last(x: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
        x, taps = arrange(x, filters)
        return channels_last(x), taps

    def channels_last(x: Tensor) -> Tensor:
        return x[:, :, None].contiguous(memory_format=torch.channels_last)

    def convolve_channels_last(x: Tensor, taps: Tensor) -> Tensor:
        return F.conv2d(x, channels_last(taps), groups=groups)

    shape = "[B·D, H, T]" if is_mixed else "[B, H·D, T]"
    return [
        Kernel(
            "conv1d, padded",
            f"torch's conv1d given contiguous {shape} with W - 1 zeros before it",
            partial(F.conv1d, groups=groups),
            *(arrange, back, first),
        ),
        Kernel(
            "conv1d, channels last",
            f"the same, given {shape} with zeros before it, in torch's channels_last layout",
            convolve_channels_last,
            *(
                arrange_channels_last,
                lambda y: back(y[:, :, 0]),
                lambda dy: channels_last(first(dy)),
            ),
        ),
    ]


def channel_taps(case: ConvCase, filters: Tensor) -> Tensor:
    """Return a filter for each channel [H·D, 1, W], with the newest input's tap last."""
    if "D" not in case.kind.filter_axes:
        filters = filters[:, None].expand(-1, case.head_dim, -1)
    return filters.reshape(case.heads * case.head_dim, 1, case.window).flip(2)


def _flash_linear_attention(case: ConvCase) -> list[Kernel]:
    convolve = _import_fla(case)

    def arrange(x: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(2).contiguous(), channel_taps(case, filters)[:, 0].contiguous()

    return [
        Kernel(
            "fla",
            "flash-linear-attention's causal_conv1d, Triton, [B, T, H·D]",
            lambda x, taps: convolve(x, taps, backend="triton")[0],
            arrange,
            lambda y: y.unflatten(2, (case.heads, case.head_dim)),
            lambda dy: dy.flatten(2).contiguous(),
        )
    ]


def _import_fla(case: ConvCase) -> Callable[..., Any]:
    _refuse_unknown_kind(case)
    if case.kind.mixes_heads:
        raise Absent("convolves each channel on its own")
    if not case.device.startswith("cuda"):
        raise Absent("runs on a GPU only")
    reasons = []
    # The module has another name in newer versions.
    for module in ("convolution", "causal_conv1d"):
        try:
            return importlib.import_module(f"fla.modules.{module}").causal_conv1d
        except Exception as error:  # A broken installation may raise anything.
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
    raise Absent(f"cannot be imported ({'; '.join(reasons)})")


def _refuse_unknown_kind(case: ConvCase) -> None:
    if case.kind.name not in kinds.BUILT_IN:
        raise Absent("is given the filters of this project's own kinds only")


FINDERS: dict[str, Callable[[ConvCase], list[Kernel]]] = {
    **{backend: partial(_own, backend) for backend in ops.BACKENDS.names()},
    "conv1d": _torch_conv1d,
    "fla": _flash_linear_attention,
}


def _step_work(case: ConvCase, draw: Callable[..., Tensor]) -> Work:
    batch, time, heads, width = case.shape
    qkv = draw(batch, time, heads, 3, width)
    filters = [draw(heads, case.window) / case.window**0.5 for _ in range(3)]
    learned = [qkv, *filters, draw(heads, 3, width)]
    # Laid out as attention gives them: [B, H, T, D] in memory.
    upstream = [draw(batch, heads, time, width).transpose(1, 2) for _ in range(3)]
    rotated = max(2, int(width * ROTATED) // 2 * 2)
    pairs = torch.arange(0, rotated, 2, device=case.device)
    angles = torch.arange(time, device=case.device)[:, None] * 10000.0 ** -(pairs / rotated)
    angles = torch.cat([angles, angles], dim=-1)[None]
    rotary = angles.cos().to(case.torch_dtype), angles.sin().to(case.torch_dtype)
    ways = {
        "in one call": (_in_one_call, "cat_lm.ops.head_conv_qkv"),
        "in parts": (_in_parts, "head_conv with bias for q, k and v, transformers' rotation"),
    }

    def find(backend: str) -> list[Kernel]:
        _check_backend(backend, case)
        return [
            Kernel(
                f"{backend}, {way}",
                f"{words}, from [B, T, H, 3, D]",
                partial(function, backend, rotary),
            )
            for way, (function, words) in ways.items()
        ]

    names = (*"qkv", "dqkv", "dfilter_q", "dfilter_k", "dfilter_v", "dbias")
    define = partial(_in_one_call, "reference", tuple(x.double() for x in rotary))
    return Work(learned, upstream, names, define, sum(x.nbytes for x in rotary), find)


def _in_one_call(
    backend: str, rotary: tuple[Tensor, Tensor], qkv: Tensor, *learned: Tensor
) -> tuple[Tensor, ...]:
    *filters, bias = learned
    return ops.head_conv_qkv(qkv, filters, bias, rotary=rotary, backend=backend)


def _in_parts(
    backend: str, rotary: tuple[Tensor, Tensor], qkv: Tensor, *learned: Tensor
) -> tuple[Tensor, ...]:
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    *filters, bias = learned
    query, key, value = (
        ops.head_conv(qkv[:, :, :, index], taps, bias[:, index], backend=backend)
        for index, taps in enumerate(filters)
    )
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotary)
    return query.transpose(1, 2), key.transpose(1, 2), value
