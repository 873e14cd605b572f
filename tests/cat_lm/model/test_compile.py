"""torch.compile captures a training step and a decoding step as one graph, with equal results."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig, StaticCache, masking_utils

from tests.tiny_models import cat_model, each_kind, random_ids


@torch.no_grad()
@each_kind("head", without=("llama-head", "silu", "none"))
def test_a_decoding_step_with_a_static_cache_compiles(variant):
    torch._dynamo.reset()
    model, ids = cat_model(**variant, num_hidden_layers=1, conv_window=4), random_ids(2, 16)
    cache = StaticCache(config=model.config, max_cache_len=20)
    outputs = [model(ids[:, :10], past_key_values=cache, use_cache=True).logits]
    step = torch.compile(model, backend="eager", fullgraph=True)
    for token in ids[:, 10:].split(1, dim=1):
        outputs.append(step(token, past_key_values=cache, use_cache=True).logits)
    whole = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        (3, {"family": "llama", "conv_type": "head", "canon": "ACD"}),
        pytest.param(1, {"conv_type": "head"}, marks=pytest.mark.long),
        pytest.param(
            3,
            {"conv_type": "none", "attention": "chunk", "attention_options": {"size": 6}},
            marks=pytest.mark.long,
        ),
        pytest.param(
            3,
            {"conv_type": "none", "attention": "multi_token", "attn_implementation": "eager"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_generating_padded_rows_with_a_static_cache_is_one_graph(rows, fields):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model, ids = cat_model(**fields), random_ids(rows, 9)
    mask = torch.ones_like(ids)
    mask[-1, :4] = 0
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    compiling = CompileConfig(backend=backend, mode=None, fullgraph=True)
    compiling._compile_all_devices = True  # on a CPU too
    static = {"cache_implementation": "static", "compile_config": compiling}
    assert torch.equal(model.generate(ids, **how, **static), model.generate(ids, **how))
    assert len(graphs) == 1


@pytest.mark.long
@torch.no_grad()
def test_compiled_call_checks_masks_against_the_cache():
    torch._dynamo.reset()
    model, ids = cat_model(conv_type="head", canon="A"), random_ids(2, 9)
    step = torch.compile(model, backend="eager")
    mask, gap = torch.ones_like(ids), torch.ones_like(ids)
    mask[0, :3] = gap[1, 6] = 0

    def continued(read, said, time=1):
        cache = model(ids[:, :6], attention_mask=read[:, :6], use_cache=True).past_key_values
        given = {"attention_mask": said[:, : 6 + time], "past_key_values": cache}
        return step(ids[:, 6 : 6 + time], **given).logits

    whole = model(ids, attention_mask=mask).logits[:, 6:]
    torch.testing.assert_close(continued(mask, mask, 3), whole, rtol=1e-4, atol=1e-5)
    for case in ((mask, gap), (gap, mask), (gap, gap, 3)):
        with pytest.raises(RuntimeError, match="attention_mask: "):
            continued(*case)


@pytest.mark.parametrize("variant", [{"conv_type": "head"}, {"family": "llama"}])
def test_a_captured_training_step_has_no_mask(variant, monkeypatch):
    """SDPA takes flash attention only without one, and transformers 5.17 built it there."""
    torch._dynamo.reset()
    calls = []

    def capture(graph, inputs):
        calls.extend(node for node in graph.graph.nodes if "scaled_dot" in str(node.target))
        return graph

    def built(**inputs):
        raise AssertionError("a causal mask was built")

    monkeypatch.setattr(masking_utils, "create_causal_mask", built)
    ids = random_ids(2, 24)
    model = cat_model(**variant, num_hidden_layers=1, attn_implementation="sdpa").train()
    eager = model(input_ids=ids, labels=ids).loss
    model.compile(backend=capture, fullgraph=True)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, eager)
    (call,) = calls
    assert call.kwargs["attn_mask"] is None and call.kwargs["is_causal"] is True
