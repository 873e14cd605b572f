"""The projection with convolutions: every kind as its definition reads; backends; refusals."""

import importlib.util
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm.model.hf.inspection import describe_backend
from tests.unit.tiny_models import VARIANTS, cat_model, each_variant, random_ids

HEADS, WIDTH, WINDOW, TIME = 4, 8, 5, 20


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
