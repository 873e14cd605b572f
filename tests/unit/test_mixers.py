"""The registry of mixers, their options, and what landmarks learn from."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor, nn

from cat_lm import mixers
from cat_lm.core.errors import UserError
from cat_lm.mixers import MixerKind, Setting, make, make_mixer
from cat_lm.model.context import Context
from tests.conftest import REPOSITORY

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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("training=slow", "training='slow': choose one of hard, dense, guided"),
        ("landmark_filter=learned,training=hard", "training=hard: gives the landmarks' parameters"),
        ("landmark_filter=mean", "landmark_filter=.mean.: must be one of box"),
        ("heads=2,conv_type=multihead,conv_mixing=maps", "conv_mixing=maps: cannot be combined"),
    ],
)
def test_landmarks_with_options_that_contradict_each_other(options, named):
    with pytest.raises(UserError, match=f"^mixer landmark: {named}"):
        make_mixer(f"landmark:{options}")


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


def test_the_readmes_mixer_is_whole(monkeypatch):
    """It trains, in recall and as a language model's."""
    text = (REPOSITORY / "cat_lm/mixers/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))
    exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    mixer, x = make_mixer("running-mean:gain=3"), rows()
    module = mixer.build(Setting(WIDTH))
    same(module(x, Context()), module.linear(3 * x.cumsum(1) / torch.arange(1, TIME + 1)[:, None]))
    shown = {name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in row.split(", ")}
    assert {f"`{name}`" for name in mixers.names() if name != "running-mean"} == shown


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


def test_recall_trains_a_mixer_from_outside(outside):
    from eval.recall.cell import Cell

    cell = Cell("mqar:vocab_size=32", "running-mean", 16, 16, epochs=1, train_examples=32)
    record = cell.run(quiet=True)
    assert record["mixer"]["label"] == "running-mean" and record["steps"] == 1


def test_values_and_text_are_the_same_options():
    text = make_mixer("cat:streams=k,window=5,bias=false,dropout=0")
    values = make("cat", {"streams": "k", "window": 5, "bias": False, "dropout": 0})
    assert text.options == values.options
    assert make("cat", {"streams": None}).options == make_mixer("cat:streams=none").options


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"filter_state": 4}, "filter_state=4: says nothing with filter=taps; choose filter=expo"),
        ({"filter": "ssm"}, "filter=ssm: needs filter_state"),
        ({"filter": "ssm", "filter_state": 0}, "filter_state=0: must be at least 1"),
        ({"filter": "ssm", "filter_state": 3}, "filter_state=3: must be even"),
        ({"filter": "ssm", "filter_state": 4, "window": 5}, "window=5: is for taps"),
        ({"filter": "ssm", "filter_state": 4, "conv_type": "depthwise"}, "needs conv_type=head"),
        ({"filter": "fir"}, "filter='fir': choose one of taps, exponential, ssm"),
    ],
)
def test_filters_as_long_as_the_row_say_what_they_need(options, said):
    with pytest.raises(UserError, match=said):
        make("cat", options)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    ("name", "option"),
    [(n, f.name) for n in mixers.names() for f in fields(mixers.get(n).Options) if f.type == "int"],
)
def test_a_count_that_counts_nothing_is_named(name, option, value):
    with pytest.raises(UserError, match=rf"^mixer {name}: {option}={value}: must be "):
        make(name, {option: value})


def test_naming_mixers_imports_no_torch():
    code = """
import sys
from cat_lm import mixers
assert mixers.names() and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
