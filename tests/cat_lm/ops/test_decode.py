"""Decoding a token by one kernel: its launches are counted on a GPU that is not there."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from tests.cat_lm.model.test_gpu_counts import WIDTH, model
from tests.cat_lm.ops.compiled import needs_triton
from tests.cat_lm.ops.fake_gpu import Counts, fake_gpu, on_fake_gpu
from tests.tiny_models import LLAMA_VARIANTS, VARIANTS

pytestmark = needs_triton
# Of a layer and token. GPT-NeoX's least is 4 products, 2 norms, GELU, 2 sums, attention, 2 joinings
# of keys and values with the cache's; 12 more rotate in a layer without convolutions.
LEAST = 12
LAUNCHES = {
    "none": LEAST + 12,
    "head": LEAST + 1,
    "depthwise": LEAST + 1,
    "silu": LEAST + 1,
    "multihead": LEAST + 1,
    "maps": LEAST + 1 + 8,  # maps are made and mixed by operators of torch
    # 8 kernels more for each norm, and the MLP's third product and its gate's product.
    "llama-none": 40,
    "llama-head": 31,
    "llama-silu": 31,
    "llama-multihead": 31,
}


def decoded(layers: int, variant: dict, times: tuple[int, ...] = (64, 1)) -> Counts:
    """What the last of several inputs costs, of so many tokens each: a token after a prompt."""
    fields = dict(variant)
    body = model(layers, fields.pop("family", "gpt_neox"), fields).eval()
    with fake_gpu() as gpu, torch.no_grad():
        on_fake_gpu(body, torch.bfloat16)
        cache = DynamicCache(config=body.config)
        for time in times:
            gpu.counts = Counts()
            tokens = torch.empty(1, time, WIDTH, dtype=torch.bfloat16)
            body(inputs_embeds=tokens, past_key_values=cache, use_cache=True)
        return gpu.counts


@pytest.mark.parametrize("cached", [False, True])
def test_no_plan_is_made_for_a_length_of_keys(cached):
    """cuDNN, which makes them, may compute attention without a cache alone."""
    body, enabled = model(1, "gpt_neox", VARIANTS["head"]).eval(), []
    with fake_gpu(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        attend = F.scaled_dot_product_attention

        def noted(*given, **named):
            enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
            return attend(*given, **named)

        patch.setattr(F, "scaled_dot_product_attention", noted)
        on_fake_gpu(body, torch.bfloat16)
        cache = DynamicCache(config=body.config) if cached else None
        tokens = torch.empty(1, 8, WIDTH, dtype=torch.bfloat16)
        body(inputs_embeds=tokens, past_key_values=cache, use_cache=cached)
        assert enabled == [not cached]
        patch.setattr(F, "scaled_dot_product_attention", None)
        with pytest.raises(TypeError):
            body(inputs_embeds=tokens, past_key_values=cache, use_cache=cached)
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("kind", LAUNCHES)
def test_launches_of_a_layer_and_token(kind):
    """A token's arithmetic takes no time: the host's launches do."""
    variant = (VARIANTS | LLAMA_VARIANTS)[kind]
    counts = decoded(2, variant) - decoded(1, variant)
    assert counts.launches == LAUNCHES[kind], counts.kernels
    assert counts.kernels["decode_kernel"] == (kind.rpartition("-")[2] != "none")
    assert counts.waits == []


def test_a_prompt_with_a_cache_is_one_kernel_too():
    """Nothing is before it: it takes the fused kernel of a sequence."""
    kernels = decoded(1, VARIANTS["head"], times=(64,)).kernels
    assert kernels["forward_kernel"] == 1
