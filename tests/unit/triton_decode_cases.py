"""Tests of the decoding kernel through Triton's interpreter; test_ops_triton.py runs this file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from cat_lm.ops.convolution import step
from cat_lm.ops.convolution.reference import convolve as reference
from tests.unit.tiny_models import LLAMA_VARIANTS, VARIANTS, cat_model, random_ids

SHAPES = {"head": ("H", "W"), "depthwise": ("H", "D", "W"), "multihead": ("W", "H", "H")}


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    width = cosines.shape[-1]
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = torch.cat([-second, first], dim=-1) * sines[:, :, None]
    return torch.cat([x[..., :width] * cosines[:, :, None] + turned, x[..., width:]], dim=-1)


def parts(packed: bool, x: list[Tensor]) -> list[Tensor]:
    """The same numbers as parts of one tensor [..., H, S, D], or whole."""
    return list(torch.stack(x, dim=-2).unbind(-2)) if packed else x


@pytest.mark.parametrize(
    ("conv_type", "window", "rows", "heads", "width", "turned", "packed", "silu", "streams"),
    [
        ("head", 21, 20, (2, 2), 16, 4, True, False, "qkv"),
        ("head", 5, 2, (2, 2), 16, 16, True, False, "kv"),  # a prompt shorter than the window
        ("head", 2, 0, (2, 1), 16, 2, False, False, "q"),
        ("depthwise", 40, 39, (2, 1), 16, 0, False, False, "qkv"),  # more lags than loaded at once
        ("depthwise", 4, 3, (1, 1), 20, 6, True, True, "qkv"),  # a width that is no power of two
        ("multihead", 3, 2, (3, 3), 16, 4, True, False, "qk"),
        ("multihead", 5, 2, (4, 2), 8, 8, False, True, "qkv"),
    ],
)
def test_a_token_equals_the_definition(
    conv_type, window, rows, heads, width, turned, packed, silu, streams
):
    torch.manual_seed(0)
    number = {"q": heads[0], "k": heads[1], "v": heads[1]}
    whole = {s: torch.randn(2, rows + 1, number[s], width) for s in "qkv"}
    biases = {s: torch.randn(number[s], width) for s in "qkv"}
    angles = torch.randn(2, 1, turned // 2).repeat(1, 1, 2)
    rotary = (angles.cos(), angles.sin()) if turned else None
    expected, filters = {}, {}
    for s in "qkv":
        y = whole[s][:, -1:] + biases[s]
        filters[s] = None
        if s in streams:
            sizes = {"H": number[s], "W": window, "D": width}
            filters[s] = torch.randn([sizes[axis] for axis in SHAPES[conv_type]])
            y = reference(conv_type, whole[s], filters[s], biases[s], None)[:, -1:]
            y = torch.nn.functional.silu(y) if silu else y
        expected[s] = rotated(y, *rotary) if turned and s != "v" else y
    kept = min(rows + 1, window - 1)
    held = parts(packed, [whole[s][:, :-1].contiguous() for s in streams])
    room = parts(packed, [torch.full_like(whole[s][:, :kept], torch.nan) for s in streams])
    past, following = dict(zip(streams, held, strict=True)), dict(zip(streams, room, strict=True))
    outputs = step.convolve_step(
        conv_type,
        parts(packed, [whole[s][:, -1:].contiguous() for s in "qkv"]),
        [past.get(s) for s in "qkv"],
        list(filters.values()),
        parts(packed, list(biases.values())),
        [following.get(s) for s in "qkv"],
        window=window,
        rotary=rotary,
        silu=silu,
    )
    for s, computed in zip("qkv", outputs, strict=True):
        torch.testing.assert_close(computed, expected[s], rtol=1e-4, atol=1e-5)
    for s in streams:
        assert torch.equal(following[s], whole[s][:, rows + 1 - kept :])


@pytest.mark.long  # whole models, of whose programs the interpreter has many
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "static"),
    [("head", False), ("head", True), ("silu", False), ("maps", False), ("llama-multihead", True)],
)
def test_a_model_decodes_what_it_computes_in_one_pass(name, static, monkeypatch):
    """After a prompt that is shorter than the window, and then longer, by the kernel alone."""
    steps, one = [], step.convolve_step
    monkeypatch.setattr(
        "cat_lm.model.stream_convolution.convolve_step",
        lambda *a, **k: steps.append(a) or one(*a, **k),
    )
    variant = (VARIANTS | LLAMA_VARIANTS)[name]
    model = cat_model(**variant, num_hidden_layers=1, conv_window=4)
    ids = random_ids(1, 6)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=8)
    outputs = [model(ids[:, :2], past_key_values=cache, use_cache=True).logits]
    model.set_conv_backend("triton")
    for token in ids[:, 2:].split(1, dim=1):
        outputs.append(model(token, past_key_values=cache, use_cache=True).logits)
    assert len(steps) == 4
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=2e-5)


def test_what_one_kernel_does_not_serve():
    x = torch.zeros(1, 1, 2, 16)
    assert step.can_step("head", x, 4, "triton")
    assert not step.can_step("head", x, 1, "triton")
    assert not step.can_step("head", x, 4, "cpu") and not step.can_step("head", x, 4)
    assert not step.can_step("head", x.requires_grad_(), 4, "triton")
