"""The projection with convolutions: every kind as its definition reads; backends; refusals."""

import importlib.util
from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm.model.hf.conv_backends import describe_backend
from tests.unit.tiny_models import SIZES, VARIANTS, cat_model, each_variant, random_ids

HEADS, WIDTH, WINDOW, TIME = 4, 8, 5, 20


def plain_streams(attention, x):
    """q, k and v without bias or convolution, each [H, T, D], and the biases [H, 3, D]."""
    weight = attention.query_key_value.weight.view(HEADS, 3, WIDTH, -1)
    plain = torch.einsum("tc,hsdc->shtd", x, weight)
    return dict(zip("qkv", plain, strict=True)), attention.convolution.bias.view(HEADS, 3, WIDTH)


def sum_over_lags(kind, filters, plain):
    """The sums of the definitions, written out. [H, T, D]"""
    result = torch.zeros_like(plain)
    for time in range(TIME):
        for lag in range(min(WINDOW, time + 1)):
            past = plain[:, time - lag]  # [H, D]
            if kind == "head":
                result[:, time] += filters[:, lag, None] * past
            elif kind == "depthwise":
                result[:, time] += filters[:, :, lag] * past
            else:
                result[:, time] += filters[lag] @ past
    return result


def attend(query, key, value):
    """softmax(Q Kᵀ / sqrt(D)) V of [H, T, D], and the maps."""
    scores = query @ key.mT / WIDTH**0.5
    maps = scores.masked_fill(~torch.ones(TIME, TIME).tril().bool(), -torch.inf).softmax(-1)
    return maps @ value, maps


@torch.no_grad()
@each_variant("none", "maps")
def test_the_definition_of_the_attention(variant):
    """Q = F_q * (X W_q) + b_q and so on, for one layer."""
    model = cat_model(**variant, conv_window=WINDOW, position_embedding="none")
    attention = model.gpt_neox.layers[0].attention
    x = torch.randn(1, TIME, 32)
    plain, bias = plain_streams(attention, x[0])
    streams = []
    for index, stream in enumerate("qkv"):
        filters = getattr(attention.convolution, f"{stream}_filter")
        convolved = sum_over_lags(variant["conv_type"], filters, plain[stream])
        convolved = convolved + bias[:, index, None]
        streams.append(F.silu(convolved) if "conv_activation" in variant else convolved)
    heads, _ = attend(*streams)
    expected = attention.dense(heads.transpose(0, 1).reshape(1, TIME, 32))
    actual, _ = attention(x, attention_mask=None)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("streams", ["v", "qkv"])
def test_the_definition_of_mixing_maps(streams):
    """A'_i[t, m] = sum_h sum_j F[j, i, h] A_h[t, m + j], and queries and keys as embeddings."""
    fields = {**VARIANTS["maps"], "conv_streams": streams, "position_embedding": "none"}
    attention = cat_model(**fields, conv_window=WINDOW).gpt_neox.layers[0].attention
    x = torch.randn(1, TIME, 32)
    plain, bias = plain_streams(attention, x[0])
    for stream in streams.replace("v", ""):
        filters = getattr(attention.convolution, f"{stream}_filter")
        plain[stream] = sum_over_lags("multihead", filters, plain[stream])
    query, key, value = (plain[s] + bias[:, index, None] for index, s in enumerate("qkv"))
    _, maps = attend(query, key, value)
    mixed = torch.zeros_like(maps)
    for lag in range(WINDOW):
        reached = maps[:, :, lag:]  # A_h[t, m + j], for all m that have such a key
        mixed[:, :, : TIME - lag] += torch.einsum(
            "ih,htm->itm", attention.convolution.v_filter[lag], reached
        )
    assert not mixed.triu(1).any()
    expected = attention.dense((mixed @ value).transpose(0, 1).reshape(1, TIME, 32))
    actual, _ = attention(x, attention_mask=None)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mixed_maps_of_one_head_are_its_convolved_values():
    """Up to the bias: it is convolved too, by all taps, or at the start by those that reach."""
    fields = {"num_attention_heads": 1, "conv_streams": "v", "conv_window": WINDOW}
    maps = cat_model(**fields, **VARIANTS["maps"])
    embeddings = cat_model(**fields, **VARIANTS["multihead"])
    embeddings.load_state_dict(maps.state_dict())
    ids = random_ids(2, 30)
    assert not torch.allclose(maps(ids).logits, embeddings(ids).logits, atol=1e-3)
    for model in (maps, embeddings):
        for layer in model.gpt_neox.layers:
            layer.attention.convolution.bias[64:] = 0  # the values'
    torch.testing.assert_close(maps(ids).logits, embeddings(ids).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mixed_maps_of_several_heads_are_something_else():
    ids, fields = random_ids(1, 20), {"conv_streams": "v", "attention_bias": False}
    maps = cat_model(**fields, **VARIANTS["maps"])
    embeddings = cat_model(**fields, **VARIANTS["multihead"])
    embeddings.load_state_dict(maps.state_dict())
    assert not torch.allclose(maps(ids).logits, embeddings(ids).logits, atol=1e-2)


class Operators(TorchDispatchMode):
    """Counts the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["depthwise", "multihead"])
def test_streams_are_taken_apart_without_filling_gradients(variant, monkeypatch):
    """By index, each of them would fill a gradient of all three with zeros, to be summed."""
    results, unbind = [], torch.Tensor.unbind

    def selected(x, dim=0):
        if x.shape[dim] != 3:
            return unbind(x, dim)
        return tuple(x.select(dim, index) for index in range(3))

    for by_index in (False, True):
        if by_index:
            monkeypatch.setattr(torch.Tensor, "unbind", selected)
        model = cat_model(**VARIANTS[variant], num_hidden_layers=1).train()
        ids, operators = random_ids(2, 24), Operators()
        with operators:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append((operators.count["select_backward"], loss.detach(), *gradients))
    (own, *values), (indexed, *expected) = results
    assert (own, indexed) == (0, 6), "of the projection and of its bias"
    for value, other in zip(values, expected, strict=True):
        assert torch.equal(value, other)


@each_variant("none")
def test_gradients_of_filters_in_fp64(variant):
    """Of the filters of all streams, against finite differences."""
    model = cat_model(**variant, conv_window=3, num_hidden_layers=1).double()
    convolution = model.gpt_neox.layers[0].attention.convolution
    ids = random_ids(1, 6)
    filters = [filters.detach().requires_grad_() for filters in convolution.filters().values()]
    names = [f"gpt_neox.layers.0.attention.convolution.{s}_filter" for s in "qkv"]

    def loss(*filters):
        given = dict(zip(names, filters, strict=True))
        return torch.func.functional_call(model, given, (ids,), {"labels": ids}).loss

    assert torch.autograd.gradcheck(loss, filters, fast_mode=True)


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash_attn is installed"
)
def test_flash_attention_that_is_not_installed_is_an_error():
    with pytest.raises(ImportError, match="FlashAttention2"):
        cat_model(attn_implementation="flash_attention_2")


def test_flash_attention_cannot_mix_maps():
    model = cat_model(**VARIANTS["maps"])
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2: cannot compute mixed attention maps"):
        model(random_ids(1, 5))


@pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is None or not torch.cuda.is_available(),
    reason="needs flash_attn and a CUDA GPU",
)
@torch.no_grad()
@each_variant("maps")
def test_flash_attention_agrees(variant):
    """With rows of packed documents, and with padding, in bf16."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2}
    ids = random_ids(2, 60).cuda()
    document_ids = (torch.arange(60) // 23).expand(2, 60).cuda()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    outputs = []
    for name in ("sdpa", "flash_attention_2"):
        model = cat_model(**variant, **sizes).cuda().bfloat16()
        model.set_attn_implementation(name)
        packed = model(ids, document_ids=document_ids).logits
        padded = model(ids, attention_mask=mask).logits[mask.bool()]
        outputs.append(torch.cat([packed.flatten(0, 1), padded]).float())
    assert (outputs[0] - outputs[1]).abs().max() < 0.05 * outputs[0].abs().max()


@torch.no_grad()
@pytest.mark.parametrize("streams", ["qkv", "v"])
@each_variant("none")
def test_the_backend_is_the_one_asked_for(variant, streams):
    model, ids = cat_model(**variant, conv_streams=streams), random_ids(2, 30)
    expected = model(ids).logits
    model.set_conv_backend("reference")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    model.set_conv_backend("triton")  # which does not serve tensors on a CPU
    with pytest.raises(ValueError, match="triton"):
        model(ids)
    with pytest.raises(ValueError, match="must be one of auto, reference, cpu, triton"):
        model.set_conv_backend("cuda")


def test_the_backend_is_described():
    def describe(backend="auto", **fields):
        config = cat_model(**fields, conv_window=4).config
        return describe_backend(config, "cpu", torch.float32, backend)

    assert describe(conv_type="none") == "no convolutions"
    assert describe().startswith("head convolution of q, k, v (W=4): cpu, ")
    assert describe(conv_streams="v").startswith("head convolution of v (W=4)")
    named = describe("reference", **VARIANTS["depthwise"])
    assert named.startswith("depthwise convolution of q, k, v (W=4): reference, asked for by name")
    both = describe(**VARIANTS["maps"])
    assert both.startswith("multihead convolution of q, k (W=4)")
    assert "; head convolution of v for the mixing of attention maps (W=4)" in both
    assert "multihead" not in describe(**VARIANTS["maps"], conv_streams="v")
    with pytest.raises(ValueError, match="triton"):
        describe("triton")


@torch.no_grad()
def test_autocast():
    """Filters and biases in fp32 do not turn bf16 activations into fp32."""
    ids = random_ids(2, 30)
    for variant in VARIANTS.values():
        model = cat_model(**variant)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids).logits
        expected = model(ids).logits
        assert logits.dtype == torch.bfloat16
        assert (logits - expected).abs().max() < 0.05 * expected.abs().max(), variant


def test_sizes_of_these_tests():
    assert SIZES["num_attention_heads"] == HEADS and SIZES["hidden_size"] == HEADS * WIDTH
