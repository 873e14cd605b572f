"""Patterns and transforms that are registered from outside, against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cat_lm.model import attention
from cat_lm.model.attention import ScoreTransform
from tests.cat_lm.model.attention_entries import LearnedDecay, SoftCap, entries  # noqa: F401
from tests.conftest import REPOSITORY
from tests.readme import blocks
from tests.tiny_models import GROUPED, VARIANTS, cat_model, random_ids

pytestmark = pytest.mark.usefixtures("entries")
DECAY = {"score_transform": "decay", "score_options": {"start": 0.3}}
SOFTCAP, FADING = {"score_transform": "softcap"}, {"score_transform": "fading"}
BOX = {"value_transform": "box", "value_options": {"width": 4}}
SIGMOID = {"attention": "sigmoid"}
# Every implementation that each can be computed by.
COMPUTED = {
    "decay": (DECAY, ("eager", "sdpa", "flex_attention")),
    "softcap": (SOFTCAP, ("eager", "flex_attention")),
    "fading": (FADING, ("eager", "sdpa", "flex_attention")),
    "box": (BOX, ("eager", "sdpa", "flex_attention")),
    "decay+box": (DECAY | BOX, ("eager", "sdpa", "flex_attention")),
    "sigmoid": (SIGMOID, ("eager", "sdpa")),
}
CASES = [
    pytest.param(fields | {"attn_implementation": name}, id=f"{what}-{name}")
    for what, (fields, names) in COMPUTED.items()
    for name in names
]
MODELS = {"gpt_neox": VARIANTS["head"], "llama": GROUPED | {"conv_type": "none"}}
each_case = pytest.mark.parametrize("case", CASES)
each_family = pytest.mark.parametrize("family", MODELS)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def model_with(case, family, **fields):
    """A model whose logits are far from 0, so that what is done to them is seen."""
    model = cat_model(**MODELS[family] | case | {"conv_window": 4} | fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query_key_value.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(4)
    return model


def naive(module, x, case):
    """Attention of one row, with loops over heads and tokens; keys' heads are shared by two."""
    time, width = x.shape[1], 8
    query, key, value = (
        getattr(module, f"{stream}_proj")(x)[0].view(time, -1, width) for stream in "qkv"
    )
    if "value_transform" in case:
        past = torch.cat([torch.zeros(3, 2, width), value])
        value = sum(past[lag : lag + time] for lag in range(4)) / 4
    output = torch.zeros(time, 4, width)
    for head in range(4):
        for i in range(time):
            scores = torch.zeros(i + 1)
            for j in range(i + 1):
                logit = query[i, head] @ key[j, head // 2] / math.sqrt(width)
                if case.get("score_transform") == "decay":
                    logit = logit - 0.3 * (head + 1) * (i - j)
                elif case.get("score_transform") == "softcap":
                    logit = 2 * torch.tanh(logit / 2) * (1.5 if j % 2 else 1.0)
                elif case.get("score_transform") == "fading":
                    logit = logit * math.exp(-(0.01 + 0.04 * head / 3) * (i - j))
                scores[j] = logit
            if "attention" in case:
                weights = (scores - math.log(i + 1) + 0.5).sigmoid()
            else:
                weights = scores.softmax(0)
            output[i, head] = weights @ value[: i + 1, head // 2]
    return module.o_proj(output.flatten(1))


@torch.no_grad()
@each_case
def test_the_definition(case, plain_flex_attention):
    model = model_with(case, "llama", position_embedding="none")
    module, x = model.model.layers[0].self_attn, 2 * torch.randn(1, 9, 32)
    ids = torch.ones(1, 9, dtype=torch.long)
    seen = {}
    module.register_forward_hook(lambda _, __, output: seen.update(output=output[0]))
    for layer in model.model.layers:
        layer.input_layernorm = nn.Identity()
    model.model.embed_tokens.forward = lambda _: x
    model.model.layers = model.model.layers[:1]
    model(ids)
    torch.testing.assert_close(seen["output"][0], naive(module, x, case), **CLOSE)


def test_a_prepared_mask_after_a_cache_needs_all_padding():
    model = cat_model(**DECAY)
    cache = model(random_ids(1, 5), use_cache=True).past_key_values
    prepared = torch.ones(1, 1, 1, 6, dtype=torch.bool)
    padding = torch.ones(1, 6, dtype=torch.long)
    step = {"past_key_values": cache, "attention_mask": prepared}
    with pytest.raises(ValueError, match=r"padding_mask must be \[B, S\]"):
        model(random_ids(1, 1), padding_mask=padding[:, -1:], **step)
    model(random_ids(1, 1), padding_mask=padding, **step)


@torch.no_grad()
def test_example_of_the_guide_changes_logits():
    found = blocks("python", REPOSITORY / "docs/your_own_idea.md")
    (code,) = (block for block in found if "class LearnedDecay" in block)
    try:
        exec(code, {"__name__": "example"})
        ids = random_ids(1, 12)
        logits = cat_model(score_transform="learned_decay")(ids).logits
    finally:
        attention.REGISTRIES[ScoreTransform]._entries.pop("learned_decay", None)
    assert not torch.allclose(logits, cat_model()(ids).logits, atol=1e-3)
