"""Which kernels compute several operations of a layer's streams, and what is left to one each."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm.mixers import Setting, make_mixer
from cat_lm.model.cache import StateDynamicLayer
from cat_lm.model.context import Context
from cat_lm.model.streams import pipeline
from cat_lm.model.streams.operations import Convolution, Rotation
from cat_lm.model.streams.pipeline import FUSIONS, fused
from tests.tiny_models import cat_model, random_ids

TOKEN, PACKED, LONG = (fusion.what for fusion in FUSIONS)
LONG_KEYS = {"conv_type": "head", "conv_filter": "ssm", "conv_state": 4}


@pytest.fixture
def taken(monkeypatch):
    """Return what computes streams, in its order; rotations of their own among it."""
    seen = []

    def watched(fusion):
        def run(layer):
            found = fusion.run(layer)
            if found is not None:
                seen.append(fusion.what)
            return found

        return fusion._replace(run=run)

    def turn(self, x, *how, rotate=Rotation.__call__):
        seen.append("rotation")
        return rotate(self, x, *how)

    def convolve(self, x, *how, rotary=None, apply=Convolution.__call__):
        seen.append("convolution" if rotary is None else "convolution and rotation")
        return apply(self, x, *how, rotary)

    monkeypatch.setattr(pipeline, "FUSIONS", tuple(map(watched, FUSIONS)))
    monkeypatch.setattr(Rotation, "__call__", turn)
    monkeypatch.setattr(Convolution, "__call__", convolve)
    return seen


PAIR = ["convolution and rotation"] * 2 + ["convolution"]
ROWS = {
    "packed heads": ({"conv_type": "head"}, [PACKED]),
    "packed heads, a stream without filters": (
        {"conv_type": "head", "conv_streams": "kv"},
        [PACKED],
    ),
    "packed heads, norm after": (
        {"conv_type": "head", "qk_norm": "l2"},
        [PACKED, *["rotation"] * 2],
    ),
    "packed heads, norm before": (
        {"conv_type": "head", "qk_norm": "rms", "qk_norm_place": "before"},
        [PACKED],
    ),
    "packed heads, ranks": ({"conv_type": "head", "conv_rank": 2}, [PACKED, *["rotation"] * 2]),
    "packed long filters": (LONG_KEYS, [LONG, *["rotation"] * 2]),
    "packed channels": ({"conv_type": "depthwise"}, PAIR),
    "packed channels with SiLU": (
        {"conv_type": "depthwise", "conv_activation": "silu"},
        ["convolution", "rotation"] * 2 + ["convolution"],
    ),
    "heads that mix": ({"conv_type": "multihead"}, [PACKED]),
    "maps that mix": ({"conv_type": "multihead", "conv_mixing": "maps"}, [PACKED]),
    "separate heads": ({"conv_type": "head", "family": "llama"}, PAIR),
    "separate long filters": (LONG_KEYS | {"family": "llama"}, ["rotation"] * 2),
}


def first_convolution(model):
    layer = model.base_model.layers[0]
    return (getattr(layer, "self_attn", None) or layer.attention).convolution


@pytest.mark.parametrize("name", ROWS)
def test_rows(taken, name):
    keys, expected = ROWS[name]
    model = cat_model(**keys)
    layers = model.config.num_hidden_layers
    model(random_ids(2, 9))
    assert taken == expected * layers
    said = fused(first_convolution(model))
    rotates = "a convolution and its rotation, on some devices"
    expected_words = {PACKED: PACKED, LONG: LONG, PAIR[0]: rotates}
    assert said == expected_words.get(expected[0])


class Names(TorchDispatchMode):
    """Collects the names of operators that are called while it is entered."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["head", "multihead"])
def test_packed_streams_of_a_cpu_are_one_operator_each_way(kind):
    """Nothing copies or joins the streams, nor the gradient of the packed projection."""
    weights = first_convolution(cat_model(conv_type=kind))
    rotary = torch.randn(2, 1, 9, 2).unbind()
    packed = torch.randn(2, 9, 96, requires_grad=True)
    with Names() as names:
        streams = weights(Context(rotary=rotary), packed)
        torch.autograd.grad(streams, packed, [torch.ones_like(x) for x in streams])
    views = {"aten::view", "aten::_unsafe_view", "aten::alias", "aten::select.int"}
    computing = [name for name in names.seen if name not in views | {"aten::ones_like"}]
    assert computing == ["cat_lm::cpu_conv_qkv", "cat_lm::cpu_conv_qkv_backward"]
    assert all(x.transpose(1, 2).is_contiguous() for x in streams)


def step(kind, inputs, past, filters, biases, following, *, window, rotary, silu):
    """Compute what a GPU's kernel of one token does, for filters of heads without SiLU."""
    assert window == 4 and not silu
    made = []
    for x, before, taps, bias, after in zip(inputs, past, filters, biases, following, strict=True):
        read = torch.cat([before, x], dim=1)
        after.copy_(read[:, -after.shape[1] :])
        y = torch.einsum("hw,bwhd->bhd", taps.flip(1)[:, -read.shape[1] :], read)
        made.append((y if bias is None else y + bias)[:, None])
    if rotary is None:
        return tuple(made)
    return *(turned(y, *rotary) for y in made[:2]), made[2]


def turned(x, cos, sin):
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], dim=-1)
    return torch.cat([turned * cos[:, :, None] + half * sin[:, :, None], rest], dim=-1)


@pytest.fixture
def steps(monkeypatch):
    """Has a kernel of one token, as on a GPU."""
    monkeypatch.setattr(pipeline, "can_step", lambda *_: True)
    monkeypatch.setattr(pipeline, "convolve_step", step)


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@torch.no_grad()
def test_a_token_after_others(taken, steps, family):
    """What the kernel of one token is given makes the streams of a longer row."""
    model = cat_model(conv_type="head", conv_window=4, family=family).eval()
    ids = random_ids(2, 9)
    whole = model(ids).logits
    cache = model(ids[:, :5], use_cache=True).past_key_values
    taken.clear()
    parts = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(5, 9)]
    assert set(taken) == {TOKEN}
    torch.testing.assert_close(torch.cat(parts, dim=1), whole[:, 5:], rtol=1e-4, atol=1e-5)
    # Padding and gradients are not what it is for.
    taken.clear()
    with torch.enable_grad():
        model(ids[:, :1], past_key_values=cache)
    assert TOKEN not in taken


@torch.no_grad()
def test_a_token_before_a_last_silu_is_stored_once(taken, steps):
    module = make_mixer("cat:activation=silu,window=4,dropout=0").build(Setting(32)).eval()
    x, context = torch.randn(2, 9, 32), Context(state=StateDynamicLayer())
    parts = [module(part, context) for part in x.split([5, 1, 1, 1, 1], dim=1)]
    assert TOKEN in taken
    torch.testing.assert_close(torch.cat(parts, dim=1), module(x, Context()), rtol=1e-4, atol=1e-5)
