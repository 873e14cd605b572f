"""The examples of tests/own_ideas compute what they say; files of plugins move into the project."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import runpy
import sys
import tomllib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from cat_lm import architectures, callbacks, mixers, ops, optimizers
from cat_lm.config import load_config
from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.counts import count_parameters, meta_model, state_bytes
from cat_lm.model import CatConfig, CatForCausalLM, attention
from cat_lm.ops.convolution import kinds
from cat_lm.testing import check_entry
from eval.recall.cell import Cell
from tests.conftest import REPOSITORY
from tests.readme import blocks

GUIDE = REPOSITORY / "docs/your_own_idea.md"


@pytest.fixture
def registries(monkeypatch):
    """Takes away again what a test registers."""
    monkeypatch.setattr(callbacks.CALLBACKS, "_entries", dict(callbacks.CALLBACKS._entries))
    monkeypatch.setattr(kinds.KINDS, "_entries", dict(kinds.KINDS._entries))
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))
    monkeypatch.setattr(optimizers.OPTIMIZERS, "_entries", dict(optimizers.OPTIMIZERS._entries))
    families = architectures.ARCHITECTURES
    monkeypatch.setattr(families, "_entries", dict(families._entries))
    for registry in attention.REGISTRIES.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def ideas(registries):
    """Registers all of them for a test; what their files define, by file."""
    folder = REPOSITORY / "tests/own_ideas"
    names = ("convolution", "scores", "pattern", "mixer", "family", "callback", "optimizer")
    return SimpleNamespace(
        **{name: SimpleNamespace(**runpy.run_path(str(folder / f"{name}.py"))) for name in names}
    )


def neighbours(x: Tensor, taps: Tensor, distance: int = 1) -> Tensor:
    """The sum of the example, number by number: x [B, T, H, D], taps [H, W]."""
    y = torch.zeros_like(x)
    _, time, heads, _ = x.shape
    for t in range(time):
        for h in range(heads):
            y[:, t, h] = taps[h, 0] * x[:, t, h]
            for lag in range(1, min(taps.shape[1], t + 1)):
                y[:, t, h] += taps[h, lag] * x[:, t - lag, h - distance]
    return y


def test_the_convolution_is_itself_and_no_other(ideas):
    """Its filters have the shape of `head`'s: whoever took it for that would raise nothing."""
    torch.manual_seed(0)
    x, taps = torch.randn(2, 9, 4, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    y = ops.convolve("neighbour", x, taps)
    torch.testing.assert_close(y, neighbours(x, taps))
    assert not torch.allclose(y, ops.convolve("head", x, taps), atol=1e-2)
    ids = torch.arange(9).expand(2, -1) // 4
    parts = [neighbours(part, taps) for part in x.split(4, dim=1)]
    found = ops.convolve("neighbour", x, taps, document_ids=ids)
    torch.testing.assert_close(found, torch.cat(parts, dim=1))


def test_options_of_the_convolution_change_its_sum(ideas, tmp_path):
    """As the equation says, in a model and in what is saved of it."""
    torch.manual_seed(0)
    x, taps = torch.randn(2, 9, 4, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    kind = kinds.with_options(kinds.get("neighbour"), {"distance": 2})
    found = ops.convolve(kind, x, taps)
    torch.testing.assert_close(found, neighbours(x, taps, distance=2))
    assert not torch.allclose(found, ops.convolve("neighbour", x, taps), atol=1e-2)

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"vocab_size": 50, "conv_type": "neighbour", "conv_init": "uniform"}
    model = CatForCausalLM(CatConfig(**sizes, conv_options={"distance": 2})).eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["conv_options"] == {"distance": 2}
    ids = torch.randint(50, (2, 9))
    with torch.no_grad():
        logits, loaded = model(ids).logits, CatForCausalLM.from_pretrained(tmp_path)
        assert loaded(ids).logits.equal(logits)
        other = CatForCausalLM.from_pretrained(tmp_path, conv_options=None)
        assert not torch.allclose(other(ids).logits, logits, atol=1e-4)
    family, ours = architectures.get("gpt_neox"), architectures.section_of(model.config)
    theirs = {"conv_options": {"distance": 1}}, {"conv_options": None}
    theirs = [ours.model_dump() | changed for changed in theirs]
    assert family.differences(*theirs) == []
    (said,) = family.differences(theirs[0], ours.model_dump())
    assert "conv_options" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"conv_options": {"distence": 2}}, "unknown option 'distence'; did you mean distance"),
        ({"conv_options": {"distance": "far"}}, "distance=far: must be a whole number"),
        ({"conv_type": "head", "conv_options": {"distance": 2}}, "unknown option 'distance'"),
        ({"conv_type": "none", "conv_options": {"distance": 2}}, "nothing with conv_type=none"),
    ],
)
def test_options_that_a_convolution_does_not_have_are_refused(ideas, tmp_path, changes, said):
    fields = {"hidden_size": 32, "num_attention_heads": 4, "conv_type": "neighbour"} | changes
    with pytest.raises(ValueError, match=f"^conv_options: .*{said}"):
        CatConfig(**fields).validate()
    overrides = [f"model.{key}={value}" for key, value in changes.items()]
    overrides += ["data.path=x", "train.output_dir=x"]
    if "conv_type" not in changes:
        overrides.append("model.conv_type=neighbour")
    with pytest.raises(UserError, match=f"model.conv_options: .*{said}"):
        load_config(REPOSITORY / "configs/quickstart.yaml", overrides)


def forgetting(module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition of the example, number by number: [T, H, D] of one row."""
    time, heads, width = query.shape
    groups, output = heads // key.shape[1], torch.zeros(time, heads, width)
    keep = (value.flatten(1) @ module.gate.weight.T + module.gate.bias).sigmoid().log()  # [T, H]
    for h in range(heads):
        for i in range(time):
            scores = [
                query[i, h] @ key[j, h // groups] / width**0.5 + keep[j + 1 : i + 1, h].sum()
                for j in range(i + 1)
            ]
            output[i, h] = torch.stack(scores).softmax(0) @ value[: i + 1, h // groups]
    return output


@torch.no_grad()
def test_the_pattern_is_the_definition(ideas):
    """Of whole rows, of one new token whose mask says nothing, and of a mask."""
    torch.manual_seed(0)
    module = ideas.pattern.ForgettingCore(2 * 8, 4, 1.0)
    nn.init.normal_(module.gate.weight)
    query, key, value = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    wanted = forgetting(module, query, key, value)
    given = [x.transpose(0, 1)[None] for x in (query, key, value)]

    def computed(query: Tensor, mask: Tensor | None) -> Tensor:
        call = SimpleNamespace(mask=mask, dropout=0.0, scaling=8**-0.5)
        return module(query, *given[1:], None, call)[0][0]

    torch.testing.assert_close(computed(given[0], None), wanted)
    torch.testing.assert_close(computed(given[0][:, :, -1:], None), wanted[-1:])
    visible = torch.ones(1, 1, 9, 9).bool().tril()
    visible[..., 3] = False  # padding
    query, key, value = (x[torch.arange(9) != 3] for x in (query, key, value))
    found = computed(given[0], visible)[torch.arange(9) != 3]
    torch.testing.assert_close(found, forgetting(module, query, key, value))


def test_the_examples_pass_their_authors_check(ideas):
    check_entry(ideas.mixer.Leaky(), {"memory": 8.0})
    check_entry(attention.REGISTRIES[attention.ScoreTransform].get("log_distance"))
    check_entry(attention.REGISTRIES[attention.Pattern].get("forgetting"))
    check_entry(kinds.get("neighbour"), {"distance": 2})
    check_entry(architectures.get("ngram"), {"expansion": 2})
    check_entry(callbacks.get("slow_steps"), {"factor": 3})
    check_entry(optimizers.get("lion"), {"a": 0.8})


def test_optimizer_steps_by_its_equation(ideas):
    torch.manual_seed(0)
    kind, rate, decay, a, b = optimizers.get("lion"), 0.1, 0.5, 0.75, 0.5
    weight, expected, momentum = nn.Parameter(torch.randn(7)), torch.zeros(7), torch.zeros(7)
    expected += weight.detach()
    groups = [{"params": [weight], "weight_decay": decay}]
    stepper = kind.build(groups, SimpleNamespace(lr=rate), kind.Options(a, b))
    stepper.found_inf = torch.tensor(0.0)
    for gradient in torch.randn(4, 7):
        weight.grad = gradient
        stepper.step()
        update = (a * momentum + (1 - a) * gradient).sign()
        expected -= rate * (update + decay * expected)
        momentum = b * momentum + (1 - b) * gradient
        torch.testing.assert_close(weight.detach(), expected)


@torch.no_grad()
def test_the_family_reads_as_many_tokens_as_it_says(ideas):
    """It also generates from the whole text: a cache that stays empty would give the last token."""
    torch.manual_seed(0)
    config = ideas.family.NgramConfig(vocab_size=50, hidden_size=8, num_hidden_layers=2)
    model = ideas.family.NgramForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.5 * torch.randn_like(parameter))
    rows = torch.randint(50, (2, 9))
    logits = model(rows).logits
    for t in range(9):
        alone = model(rows[:, max(0, t - 2) : t + 1]).logits[:, -1]
        torch.testing.assert_close(alone, logits[:, t])
    ids = torch.arange(9).expand(2, -1) // 4
    alone = torch.cat([model(part).logits for part in rows.split(4, dim=1)], dim=1)
    torch.testing.assert_close(model(rows, document_ids=ids).logits, alone)
    found = model.generate(rows, max_new_tokens=5, do_sample=False, use_cache=True, pad_token_id=0)
    for length in range(9, 14):
        assert torch.equal(model(found[:, :length]).logits[:, -1].argmax(-1), found[:, length])
    with pytest.raises(ValueError, match="past_key_values: the model keeps no state"):
        model(rows, past_key_values=ideas.family.PreTrainedConfig)


@pytest.mark.parametrize(
    ("registry", "example", "name"),
    [
        (mixers.MIXERS, "mixer", "leaky"),
        (attention.REGISTRIES[attention.ScoreTransform], "scores", "log_distance"),
        (attention.PATTERNS, "pattern", "forgetting"),
        (architectures.ARCHITECTURES, "family", "ngram"),
        (callbacks.CALLBACKS, "callback", "slow_steps"),
        (optimizers.OPTIMIZERS, "optimizer", "lion"),
    ],
    ids=["mixer", "scores", "pattern", "family", "callback", "optimizer"],
)
def test_file_of_a_plugin_moves_into_the_project(
    registries, monkeypatch, tmp_path, registry, example, name
):
    """The file moves unchanged; no list names it."""
    code = (REPOSITORY / f"tests/own_ideas/{example}.py").read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (module, *_) = registry._modules.values()
    package = importlib.import_module(module.rpartition(".")[0])
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
    modules = registry._modules | {name: f"{package.__name__}.{name}"}
    monkeypatch.setattr(registry, "_modules", modules)
    assert registry.get(name).name == name


def test_examples_of_the_guide_pass_its_check(registries, monkeypatch, tmp_path):
    *examples, check, script = blocks("python", GUIDE)
    assert len(examples) == 3 and "check_entry" in check and "my_idea" in script
    (tmp_path / "my_idea.py").write_text("\n".join(examples), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_idea", raising=False)
    exec(compile(check, "guide", "exec", dont_inherit=True), {"__name__": "guide"})


def test_guide_installs_and_links_the_examples():
    text = GUIDE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    project = tomllib.loads(block)["project"]
    assert project["entry-points"] == {plugins.GROUP: {"my_idea": "my_idea"}}
    linked = set(re.findall(r"\(\.\./tests/own_ideas/(\w+\.py)\)", text))
    there = {path.name for path in (REPOSITORY / "tests/own_ideas").glob("*.py")}
    assert linked == there - {"__init__.py"}
    for name, lines in re.findall(r"\.\./([\w/]+\.py)\) \((\d+)", text):
        found = (REPOSITORY / name).read_text(encoding="utf-8").splitlines()
        assert len(found) == int(lines), name


def test_the_family_says_what_its_model_has(ideas):
    family = architectures.get("ngram")
    section = family.Section(hidden_size=8, num_hidden_layers=3, expansion=2, vocab_size=50)
    model = family.classes().causal_lm(family.config_class()(**family.fields(section, 50, 16)))
    assert count_parameters(model) == 3 * (8 + 3 * 8 * 16) + 8 + 800
    assert architectures.section_of(model.config).model_dump() == section.model_dump()
    assert family.summary(section).words == "expansion=2"
    assert family.summary(section).description == "n-gram language model (expansion=2)"
    # Of layers, channels and tokens, in fp32: the whole text is read anew for each token.
    assert state_bytes(meta_model(model.config), 7) == 3 * 8 * 7 * 4


def test_the_cells_of_a_plugin_s_mixer_are_named_by_its_sources_too(tmp_path, monkeypatch):
    """Its code may change where no version does; cells of the project's mixers keep their names."""
    monkeypatch.setattr(mixers.MIXERS, "_entries", dict(mixers.MIXERS._entries))
    code = (REPOSITORY / "tests/own_ideas/mixer.py").read_text(encoding="utf-8")
    (tmp_path / "leaky_idea.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("leaky_idea")
    cell, own = (Cell("mqar", name, 16, 16) for name in ("leaky", "cat"))
    assert "code" not in own.key() and own.key() == dataclasses.asdict(own)
    before = cell.key()
    (tmp_path / "leaky_modules.py").write_text("# what its build imports\n", encoding="utf-8")
    (tmp_path / ".#leaky_idea.py").symlink_to("an.editor@host.123")
    assert cell.key() == before, "as it was when it was imported, whatever is edited meanwhile"
    monkeypatch.setattr(plugins, "_codes", {})  # another process
    assert cell.key()["code"] != before["code"] and len(before["code"]) == 12
    sys.modules.pop("leaky_idea")
    monkeypatch.setattr(plugins, "_codes", {})
    assert len(cell.key()["code"]) == 12, "of a class that stands in no module"


def test_a_convolution_of_a_plugin_is_in_the_key_of_a_mixer_that_has_it(ideas):
    from eval.lab.cell import code_of_mixer
    from eval.long_range.cell import Cell as LongRangeCell

    assert not code_of_mixer("cat:conv_type=depthwise") and not code_of_mixer("las")
    assert code_of_mixer("cat:conv_type=neighbour").keys() == {"code"}
    sizes = {"d_model": 16, "layers": 1, "lr": 1e-3, "batch_size": 2, "epochs": 1}
    key = LongRangeCell("smnist", "cat:conv_type=neighbour", **sizes).key()
    assert "code" in key and "code" not in LongRangeCell("smnist", "las", **sizes).key()
