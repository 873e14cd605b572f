"""Patterns of attention and transforms of scores and values, registered from outside."""

import math

import pytest
import torch
import yaml
from torch import nn

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.model import attention
from cat_lm.model.attention import ScoreTransform
from cat_lm.pretrained.loading import load_model
from tests.conftest import REPOSITORY
from tests.readme import blocks
from tests.unit.attention_entries import LearnedDecay, SoftCap, entries  # noqa: F401
from tests.unit.tiny_models import (
    GROUPED,
    SIZES,
    VARIANTS,
    cat_model,
    random_ids,
    stock_model,
    with_weights_of,
)

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


@torch.no_grad()
@each_family
def test_flex_attention_names_the_cache_that_it_generates_with(family, plain_flex_attention):
    model = model_with({"attn_implementation": "flex_attention"}, family)
    ids, options = random_ids(1, 9), {"max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **options)
    said = "attn_implementation=flex_attention: .*static cache; use cache_implementation='dynamic'"
    with pytest.raises(ValueError, match=said):
        model.generate(ids, cache_implementation="static", **options)
    found = model.generate(ids, cache_implementation="dynamic", **options)
    assert torch.equal(found, expected)


@each_family
@pytest.mark.parametrize("case", [DECAY, FADING, SIGMOID], ids=["decay", "fading", "sigmoid"])
def test_gradients_reach_the_parameters_and_agree(case, family):
    ids, found = random_ids(2, 12), []
    for name in ("eager", "sdpa"):
        model = model_with(case, family, attn_implementation=name).train()
        model(ids, labels=ids).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    own = [name for name in found[0] if "score_transform" in name or "core" in name]
    assert len(own) == 2 and all(found[0][name].abs().min() > 0 for name in own)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@each_family
def test_models_are_saved_loaded_and_described(family, tmp_path):
    model, ids = model_with(DECAY | BOX, family), random_ids(2, 12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        model.save_pretrained(tmp_path)
        loaded = load_model(tmp_path)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    section = architectures.section_of(loaded.config)
    assert section.score_options == {"start": 0.3} and section.value_transform == "box"
    assert "learned decay, box of values" in architectures.get(family).summary(section).words


@each_family
def test_missing_parameters_start_as_they_should(family, tmp_path):
    """A stock model's file has none of them."""
    stock = stock_model(family=family)
    stock.save_pretrained(tmp_path)
    kinds = architectures.get(family).classes()
    config = kinds.config(**SIZES, conv_type="none", **DECAY)
    model = kinds.causal_lm.from_pretrained(tmp_path, config=config)
    slopes = [p for name, p in model.named_parameters() if "slopes" in name]
    assert len(slopes) == 2
    for own in slopes:
        torch.testing.assert_close(own.data, torch.tensor([0.3, 0.6, 0.9, 1.2]))
    zero = with_weights_of(stock, family=family, conv_type="none", score_transform="none")
    assert torch.equal(zero(random_ids(1, 9)).logits, stock(random_ids(1, 9)).logits)


def test_a_training_step_compiles_without_a_graph_break():
    """Of an additive transform, which this project has none of."""
    torch._dynamo.reset()
    ids, found = random_ids(2, 24), []
    documents = (torch.arange(24) // 10).expand(2, 24)
    model = model_with(DECAY | BOX, "gpt_neox", num_hidden_layers=1).train()
    for compiled in (False, True):
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, document_ids=documents).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for eager, other in zip(*found, strict=True):
        torch.testing.assert_close(other, eager)


REFUSED = [
    (
        {"score_transform": "alibi"},
        "score_transform=[\"']alibi[\"']: must be one of none, exponential_decay, decay",
    ),
    (
        {"value_transform": "box2"},
        "value_transform=[\"']box2[\"']: must be one of none, smoothing, box",
    ),
    (
        {"attention": "linear"},
        "attention=[\"']linear[\"']: must be one of softmax, chunk, .*sigmoid",
    ),
    (
        {**DECAY, "score_options": {"slope": 1}},
        "score_options.slope: unknown with score_transform",
    ),
    ({**DECAY, "score_options": {"start": -1}}, "score_options.start=-1: must be a number"),
    ({"score_options": {"start": 1}}, "score_options={.*}: says nothing with score_transform=none"),
    ({"attention": "map_mixing"}, "attention=map_mixing: is chosen by conv_type=multihead"),
    ({**SIGMOID, **VARIANTS["maps"]}, "attention=sigmoid: not with conv_mixing=maps"),
    ({**DECAY, **VARIANTS["maps"]}, "score_transform=decay: cannot be combined with mixed attent"),
    ({**BOX, **SIGMOID}, "value_transform=box: cannot be combined with sigmoid attention"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=str)
def test_what_cannot_be_is_one_line(fields, said, tmp_path):
    """In a configuration, and in a run's YAML."""
    with pytest.raises(ValueError, match=said):
        cat_model(**fields)
    path = tmp_path / "run.yaml"
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sections = {"model": shape | fields, "data": {"path": "d", "context_length": 64}}
    train = {"output_dir": "o", "max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1}
    path.write_text(yaml.safe_dump({**sections, "train": train, "optimizer": {"lr": 1e-3}}))
    with pytest.raises(UserError, match=r": model\." + said):
        load_config(path)


def test_what_an_implementation_cannot_compute_is_refused(plain_flex_attention):
    said = "attn_implementation=sdpa: cannot compute capped scores .*use one of eager, flex_attent"
    with pytest.raises(ValueError, match=said):
        cat_model(**SOFTCAP, attn_implementation="sdpa")
    model = cat_model(**SOFTCAP, attn_implementation="eager")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=said):
        model(random_ids(1, 5))
    model = cat_model(**DECAY, attn_implementation="flex_attention", attention_dropout=0.1).train()
    with pytest.raises(ValueError, match="has no dropout"):
        model(random_ids(1, 5))


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
def test_the_example_of_the_readme():
    (code,) = blocks("python", REPOSITORY / "cat_lm/model/attention/README.md")
    try:
        exec(code, {"__name__": "example"})
        ids = random_ids(1, 12)
        logits = cat_model(score_transform="learned_decay")(ids).logits
    finally:
        attention.REGISTRIES[ScoreTransform]._entries.pop("learned_decay", None)
    assert not torch.allclose(logits, cat_model()(ids).logits, atol=1e-3)


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="score_transform 'decay': there is one"):
        attention.register(LearnedDecay())
    assert "decay" in attention.names(ScoreTransform)
