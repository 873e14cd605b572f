"""How parameters of modules from outside start and decay, in attention, mixers and recall."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from cat_lm import architectures, mixers
from cat_lm.core.errors import UserError
from cat_lm.mixers import MixerKind, make_mixer
from cat_lm.model import CatMixerConfig, CatMixerForCausalLM, attention
from cat_lm.model.attention import Pattern
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.training.building import load_initial_weights
from eval.recall.model import RecallModel
from tests.tiny_models import SIZES

WIDTH = SIZES["hidden_size"]


class Gate(nn.Module):
    """A gate, which has no parameter of its own, around a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 3)

    def initial_values(self):
        return {"linear.weight": self.linear.weight * 0 + 2, "linear.bias": torch.full((3,), 5.0)}


class Gated(nn.Module):
    """Nothing but a gate whose bias starts at 4, which the gate itself says otherwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.usual = Gate(width), nn.Linear(width, width)

    def initial_values(self):
        return {"gate.linear.bias": torch.full((3,), 4.0)}

    def forward(self, x, *others):
        """Give x, as a mixer, or attend, as a pattern."""
        call = others[-1]
        return call.attend(x, *others[:2]) if isinstance(call, AttentionCall) else x


class GatedPattern(Pattern):
    name, title = "gated", "gated attention"
    takes_any_weights = True

    def build(self, config):
        return Gated(WIDTH)


@dataclass(frozen=True)
class NoOptions:
    """None."""


class GatedMixer(MixerKind):
    name, Options = "gated", NoOptions
    module: type[nn.Module] = Gated

    def build(self, options, setting):
        return self.module(setting.d_model)


@pytest.fixture
def pattern(monkeypatch):
    monkeypatch.setitem(attention.PATTERNS._entries, "gated", GatedPattern())


@pytest.fixture
def mixer(monkeypatch):
    """Registers the mixer around another module, which it takes."""
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))

    def around(module: type[nn.Module]) -> None:
        mixers.MIXERS._entries.pop("gated", None)
        mixers.register(type("Around", (GatedMixer,), {"module": module})())

    around(Gated)
    return around


def transformer(**fields) -> nn.Module:
    kinds = architectures.get("gpt_neox").classes()
    return kinds.causal_lm(kinds.config(**SIZES, **fields))


def language_model() -> CatMixerForCausalLM:
    fields = {"vocab_size": 30, "hidden_size": WIDTH, "num_hidden_layers": 2, "mixer": "gated"}
    fields |= {"intermediate_size": 24, "initializer_range": 0.02}
    return CatMixerForCausalLM(CatMixerConfig(**fields))


def recall_model() -> RecallModel:
    return RecallModel(make_mixer("gated"), vocabulary=30, d_model=WIDTH, positions=9, layers=2)


MODELS = {
    "language model": lambda: [layer.mixer for layer in language_model().model.layers],
    "recall": lambda: [block.token_mixer for block in recall_model().blocks],
}
each_model = pytest.mark.parametrize("mixers_of", MODELS.values(), ids=MODELS)


def starts_as_asked(gated: Gated) -> bool:
    asked = [(gated.gate.linear.weight == 2).all(), (gated.gate.linear.bias == 4).all()]
    return all(asked) and gated.usual.weight.std() < 0.3 and not gated.usual.bias.any()


def test_pattern_decides_how_its_parts_start(pattern):
    layers = transformer(attention="gated").base_model.layers
    assert all(starts_as_asked(layer.attention.core) for layer in layers)


@each_model
def test_mixer_decides_how_its_parts_start(mixer, mixers_of):
    assert all(starts_as_asked(gated) for gated in mixers_of())


def test_what_a_folder_has_stays_and_what_it_lacks_starts_as_asked(mixer, tmp_path):
    model = language_model()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = "model.layers.1.mixer.gate.linear.bias"
    del weights[lacking]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for key, value in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert (value == (4 if key == lacking else 7)).all(), key


def test_a_pattern_s_buffers_start_as_built_in_a_model_without(pattern, monkeypatch, tmp_path):
    class Drawn(Gated):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("omega", torch.randn(3))

    monkeypatch.setattr(attention.PATTERNS.get("gated"), "build", lambda config: Drawn(WIDTH))
    transformer().save_pretrained(tmp_path)
    model = transformer(attention="gated")
    drawn = {name: b.clone() for name, b in model.named_buffers() if name.endswith(".omega")}
    assert drawn and any("omega" in name for name in load_initial_weights(model, str(tmp_path)))
    assert all(model.get_buffer(name).equal(buffer) for name, buffer in drawn.items())


class Rates(Gated):
    """A gated module with rates of its own."""

    no_decay = ("rates",)

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.rates = nn.Parameter(torch.empty(3))

    def initial_values(self):
        return {"rates": torch.ones(3)}


def other(**said) -> type[nn.Module]:
    return type("Other", (Rates,), said)


class Unsaved(Rates):
    """With a buffer that no loaded model would have."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Silent(Gated):
    """With rates of which nothing says whether they decay."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.rates = nn.Parameter(torch.ones(3))


SAID_WRONGLY = {
    "a lost buffer": (Unsaved, "Unsaved registers the buffer table with persistent=False, so that"),
    "nothing": (Silent, "Silent has parameters (rates) and does"),
    "misspelt": (
        other(no_decay=("rate",)),
        "Other.no_decay=('rate',): must be a tuple of names of its own parameters (rates)",
    ),
    "another name": (
        other(initial_values=lambda self: {"rate": torch.ones(3)}),
        "Other.initial_values names 'rate', which is none of rates, gate.linear.weight",
    ),
    "another shape": (
        other(initial_values=lambda self: {"rates": torch.ones(4)}),
        "Other.initial_values gives rates as [4]: must be a tensor of [3]",
    ),
}


@pytest.mark.parametrize("wrong", SAID_WRONGLY)
def test_what_a_pattern_says_wrongly_is_refused_by_name(pattern, monkeypatch, wrong):
    module, said = SAID_WRONGLY[wrong]
    entry = attention.PATTERNS.get("gated")
    monkeypatch.setattr(entry, "build", lambda config: module(WIDTH), raising=False)
    with pytest.raises(UserError, match=f"^attention 'gated': .*{re.escape(said)}"):
        transformer(attention="gated")


@pytest.mark.parametrize("wrong", SAID_WRONGLY)
@each_model
def test_what_a_mixer_says_wrongly_is_refused_by_name(mixer, mixers_of, wrong):
    module, said = SAID_WRONGLY[wrong]
    mixer(module)
    with pytest.raises(UserError, match=f"^mixer gated: .*{re.escape(said)}"):
        mixers_of()


class Kept(nn.Module):
    """Parts that stay as they are built, and one that does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kept, self.norm = nn.Sequential(nn.Linear(width, 3)), nn.RMSNorm(width)
        self.alone, self.usual = nn.Linear(width, 3), nn.Linear(width, 3)
        self.kept.keeps_initialisation = self.alone.keeps_initialisation = True
        for parameter in self.parameters():
            nn.init.constant_(parameter, 5.0)

    def forward(self, x, context):
        return x


@each_model
def test_a_part_of_a_mixer_keeps_what_it_built(mixer, mixers_of):
    mixer(Kept)
    for found in mixers_of():
        usual = dict(found.usual.named_parameters())
        assert all((p == 5).all() for n, p in found.named_parameters() if "usual" not in n)
        assert usual["weight"].abs().max() < 0.3 and not usual["bias"].any()
