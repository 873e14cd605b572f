"""What is measured on fake tensors, against real models and equations of the papers."""

from __future__ import annotations

import copy

import pytest
import torch

from cat_lm import counts
from cat_lm.config import RunConfig
from cat_lm.counts import count_parameters, fake_model, flops_per_token, saved_bytes, state_bytes
from cat_lm.ops.runtime.flops import FlopCounter, flops
from cat_lm.training.building import build_model
from cat_lm.training.estimate import meta_model
from tests.runs import run_values

C, H, T, V = 64, 4, 256, 512
NEOX = {"hidden_size": C, "num_hidden_layers": 4, "num_attention_heads": H, "vocab_size": V}
HEAD = NEOX | {"conv_type": "head", "conv_window": 5}
WIDE = {"architecture": "mixer", "hidden_size": C, "num_hidden_layers": 4, "vocab_size": V}
LINEAR = {"hidden_size": C, "num_hidden_layers": 4, "num_heads": H, "vocab_size": V}
MODELS = {
    "neox": NEOX,
    "head": HEAD,
    "eager": HEAD | {"attn_implementation": "eager", "attention_dropout": 0.1},
    "multihead": HEAD | {"conv_type": "multihead", "conv_streams": "v"},
    "maps": HEAD | {"conv_type": "multihead", "conv_mixing": "maps"},
    "long": NEOX | {"conv_type": "head", "conv_filter": "ssm", "conv_state": 16},
    "ranks": HEAD | {"conv_rank": 2, "qk_norm": "rms", "qk_norm_place": "before"},
    "canon": NEOX | {"canon": "ACD", "qk_norm": "l2"},
    "las": NEOX | {"score_transform": "exponential_decay", "value_transform": "smoothing"},
    "chunk": NEOX | {"attention": "chunk", "attention_options": {"size": 32}},
    "landmark": NEOX | {"attention": "landmark", "attention_options": {"block": 16, "top_k": 2}},
    "multi_token": NEOX | {"attention": "multi_token", "attn_implementation": "eager"},
    "llama": HEAD | {"architecture": "llama", "num_key_value_heads": 2},
    "gla": LINEAR | {"architecture": "gla"},
    "delta_net": LINEAR | {"architecture": "delta_net"},
    "gated_deltanet": LINEAR | {"architecture": "gated_deltanet"},
    "mamba": {"architecture": "mamba", "hidden_size": C, "num_hidden_layers": 4, "vocab_size": V},
    "mamba2": {"architecture": "mamba2", "hidden_size": C, "num_hidden_layers": 4}
    | {"head_dim": 16, "num_heads": 8, "vocab_size": V},
    "based": WIDE | {"mixer": "based"},
    "linear": WIDE | {"mixer": "linear-attention"},
}
every_model = pytest.mark.parametrize("name", MODELS)


def run_config(name: str, **train) -> RunConfig:
    values = run_values("unused", "unused", max_steps=2, **train)
    values["model"] = MODELS[name]
    values["data"] |= {"context_length": T}
    return RunConfig.model_validate(values)


def meta(name: str):
    return meta_model(run_config(name), 0)


def real(name: str):
    return build_model(run_config(name), 0)


@every_model
def test_saved_bytes_are_those_of_a_real_pass(name):
    model, ids = real(name).train(), torch.zeros(2, T, dtype=torch.long)
    kept = {}
    weights = {x.untyped_storage().data_ptr() for x in model.parameters()}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = model(input_ids=ids, shift_labels=ids, skip_logits=True, use_cache=False)
    saved = saved_bytes(meta(name), 2, T)
    assert outputs.loss.isfinite()
    assert saved.rest + saved.layers == pytest.approx(sum(kept.values()), rel=0.05)
    assert saved.streams == 2 * T * C * 4 * 4  # what each of four layers reads, in fp32
    assert saved.layers / 4 <= saved.largest * 1.001 < saved.layers


def named(layer) -> list[torch.Tensor]:
    """The states of a cache's layer that have names, if it has any."""
    return [x for kind in ("inputs", "recurrent") for x in getattr(layer, kind, {}).values()]


@every_model
def test_decoding_state_is_that_of_a_real_cache(name):
    model = real(name).eval()
    with torch.no_grad():
        cache = model(torch.zeros(1, T, dtype=torch.long), use_cache=True).past_key_values
    states = [
        x
        for layer in cache.layers
        for x in (layer.keys, layer.values, getattr(layer, "landmarks", None), *named(layer))
        if x is not None
    ]
    expected = sum(x.numel() * x.itemsize for x in states)
    assert state_bytes(meta(name), T) == pytest.approx(expected, rel=1e-6)


def test_decoding_state_of_a_long_text_grows_on():
    assert state_bytes(meta("neox"), 10_000) == 10_000 * 4 * 2 * C * 4


@every_model
def test_layers_that_are_left_out_need_as_much(name, monkeypatch):
    few = flops_per_token(meta(name), T), saved_bytes(meta(name), 1, T).layers
    monkeypatch.setattr(counts, "_kind", id)  # every layer is its own kind
    with fake_model(meta(name)) as whole:
        assert len(whole.layers) == 4
    every = flops_per_token(meta(name), T), saved_bytes(meta(name), 1, T).layers
    assert few == pytest.approx(every, rel=1e-3)


def matrices(model) -> int:
    """The parameters of matrix products, those of the head among them."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


# Of a layer and token, forward and backward, beside what parameters multiply.
ATTENTION = 12 * T * C
MIXING = {
    "neox": ATTENTION,
    "eager": ATTENTION + 3 * 6 * 5 * C,
    "head": ATTENTION + 3 * 6 * 5 * C,
    "multihead": ATTENTION + 6 * 5 * H * C,
    # Every map meets the values of all heads, mixed by a convolution for each.
    "maps": ATTENTION * (1 + H) / 2 + 2 * 6 * 5 * H * C + H * 6 * 5 * C,
    "long": ATTENTION + 3 * 6 * (3 * 16 + 1) * C,
    # Queries and keys are twice as wide, and values padded to their width.
    "ranks": ATTENTION * 2 + 5 * 6 * 5 * C,
    "canon": ATTENTION + 6 * 4 * (2 * C + 4 * C),
    "chunk": 12 * 32 * C,
    # Two chosen blocks and two near ones; and the queries' products with T / 16 landmarks.
    "landmark": 12 * 4 * 16 * C + 6 * (T // 16) * C,
    "llama": ATTENTION + 6 * 5 * 2 * C,
    "mamba": 27 * 2 * C * 16 + 6 * 4 * 2 * C,
    "delta_net": 18 * C * C / H + 3 * 6 * 4 * C,
}


@pytest.mark.parametrize("name", MIXING)
def test_operations_are_those_of_the_papers(name):
    found = flops_per_token(meta(name), T)
    assert found == pytest.approx(6 * matrices(meta(name)) + 4 * MIXING[name], rel=2e-3)


def test_an_operator_s_word_stands_for_what_it_computes():
    @flops(lambda x: 7.0)
    def operator(x):
        return inner(x @ x)

    @flops(lambda x: 1000.0)
    def inner(x):
        return x @ x

    x = torch.ones(4, 4)
    with FlopCounter() as counter:
        operator(x)
        x @ x
    assert counter.total == 7 + 2 * 4**3
    assert operator(x).shape == (4, 4)


def test_ranks_that_share_sequences_send_streams_there_and_back():
    run = run_config("head")
    whole = saved_bytes(meta_model(run, 0), 1, T)
    half = saved_bytes(meta_model(run, 0), 1, T, parts=2)
    # Of half of the tokens, queries, keys, values and what attention makes, half of each.
    assert half.sent == 4 * (T // 2) * 4 * C / 2 * 4
    assert whole.sent == 0
    assert half.layers == pytest.approx(whole.layers / 2, rel=0.1)


def test_nothing_is_changed_or_drawn():
    state, config = torch.get_rng_state(), copy.deepcopy(run_config("head"))
    parameters = count_parameters(meta_model(config, 0))
    assert parameters == count_parameters(real("head")) == real("head").num_parameters()
    torch.set_rng_state(state)
    flops_per_token(meta_model(config, 0), T)
    saved_bytes(meta_model(config, 0), 1, T)
    assert torch.equal(torch.get_rng_state(), state)
    assert config == run_config("head")
