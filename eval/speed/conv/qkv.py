"""The step from the packed projection to attention's inputs: in one call, and put together.

    q, k, v = RoPE(conv(x_q) + b_q), RoPE(conv(x_k) + b_k), conv(x_v) + b_v

Contenders are `cat_lm.ops.head_conv_qkv`, which the triton backend does in one kernel each way, and
a convolution with its bias for each stream followed by transformers' rotation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cat_lm import ops
from eval.speed.choices import QKV_KIND
from eval.speed.conv import check
from eval.speed.conv.contest import Contender
from eval.speed.conv.floor import forward_backward_bytes, forward_bytes
from eval.speed.conv.kernels import ConvCase

ROTATED = 0.25  # of a head's channels, as in Pythia
GRADIENTS = ("dqkv", "dfilter_q", "dfilter_k", "dfilter_v", "dbias")
Streams = tuple[Tensor, Tensor, Tensor]


class Inputs:
    """A packed projection with filters, bias and angles, and gradients of the three outputs."""

    def __init__(self, case: ConvCase, seed: int) -> None:
        generator = torch.Generator(device=case.device).manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, device=case.device)
            return drawn.to(case.torch_dtype)

        batch, time, heads, width = case.batch, case.time, case.heads, case.head_dim
        self.qkv = draw(batch, time, heads, 3, width).requires_grad_()
        self.filters = [
            (draw(heads, case.window) / case.window**0.5).requires_grad_() for _ in range(3)
        ]
        self.bias = draw(heads, 3, width).requires_grad_()
        # Laid out as attention gives them: [B, H, T, D] in memory.
        self.gradients = [draw(batch, heads, time, width).transpose(1, 2) for _ in range(3)]
        rotated = max(2, int(width * ROTATED) // 2 * 2)
        pairs = torch.arange(0, rotated, 2, device=case.device)
        angles = torch.arange(time, device=case.device)[:, None] * 10000.0 ** -(pairs / rotated)
        angles = torch.cat([angles, angles], dim=-1)[None]
        self.rotary = (angles.cos().to(case.torch_dtype), angles.sin().to(case.torch_dtype))

    @property
    def learned(self) -> list[Tensor]:
        return [self.qkv, *self.filters, self.bias]

    def floors(self) -> dict[str, int]:
        """The fewest bytes of each direction; as many go out as come in."""
        packed = self.qkv.nbytes
        learned = sum(tensor.nbytes for tensor in [*self.filters, self.bias])
        constants = learned + sum(angle.nbytes for angle in self.rotary)
        return {
            "forward": forward_bytes(packed, packed, constants),
            "forward_backward": forward_backward_bytes(packed, packed, constants, learned),
        }


def contenders_for(inputs: Inputs, backends: list[str]) -> list[Contender]:
    """The one call and the parts, on each backend."""
    ways = {"in one call": (in_one_call, "cat_lm.ops.head_conv_qkv")}
    ways["in parts"] = (in_parts, "head_conv with bias for q, k and v, transformers' rotation")
    return [
        Contender(
            f"{backend}, {way}",
            f"{words}, from [B, T, H, 3, D]",
            partial(_results, function, inputs, backend),
            partial(_forward, function, inputs, backend),
            partial(_forward_backward, function, inputs, backend),
        )
        for backend in backends
        for way, (function, words) in ways.items()
    ]


def in_one_call(inputs: Inputs, backend: str) -> Streams:
    return ops.head_conv_qkv(
        inputs.qkv, inputs.filters, inputs.bias, rotary=inputs.rotary, backend=backend
    )


def in_parts(inputs: Inputs, backend: str) -> Streams:
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    query, key, value = (
        ops.head_conv(
            inputs.qkv[:, :, :, index],
            inputs.filters[index],
            inputs.bias[:, index],
            backend=backend,
        )
        for index in range(3)
    )
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *inputs.rotary)
    return query.transpose(1, 2), key.transpose(1, 2), value


def _forward(function: Callable[..., Streams], inputs: Inputs, backend: str) -> Streams:
    with torch.no_grad():
        return function(inputs, backend)


def _forward_backward(function: Callable[..., Streams], inputs: Inputs, backend: str) -> Streams:
    outputs = function(inputs, backend)
    return torch.autograd.grad(outputs, inputs.learned, inputs.gradients)


def _results(function: Callable[..., Streams], inputs: Inputs, backend: str) -> dict[str, Tensor]:
    outputs = function(inputs, backend)
    gradients = torch.autograd.grad(outputs, inputs.learned, inputs.gradients)
    names = (*"qkv", *GRADIENTS)
    return dict(zip(names, [*outputs, *gradients], strict=True))


def expected_results(inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients by the definitions, in float64, a stream at a time."""
    cosines, sines = (angle.double()[0, :, None] for angle in inputs.rotary)
    expected: dict[str, Tensor] = {}
    dqkv, dbias = [], []
    for index, stream in enumerate("qkv"):
        gradient = inputs.gradients[index].double()
        if stream != "v":
            gradient = _turned(gradient, cosines, -sines)
        sums = check.expected_results(
            QKV_KIND, inputs.qkv[:, :, :, index], inputs.filters[index], gradient
        )
        y = sums["y"] + inputs.bias[:, index].detach().double()
        expected[stream] = y if stream == "v" else _turned(y, cosines, sines)
        expected[f"dfilter_{stream}"] = sums["dfilters"]
        dqkv.append(sums["dx"])
        dbias.append(gradient.sum((0, 1)))
    return expected | {"dqkv": torch.stack(dqkv, dim=3), "dbias": torch.stack(dbias, dim=1)}


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Channels (r, r + R/2) as complex numbers times cos + i sin, for r < R/2: x [B, T, H, D]."""
    half = cosines.shape[-1] // 2
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.complex(cosines[..., :half], sines[..., :half])
    return torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], dim=-1)
