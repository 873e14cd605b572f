"""The file that an export has for machines without cat_lm."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from cat_lm import architectures
from cat_lm import model as models
from cat_lm.ops.convolution import kinds
from cat_lm.pretrained import standalone
from tests.cat_lm.pretrained import standalone_models

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "intermediate_size": 64}
TAPS = ATTENTION | {"conv_window": 5, "conv_init": "residual"}
LONG = ATTENTION | {"conv_state": 4, "conv_init": "residual"}
NEOX, LLAMA = "Cat", "CatLlama"
# Every kind of convolution, and everything else that such a model may have, in few models.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (NEOX, ATTENTION | {"conv_type": "none"}),
    "head": (NEOX, TAPS | {"canon": "ACD", "rotary_pct": 0.5}),
    "multihead": (NEOX, TAPS | {"conv_type": "multihead", "position_embedding": "none"}),
    "maps": (NEOX, TAPS | {"conv_type": "multihead", "conv_mixing": "maps"}),
    "depthwise": (NEOX, TAPS | {"conv_type": "depthwise", "qk_norm": "rms"}),
    "long": (NEOX, LONG | {"conv_filter": "exponential"}),
    "chunk": (NEOX, TAPS | {"attention": "chunk", "conv_norm": "l1"}),
    "llama": (LLAMA, TAPS | {"num_key_value_heads": 2, "conv_rank": 3}),
    "llama_none": (LLAMA, TAPS | {"position_embedding": "none", "conv_activation": "silu"}),
    "llama_multihead": (
        LLAMA,
        TAPS | {"conv_type": "multihead", "num_key_value_heads": 2, "canon": "AC"},
    ),
    "llama_norms": (LLAMA, TAPS | {"qk_norm": "l2", "qk_norm_place": "before"}),
    "las": (
        LLAMA,
        TAPS | {"score_transform": "exponential_decay", "value_transform": "smoothing"},
    ),
    "tokens": (NEOX, ATTENTION | {"conv_type": "none", "attention": "multi_token"}),
    "ssm": (LLAMA, LONG | {"conv_filter": "ssm"}),
    "mamba": ("CatMamba", {"state_size": 4}),
    "mamba2": ("CatMamba2", {"state_size": 4, "head_dim": 16, "num_heads": 4, "n_groups": 2}),
}


def small_model(family: str, options: dict[str, Any]) -> torch.nn.Module:
    """Make a model none of whose parameters has a value by which it does nothing."""
    torch.manual_seed(0)
    config = getattr(models, f"{family}Config")(**SIZES, **options)
    model = getattr(models, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """What the models give here, and what they give where cat_lm cannot be imported."""
    folder = tmp_path_factory.mktemp("standalone")
    expected = {}
    for name, (family, options) in MODELS.items():
        model = small_model(family, options)
        expected[name] = standalone_models.outputs(model)
        model.config.auto_map = standalone.auto_map(model.config)
        model.save_pretrained(folder / name)
        file = folder / name / standalone.file_name(model.config)
        file.write_text(standalone.source(model.config), encoding="utf-8")
    environment = os.environ | {
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    program = Path(standalone_models.__file__)
    subprocess.run([sys.executable, program, folder], check=True, env=environment)
    return expected, torch.load(folder / "found.pt")


@pytest.mark.parametrize("name", MODELS)
def test_standalone_file_computes_what_the_library_does(name, results):
    expected, found = (part[name] for part in results)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5)
    assert found["gradient"].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "mamba", "mamba2"])
def test_configuration_has_the_fields_of_the_library_s(name, monkeypatch):
    kind, module = architectures.get(name).config_class(), types.ModuleType("assembled")
    monkeypatch.setitem(sys.modules, "assembled", module)
    code = compile(standalone.source(kind()), "assembled", "exec", dont_inherit=True)
    exec(code, module.__dict__)
    own = getattr(module, kind.__name__)().to_dict()
    assert {key: value for key, value in kind().to_dict().items() if key != "auto_map"} == own


@pytest.mark.parametrize("name", architectures.names())
def test_every_family_is_carried_or_says_what_needs_cat_lm(name):
    config = architectures.get(name).config_class()()
    try:
        text = standalone.source(config)
    except standalone.CannotAssemble as error:
        assert "cat_lm" in str(error)
        assert name not in ("gpt_neox", "llama", "mamba", "mamba2")
    else:
        compile(text, "assembled", "exec")
        for class_name in standalone.auto_map(config).values():
            assert f"class {class_name.partition('.')[2]}(" in text


def test_a_kind_of_a_plugin_is_refused(monkeypatch):
    custom = kinds.Kind("custom", ("H", "W"), kinds.HEAD.add_lag, "one filter for each head")
    monkeypatch.setitem(kinds.KINDS._entries, "custom", custom)
    config = models.CatConfig(**SIZES, **ATTENTION, conv_type="custom")
    with pytest.raises(standalone.CannotAssemble, match="conv_type=custom is not carried"):
        standalone.source(config)


def test_a_kernel_of_its_own_is_refused():
    config = models.CatConfig(**SIZES, **ATTENTION, attention="landmark")
    with pytest.raises(standalone.CannotAssemble, match=r"cat_lm\.ops\.landmark\.\S+ is not"):
        standalone.source(config)
