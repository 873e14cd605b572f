"""The registry of mixers, their options, landmarks' losses, and language models around mixers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from cat_lm import architectures, mixers
from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.mixers import MixerKind, Setting, make, make_mixer
from cat_lm.model import CatMixerConfig, CatMixerForCausalLM
from cat_lm.model.cache import CatCache
from cat_lm.model.context import Context
from tests.conftest import REPOSITORY
from tests.readme import blocks

WIDTH, TIME = 16, 70  # more than a chunk of the delta rule


def built(specification: str) -> nn.Module:
    torch.manual_seed(0)
    return make_mixer(specification).build(Setting(WIDTH))


def rows(count: int = 2, time: int = TIME) -> Tensor:
    torch.manual_seed(time)
    return torch.randn(count, time, WIDTH)


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", ["guided", "dense", "hard"])
def test_what_landmarks_learn_from(training):
    """And that blocks are left out afterwards, whatever is read in training."""
    options = "block=4,top_k=1,local=1,dropout=0,streams=none,heads=2"
    mixer = built(f"landmark:{options},training={training}").train()
    dense = built("cat:streams=none,heads=2,dropout=0").eval()
    dense.load_state_dict(mixer.state_dict(), strict=False)
    x, losses = 3 * rows(), []
    context = Context(losses=losses)
    assert mixer.adds_losses == (training == "guided")
    y = mixer(x, context)
    assert len(losses) == (training == "guided")
    assert torch.allclose(y, dense(x, Context()), atol=1e-5) == (training in ("guided", "dense"))
    assert not torch.allclose(mixer.eval()(x, Context()), dense(x, Context()), atol=1e-3)
    if losses:
        losses[0].backward()
        assert losses[0] > 0 and mixer.streams.projection.weight.grad.any()
        assert mixer.out_proj.weight.grad is None
    mixer(x, context)
    assert len(losses) == (training == "guided")  # none outside of training


@dataclass(frozen=True)
class RunningMeanOptions:
    """Options of the mixer below."""

    gain: float = 1.0
    note: str | None = None


class RunningMeanModule(nn.Module):
    """The mean of all tokens so far."""

    def __init__(self, options, setting):
        super().__init__()
        self.gain, self.linear = options.gain, nn.Linear(setting.d_model, setting.d_model)

    def forward(self, x, context):
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.linear(self.gain * x.cumsum(dim=1) / count)


class RunningMean(MixerKind):
    """A mixer from outside, which can do nothing but mix."""

    name = "running-mean"
    Options = RunningMeanOptions

    def build(self, options, setting):
        if setting.d_model % 2:
            raise ValueError(f"d_model={setting.d_model}: must be even")
        return RunningMeanModule(options, setting)


@pytest.fixture
def outside(monkeypatch):
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))
    mixers.register(RunningMean())


def test_a_mixer_from_outside(outside):
    assert "running-mean" in mixers.names()
    mixer = make_mixer("running-mean:gain=2")
    assert mixer.label == "running-mean:gain=2.0" and mixer.layers == 2
    assert not mixer.kind.supports and not mixer.learned_positions
    x = rows()
    module = mixer.build(Setting(WIDTH))
    same(module(x, Context()), module.linear(2 * x.cumsum(1) / torch.arange(1, TIME + 1)[:, None]))
    with pytest.raises(UserError, match=r"^mixer running-mean: d_model=3: must be even$"):
        make_mixer("running-mean").build(Setting(3))


def test_guide_has_a_whole_mixer(monkeypatch):
    found = blocks("python", REPOSITORY / "docs/your_own_idea.md")
    (code,) = (block for block in found if "class RunningMean" in block)
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))
    exec(compile(code, "guide", "exec", dont_inherit=True), {"__name__": "guide"})
    mixer, x = make_mixer("running-mean:gain=3"), rows()
    module = mixer.build(Setting(WIDTH))
    same(module(x, Context()), module.linear(3 * x.cumsum(1) / torch.arange(1, TIME + 1)[:, None]))


def test_readme_lists_every_mixer():
    text = (REPOSITORY / "cat_lm/mixers/README.md").read_text()
    shown = {name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in row.split(", ")}
    assert {f"`{name}`" for name in mixers.names()} == shown


def test_what_cannot_be_registered(outside):
    def registered(**changes):
        mixers.register(type("Changed", (RunningMean,), changes)())

    with pytest.raises(ValueError, match=r"'running-mean': there is one of this name already"):
        registered()
    with pytest.raises(ValueError, match=r"'other': supports wings; known: documents, padding"):
        registered(name="other", supports=frozenset({"wings", "state"}))
    for options in (dict, dataclass(type("Thawed", (), {"__annotations__": {}}))):
        with pytest.raises(ValueError, match=r"'other': its Options must be a frozen dataclass"):
            registered(name="other", Options=options)
    with pytest.raises(ValueError, match=r"'other': its class Changed must define build"):
        registered(name="other", build=MixerKind.build)
    with pytest.raises(ValueError, match=r"<class .*RunningMean'>: must be an instance of a subcl"):
        mixers.register(RunningMean)
    assert "other" not in mixers.names()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("dog", {}, "mixer='dog': must be one of attention, based"),
        ("cat", {"stream": "k"}, "mixer cat: unknown option 'stream'; did you mean streams?"),
        ("cat", {"window": 2.5}, "mixer cat: window=2.5: must be a whole number"),
        ("cat", {"window": True}, "mixer cat: window=true: must be a whole number"),
        ("cat", {"window": None}, "mixer cat: window=none: must be a whole number"),
        ("cat", {"window": [3]}, "mixer cat: window=[3]: must be one value, not a list"),
        ("cat", {"bias": 1}, "mixer cat: bias='1': must be true or false"),
        ("cat", {"window": 0}, "mixer cat: window=0: must be at least 1"),
        ("linear-attention", {"heads": 0}, "heads=0: must be at least 1"),
        ("gla", {"expand_k": float("inf")}, "expand_k=inf: must be from -1e+30"),
    ],
)
def test_wrong_options_are_one_clear_line(name, options, said):
    with pytest.raises(UserError) as error:
        make(name, options)
    assert said in str(error.value) and "\n" not in str(error.value)


VOCABULARY, WIDTH = 50, 16
ENTRY = architectures.get("mixer")
DROPPING = ("attention", "cat", "chunk", "landmark")


def config_of(name: str, **changes) -> CatMixerConfig:
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "mixer": name,
        "mixer_options": {"dropout": 0.0} if name in DROPPING else {},
        "learned_positions": 64 if name == "attention" else None,
        "initializer_range": 0.2,  # so that what a layer does is seen in the logits
        "pad_token_id": 0,
    }
    return CatMixerConfig(**fields | changes)


def model_of(name: str, **changes) -> CatMixerForCausalLM:
    torch.manual_seed(0)
    return CatMixerForCausalLM(config_of(name, **changes)).eval()


def tokens(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randint(1, VOCABULARY, shape)


@pytest.mark.parametrize("name", mixers.names())
def test_configurations_store_all_options(name, tmp_path):
    """A later version's defaults are not this model's."""
    config = config_of(name)
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["mixer_options"]
    assert stored == config.mixer_options
    assert len(stored) == len(vars(mixers.get(name).Options()))


def test_layers_own_losses_are_the_models():
    """In training alone, and the same where layers are computed again for the backward pass."""
    ids, found = tokens(2, 40), []
    for checkpointed in (False, True):
        model = model_of("landmark", mixer_options={"block": 4, "dropout": 0.0})
        assert model.collects_losses and model(ids, labels=ids).auxiliary_loss is None
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = model.train()(ids, labels=ids)
        (outputs.loss + outputs.auxiliary_loss).backward()
        found.append([outputs.auxiliary_loss, *(p.grad for p in model.parameters())])
    assert found[0][0] > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    plain = model_of("cat").train()
    assert not plain.collects_losses and plain(ids, labels=ids).auxiliary_loss is None


def test_a_mixer_from_outside_is_a_language_model(outside):
    """It knows neither documents nor padding nor a state: what needs them is refused."""
    model, rows = model_of("running-mean", mixer_options={"gain": 0.5}), tokens(2, 9)
    generated = model.generate(rows, max_new_tokens=3, do_sample=False)
    # Without a state each token is computed from the whole text before it.
    assert torch.equal(model(generated[:, :-1]).logits[:, 8:].argmax(-1), generated[:, 9:])
    right = (torch.arange(9) < torch.tensor([[9], [5]])).long()
    same(model(rows, attention_mask=right).logits[1:, :5], model(rows[1:, :5]).logits)
    with pytest.raises(ValueError, match="the mixer running-mean knows no padding"):
        model(rows, attention_mask=right.flip(1))
    with pytest.raises(ValueError, match="running-mean cannot keep documents apart"):
        model(rows, document_ids=torch.zeros_like(rows))
    with pytest.raises(ValueError, match="running-mean keeps no state"):
        model(rows, past_key_values=CatCache(model.config))


def test_what_a_call_cannot_have():
    model, rows = model_of("gla"), tokens(1, 9)
    fixed = StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ValueError, match="a cache of StaticLayer cannot hold states; use CatCache"):
        model(rows, past_key_values=fixed)
    filled = DynamicCache()
    filled.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), layer_idx=0)
    with pytest.raises(ValueError, match="holds keys and values without the states before them"):
        model(rows, past_key_values=filled)
    with pytest.raises(ValueError, match="document_ids cannot be used with a cache"):
        model(rows, document_ids=rows, past_key_values=CatCache(model.config))
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(rows, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(UserError, match=r"a sequence of 65 tokens: .* learned_positions=64 rows"):
        model_of("attention")(tokens(1, 65))


CONFIG = """
model: {architecture: mixer, mixer: gla, hidden_size: 32, num_hidden_layers: 2}
data: {path: data, context_length: 64}
optimizer: {lr: 0.001}
train: {max_steps: 4, global_batch_size: 4, micro_batch_size: 4, output_dir: out}
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.mixer=dog", "model.mixer='dog': must be one of attention, based"),
        ("model.mixer_options={head: 2}", "unknown option 'head'; did you mean heads?"),
        ("model.mixer_options={heads: 3}", "model.mixer_options: mixer gla:heads=3: heads=3 do"),
        ("model.mixer_options={heads: -1}", "model.mixer_options: mixer gla: heads=-1: must be"),
        ("model.mixer=attention", "model.learned_positions: mixer attention needs a table"),
        ("model.learned_positions=64", "learned_positions=64: has no effect with mixer gla"),
        ("model.num_attention_heads=4", "num_attention_heads"),
        (
            "data.mask_documents=true model.mixer=running-mean",
            "cannot keep documents apart (running-mean)",
        ),
    ],
)
def test_wrong_keys_are_one_clear_line(override, said, tmp_path, outside):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    with pytest.raises(UserError) as error:
        load_config(path, override.split(" ") if "{" not in override else [override])
    assert said in str(error.value)


def test_only_the_meaning_of_weights_counts_as_a_difference():
    ours = ENTRY.section_values(config_of("cat"))
    for options, same_weights in (({"dropout": 0.3}, True), ({"window": 5}, False)):
        theirs = ENTRY.section_values(config_of("cat", mixer_options=options))
        assert (ENTRY.differences(theirs, ours) == []) is same_weights
