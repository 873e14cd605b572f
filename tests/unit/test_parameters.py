"""What modules say of their parameters, in attention, mixers and recall: how they start, decay."""

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
from cat_lm.core.parameters import takes_decay
from cat_lm.mixers import MixerKind, Setting, make_mixer
from cat_lm.model import CatMixerConfig, CatMixerForCausalLM, attention
from cat_lm.model.attention import Pattern
from cat_lm.model.attention.modules.call import AttentionCall
from cat_lm.training.building import load_initial_weights
from eval.recall.model import RecallModel
from tests.unit.tiny_models import SIZES

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


def transformer(family: str = "gpt_neox", **fields) -> nn.Module:
    kinds = architectures.get(family).classes()
    return kinds.causal_lm(kinds.config(**SIZES, **fields))


def language_model() -> CatMixerForCausalLM:
    config = CatMixerConfig(
        **{"vocab_size": 30, "hidden_size": WIDTH, "num_hidden_layers": 2, "mixer": "gated"},
        **{"intermediate_size": 24, "initializer_range": 0.02},
    )
    return CatMixerForCausalLM(config)


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


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_a_pattern_decides_how_its_parts_start(pattern, family):
    model = transformer(family, attention="gated")
    for layer in model.base_model.layers:
        assert starts_as_asked((layer.attention if family == "gpt_neox" else layer.self_attn).core)


@each_model
def test_a_mixer_decides_how_its_parts_start(mixer, mixers_of):
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


def test_a_pattern_starts_anew_on_the_weights_of_a_model_without_it(pattern, tmp_path):
    """With all that it has, what starts as linear layers do among it."""
    transformer().save_pretrained(tmp_path)
    model = transformer(attention="gated")
    found = load_initial_weights(model, str(tmp_path))
    assert found == ["linear.bias", "linear.weight", "usual.bias", "usual.weight"]


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


SAID_WRONGLY = {
    "a lost buffer": (Unsaved, "Unsaved registers the buffer table with persistent=False, so that"),
    "no decay said": (other(no_decay=None), "Other.no_decay=None: must be a tuple of names"),
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
    "a number": (
        other(initial_values=lambda self: {"rates": 1.0}),
        "Other.initial_values gives rates as 1.0: must be a tensor of [3]",
    ),
}
# What a mixer may say, whose parameters stay as they are built.
OF_PATTERNS = {
    "no start": (other(initial_values=dict), "nothing says how rates of Other must start; give it"),
}


@pytest.mark.parametrize("wrong", [*SAID_WRONGLY, *OF_PATTERNS])
def test_what_a_pattern_says_wrongly_is_refused_by_name(pattern, monkeypatch, wrong):
    module, said = (SAID_WRONGLY | OF_PATTERNS)[wrong]
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


@each_model
def test_a_mixer_that_says_nothing_of_decay_is_refused(mixer, mixers_of):
    class Silent(Gated):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.rates = nn.Parameter(torch.ones(3))

    mixer(Silent)
    with pytest.raises(UserError, match=r"^mixer gated: Silent has parameters \(rates\) and does"):
        mixers_of()


def test_a_look_at_what_is_said_draws_nothing(mixer):
    """A module that draws its starts gives a model the numbers that it gave."""
    drawn = other(initial_values=lambda self: {"rates": torch.rand(3)})
    mixer(drawn)
    torch.manual_seed(0)
    make_mixer("gated").build(Setting(WIDTH))
    after = torch.rand(1)
    torch.manual_seed(0)
    drawn(WIDTH)
    assert torch.rand(1) == after


def test_what_a_layer_says_of_decay_goes_before_what_is_usual():
    class Quiet(nn.Linear):
        no_decay = ("weight", "bias")

    assert takes_decay(nn.Linear(2, 2)) == {"weight": True, "bias": False}
    assert takes_decay(Quiet(2, 2)) == {"weight": False, "bias": False}
    assert takes_decay(Quiet(2, 2, bias=False)) == {"weight": False}
    assert takes_decay(nn.LayerNorm(2)) == {"weight": False, "bias": False}


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


class KeptWhole(Kept):
    keeps_initialisation = True

    def initial_values(self):
        return {"usual.weight": self.usual.weight * 0 + 9}


@each_model
def test_a_part_of_a_mixer_keeps_what_it_built(mixer, mixers_of):
    mixer(Kept)
    for found in mixers_of():
        usual = dict(found.usual.named_parameters())
        assert all((p == 5).all() for n, p in found.named_parameters() if "usual" not in n)
        assert usual["weight"].abs().max() < 0.3 and not usual["bias"].any()
    mixer(KeptWhole)
    for found in mixers_of():
        for name, parameter in found.named_parameters():
            assert (parameter == (9 if name == "usual.weight" else 5)).all(), name


def test_parts_of_a_mixer_that_a_folder_lacks_are_built_again(mixer, tmp_path):
    mixer(Kept)
    model = language_model()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: x for name, x in weights.items() if "layers.1.mixer." not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    found = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[1].mixer
    assert all((p == 5).all() for n, p in found.named_parameters() if not n.startswith("usual"))
    assert found.usual.weight.abs().max() < 0.3
