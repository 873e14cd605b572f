"""Landmark attention in models: padding, work and memory of decoding, precision, gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cat_lm.model import attention
from cat_lm.model.cache import CatCache
from cat_lm.model.hf.configuration import CatConfig
from cat_lm.ops.landmark import attend, decode, select
from tests.tiny_models import GROUPED, VARIANTS, cat_model, random_ids

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
OPTIONS = {"block": 4, "top_k": 2, "local": 2}
OPTION_NAMES = attention.pattern(CatConfig(attention="landmark")).options.keys()
FAMILIES = {"gpt_neox": VARIANTS["head"], "llama": GROUPED | {"conv_type": "none"}}
each_family = pytest.mark.parametrize("family", FAMILIES)
# One of each filter and of each share.
KINDS = {
    "box": {},
    "exponential": {"filter": "exponential", "share": "layer", "sink": True},
    "learned": {"filter": "learned"},
    "ssm": {"filter": "ssm", "filter_state": 4},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def landmark_model(family="gpt_neox", **options):
    own = {name: options.pop(name) for name in OPTION_NAMES & options.keys()}
    fields = {"conv_window": 3, **FAMILIES[family], **options}
    model = cat_model(attention="landmark", attention_options=OPTIONS | own, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query_key_value.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(4)  # so that the choice of blocks matters
    return model


def chunks(model, ids, lengths, cache=None, mask=None):
    """The logits of rows that are given in parts."""
    cache, outputs, start = cache or CatCache(model.config), [], 0
    for length in lengths:
        stop = start + length
        given = None if mask is None else mask[:, :stop]
        output = model(ids[:, start:stop], attention_mask=given, past_key_values=cache)
        outputs.append(output.logits)
        start = stop
    return torch.cat(outputs, dim=1), cache


@torch.no_grad()
@each_kind
@pytest.mark.parametrize("paddings", [(9,), (6, 11)])
@pytest.mark.parametrize("by", ["sdpa", "eager"])
def test_prompts_of_which_none_fills_its_row(by, paddings, kind):
    """As where texts are padded to a fixed length; the first part has no complete block."""
    model = landmark_model(**KINDS[kind])
    model.set_attn_implementation(by)
    rows, mask = random_ids(len(paddings), 40), torch.ones(len(paddings), 40, dtype=torch.long)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = 0
    for lengths in ([40], [12, 25, 1, 2]):
        found, _ = chunks(model, rows, lengths, mask=mask)
        for row, padding in enumerate(paddings):
            expected = model(rows[row : row + 1, padding:], use_cache=False).logits[0]
            torch.testing.assert_close(found[row, padding:], expected, **CLOSE)


class Written(TorchDispatchMode):
    """Counts the numbers that operators write into new tensors, all and those of the largest."""

    def __init__(self):
        super().__init__()
        self.numbers = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        found = function(*args, **kwargs or {})
        for x in found if isinstance(found, tuple) else (found,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.numbers += x.numel()
                self.largest = max(self.largest, x.numel())
        return found


@torch.no_grad()
@pytest.mark.parametrize("compiled", [True, False])
def test_a_token_copies_nothing_of_the_past(compiled, monkeypatch):
    """Beside what is done for each landmark, a step at 1,600 tokens does what it does at 400."""

    if not compiled:
        monkeypatch.setattr(decode, "has_kernel", lambda *_: False)

    def step(model, tokens):
        ids = random_ids(1, tokens + 2)
        _, cache = chunks(model, ids, [tokens, 1])
        with Written() as written:
            model(ids[:, -1:], past_key_values=cache)
        return written.numbers

    fields = {"num_hidden_layers": 1, "max_position_embeddings": 2048, "block": 16}
    model = landmark_model(**fields)
    short, long = step(model, 400), step(model, 1600)
    blocks = (1600 - 400) // 16
    assert long - short < 60 * blocks < (1600 - 400) * 32  # about ten numbers a head and landmark
    dense = cat_model(conv_type="none", num_hidden_layers=1, max_position_embeddings=2048)
    assert step(dense, 1600) - step(dense, 400) >= 2 * (1600 - 400) * 32  # keys and values


@torch.no_grad()
@each_family
def test_long_rows_are_read_in_parts(family, monkeypatch):
    """By the same definition, padded and in a cache, in memory that grows with their length."""
    model, ids = landmark_model(family, max_position_embeddings=512), random_ids(2, 400)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    expected = model(ids[:, :90], attention_mask=mask[:, :90], use_cache=False).logits
    monkeypatch.setattr(attend, "QUERY_CHUNK", 32)
    monkeypatch.setattr(select, "QUERY_CHUNK", 32)
    for use_cache in (False, True):
        found = model(ids[:, :90], attention_mask=mask[:, :90], use_cache=use_cache).logits
        real = mask[:, :90].bool()
        torch.testing.assert_close(found[real], expected[real], **CLOSE)
    largest = []
    for time in (200, 400):
        with Written() as written:
            model(ids[:, :time], logits_to_keep=1, use_cache=True)
        largest.append(written.largest)
    assert largest[1] <= 2.1 * largest[0]
