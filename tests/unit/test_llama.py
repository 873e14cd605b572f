"""Llama: the library's model without convolutions, filters of shared heads, sizes, names, decay."""

import math
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import cat_lm  # noqa: F401
from cat_lm import architectures
from cat_lm.model import CatLlamaConfig, CatLlamaForCausalLM, CatLlamaModel
from cat_lm.model.cache import StateDynamicLayer
from cat_lm.model.hf.configuration_llama import check_settings
from cat_lm.model.hf.long_context import effective_scaling
from cat_lm.model.rope_scaling import yarn_temperature
from cat_lm.model.weight_decay import parameters_by_decay
from cat_lm.pretrained.scaled import scaled_config, scaled_fields
from tests.unit.tiny_models import (
    GROUPED,
    LLAMA_VARIANTS,
    SIZES,
    VARIANTS,
    cat_model,
    own_name,
    random_ids,
    stock_model,
    with_weights_of,
)

IDS = random_ids(2, 70)
KINDS = ("none", "head", "depthwise", "multihead")
# TF++ of the paper's Table 2.
PAPER_MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
}
HEADS = {"all heads": {}, "grouped": {"num_key_value_heads": 2}, "one": {"num_key_value_heads": 1}}
SCALED = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


def gradients(model):
    model.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_the_library(kind, heads, attn_implementation):
    fields = {"attention_bias": heads == "grouped", "mlp_bias": heads == "one", **HEADS[heads]}
    fields |= {"family": "llama", "attn_implementation": attn_implementation}
    stock = stock_model(**fields)
    model = with_weights_of(stock, conv_type=kind, **fields)
    logits, expected = model(IDS).logits, stock(IDS).logits
    if kind == "none":
        assert torch.equal(logits, expected)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    ours = gradients(model)
    for name, gradient in gradients(stock).items():
        own = ours[own_name(model, name)]
        torch.testing.assert_close(own, gradient, rtol=1e-4, atol=1e-6, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaled", SCALED)
def test_scaled_positions_and_flex_attention_equal_the_library(scaled, kind, plain_flex_attention):
    fields = {
        **GROUPED,
        "rope_parameters": {**SCALED[scaled], "rope_theta": 5000.0},
        "attn_implementation": "flex_attention",
        "head_dim": 16,
    }
    stock = stock_model(**fields | {"rope_parameters": dict(fields["rope_parameters"])})
    model = with_weights_of(stock, conv_type=kind, **fields)
    torch.testing.assert_close(model(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "scope"),
    [("pi", "logits"), ("yarn", "rotary"), ("yarn", "logits"), ("pi+temperature", "logits")],
)
def test_longer_contexts_are_read_as_by_the_library(method, scope):
    """But for the temperature of all logits, which the library has not."""
    stock = stock_model(**GROUPED)
    fields = scaled_fields(stock.config, method, 4, 32, scope)
    config = scaled_config(stock.config, fields)
    assert type(config) is CatLlamaConfig and config.conv_type == "none"
    model = CatLlamaForCausalLM(config).eval()
    model.load_state_dict(stock.state_dict())
    found = effective_scaling(model)
    assert (found["rope_type"], found["rope_factor"]) == (fields["rope_parameters"]["rope_type"], 4)
    temperature = yarn_temperature(4) if "temperature" in method or method == "yarn" else 1.0
    temperature = 1.0 if scope == "rotary" else temperature
    assert found["attention_temperature"] == pytest.approx(temperature)
    shared = ("rope_parameters", "max_position_embeddings")
    changes = {key: value for key, value in fields.items() if key in shared}
    theirs = LlamaForCausalLM(LlamaConfig(**stock.config.to_dict() | changes)).eval()
    theirs.load_state_dict(stock.state_dict())
    for layer in theirs.model.layers:
        layer.self_attn.scaling /= temperature
    torch.testing.assert_close(model(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-6)
    model.model.layers[0].self_attn.scaling = 1.0
    with pytest.raises(RuntimeError, match="attention scales logits"):
        effective_scaling(model)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in LLAMA_VARIANTS if name != "llama-none"])
def test_the_definition_of_the_attention_with_shared_keys_and_values(name):
    """Loops over heads, lags and tokens; query head h reads keys and values of head h // 2."""
    time, window, width = 9, 4, 8
    model = cat_model(**LLAMA_VARIANTS[name], conv_window=window, position_embedding="none")
    attention, x = model.model.layers[0].self_attn, torch.randn(1, time, 32)
    streams = {}
    for stream, heads in (("q", 4), ("k", 2), ("v", 2)):
        plain = getattr(attention, f"{stream}_proj")(x)[0].view(time, heads, width)
        filters = getattr(attention.convolution, f"{stream}_filter")
        bias = getattr(attention.convolution, f"{stream}_bias").view(heads, width)
        sums = torch.zeros_like(plain)
        for t in range(time):
            for lag in range(min(window, t + 1)):
                taps = filters[lag] if "multi" in name else filters[..., lag]
                past = plain[t - lag]
                sums[t] += taps @ past if "multi" in name else taps.view(heads, -1) * past
        streams[stream] = F.silu(sums + bias) if "silu" in name else sums + bias
    expected = torch.zeros(time, 4, width)
    for head in range(4):
        for t in range(time):
            keys = streams["k"][: t + 1, head // 2]
            scores = keys @ streams["q"][t, head] / math.sqrt(width)
            expected[t, head] = scores.softmax(0) @ streams["v"][: t + 1, head // 2]
    actual, _ = attention(x, attention_mask=None)
    torch.testing.assert_close(actual[0], attention.o_proj(expected.flatten(1)), atol=1e-5, rtol=0)


def count(**fields):
    with torch.device("meta"):
        model = CatLlamaForCausalLM(CatLlamaConfig(**PAPER_MODEL | fields))
    return sum(parameter.numel() for parameter in model.parameters())


def test_parameter_counts():
    plain = 373_867_520
    assert count(conv_type="none") == plain
    assert count(conv_type="head", conv_window=21) == 373_891_712
    assert count(conv_type="depthwise", conv_window=4) == plain + 24 * 3 * 1024 * 4
    assert count(conv_type="multihead", conv_window=21) == plain + 24 * 3 * 21 * 256
    shared = {"num_key_value_heads": 4}
    with torch.device("meta"):
        stock = LlamaForCausalLM(LlamaConfig(**PAPER_MODEL | shared))
    grouped = sum(parameter.numel() for parameter in stock.parameters())
    assert count(**shared, conv_type="none") == grouped
    assert count(**shared, conv_type="head", conv_window=21) == grouped + 24 * 21 * (16 + 4 + 4)
    assert count(**shared, conv_type="multihead", conv_window=3) == grouped + 24 * 3 * (
        256 + 16 + 16
    )


@pytest.mark.parametrize("fields", [{}, GROUPED, {"head_dim": 16, "mlp_bias": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_section_counts_as_the_model(kind, fields):
    model = cat_model(**{"family": "llama", "conv_type": kind, **fields})
    family = architectures.of_config(model.config)
    section = family.section(model.config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert family.num_parameters(section, 0) == counted
    taps = [p.numel() for name, p in model.named_parameters() if name.endswith("_filter")]
    assert family.elementwise_parameters(section) == sum(taps)
    cache = model(IDS, use_cache=True).past_key_values
    held = sum(
        tensor.nbytes
        for layer in cache.layers
        for tensor in (layer.keys, layer.values, *getattr(layer, "inputs", {}).values())
    )
    assert family.state_bytes(section, IDS.shape[1], 4) == held / len(IDS)


@pytest.mark.parametrize("fields", [{}, GROUPED], ids=["all heads", "grouped"])
@pytest.mark.parametrize("kind", ["none", "head", "silu", "multihead"])
def test_saved_tensors_are_those_of_a_layer(kind, fields):
    """What a second layer adds to autograd's, counted once each, without weights."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 256}
    held = []
    for layers in (1, 2):
        model = cat_model(
            **{"family": "llama", **fields, **VARIANTS[kind], **sizes},
            num_hidden_layers=layers, conv_window=4,
        ).train()  # fmt: skip
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found = {}

        def pack(tensor, weights=weights, found=found):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and tensor.numel() > 128 * 64:
                found[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(random_ids(8, 64), labels=random_ids(8, 64)).loss
        held.append(sum(size for size, _ in found.values()))
        del loss
    family = architectures.of_config(model.config)
    expected = family.saved_tensors(family.section(model.config)) * 8 * 64 * 128 * 4
    assert (held[1] - held[0]) / expected == pytest.approx(1, abs=0.2)


def test_names_are_the_librarys_and_the_convolutions():
    theirs = set(stock_model(**GROUPED).state_dict())
    own = {f"{s}_{what}" for s in "qkv" for what in ("filter", "bias")}
    for name, variant in LLAMA_VARIANTS.items():
        ours = set(cat_model(**variant).state_dict())
        moved = {key for key in theirs if re.search(r"\.[qkv]_proj\.bias$", key)}
        added = {f"model.layers.{i}.self_attn.convolution.{key}" for i in range(2) for key in own}
        assert ours == (theirs if name == "llama-none" else theirs - moved | added)


@pytest.mark.parametrize("name", LLAMA_VARIANTS)
def test_saving_loading_and_the_librarys_files(name, tmp_path):
    model = cat_model(**LLAMA_VARIANTS[name])
    model.save_pretrained(tmp_path / "ours")
    config = AutoConfig.from_pretrained(tmp_path / "ours")
    assert type(config) is CatLlamaConfig and config.num_key_value_heads == 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded) is CatLlamaForCausalLM
    assert type(AutoModel.from_pretrained(tmp_path / "ours")) is CatLlamaModel
    assert load_file(tmp_path / "ours/model.safetensors").keys() == model.state_dict().keys()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)

    stock = stock_model(**GROUPED)
    stock.save_pretrained(tmp_path / "stock")
    fields = {k: v for k, v in LLAMA_VARIANTS[name].items() if k != "family"}
    if fields.pop("conv_activation", None) is None:
        read = CatLlamaForCausalLM.from_pretrained(
            tmp_path / "stock", config=CatLlamaConfig(**SIZES | fields)
        )
        torch.testing.assert_close(read(IDS).logits, stock(IDS).logits, rtol=1e-5, atol=1e-6)


def test_initial_weights():
    sizes = SIZES | {"hidden_size": 128, "vocab_size": 500, "intermediate_size": 512}
    torch.manual_seed(0)
    model = CatLlamaForCausalLM(CatLlamaConfig(**sizes, attention_bias=True, mlp_bias=True))
    small, wang = math.sqrt(2 / (5 * 128)), 2 / (2 * math.sqrt(128))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("_filter"):
            assert (parameter[:, 0] == 1).all() and not parameter[:, 1:].any(), name
        else:
            std = wang if name.endswith(("o_proj.weight", "down_proj.weight")) else small
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name


def test_the_row_of_padding_is_trained():
    model = cat_model(family="llama")
    model(torch.zeros(1, 5, dtype=torch.long), labels=random_ids(1, 5)).loss.backward()
    assert model.model.embed_tokens.weight.grad[SIZES["pad_token_id"]].any()


def test_norms_biases_and_filters_take_no_decay():
    for variant in LLAMA_VARIANTS.values():
        model = cat_model(**variant, mlp_bias=True)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decayed, exempt = parameters_by_decay(model)
        assert len(decayed) + len(exempt) == len(names)
        for parameter in exempt:
            assert re.search(r"(bias|norm\.weight|_filter)$", names[id(parameter)])
        assert all(parameter.ndim == 2 for parameter in decayed)


def test_gradient_checkpointing_changes_nothing():
    """Also that a recomputed layer reads documents and padding again."""
    found = []
    for checkpointing in (False, True):
        model = cat_model(**LLAMA_VARIANTS["llama-head"]).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        documents = (torch.arange(70) // 30).expand(2, 70)
        model(IDS, labels=IDS, document_ids=documents).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_each_stream_has_its_state():
    model = cat_model(**LLAMA_VARIANTS["llama-head"], conv_streams="qv", conv_window=5)
    layer = model(IDS, use_cache=True).past_key_values.layers[0]
    assert isinstance(layer, StateDynamicLayer)
    assert {name: list(kept.shape) for name, kept in layer.inputs.items()} == {
        "q": [2, 4, 4, 8],
        "v": [2, 4, 2, 8],
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=4"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be from 1 to 4,096"),
        ({"conv_type": "multihead", "conv_mixing": "maps"}, "conv_mixing=maps: is for gpt_neox"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0: must be from"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default"}},
            "partial_rotary_factor=0.5: all channels of a head are rotated",
        ),
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
            r"rope_parameters.rope_theta=7.0: give it as rope_theta, which is 5.0",
        ),
        ({"temperature_scope": "rotary", "position_embedding": "none"}, "nothing is rotated"),
        ({"conv_type": "heads"}, "conv_type='heads' is not supported"),
    ],
    ids=str,
)
def test_wrong_configurations_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        CatLlamaConfig(**SIZES, **fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlp_bias": "yes"}, "mlp_bias='yes': must be true or false"),
        ({"num_key_value_heads": 5}, "must divide num_attention_heads=32"),
        ({"hidden_size": "wide"}, "hidden_size='wide': must be a whole number"),
    ],
    ids=str,
)
def test_wrong_files_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        check_settings(settings)
    check_settings({"hidden_size": 64, "num_attention_heads": 4})
