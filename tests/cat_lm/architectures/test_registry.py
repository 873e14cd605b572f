"""The registry of families: one place knows each, and a family from outside is known everywhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from cat_lm import architectures
from cat_lm.config import known_keys, load_config
from cat_lm.core.errors import UserError
from cat_lm.pretrained.loading import load_model
from cat_lm.training.estimate import meta_model
from tests.tiny_models import cat_model, random_ids, stock_model

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs/quickstart.yaml"
BUILT_IN = architectures.ARCHITECTURES.own_names()
ROPE_NEVER = {"position_embedding": "none"}


def loaded(**model):
    return load_config(QUICKSTART, [f"model.{key}={value}" for key, value in model.items()])


def error_of(*overrides) -> str:
    with pytest.raises(UserError) as raised:
        load_config(QUICKSTART, overrides)
    return str(raised.value)


FAMILY = re.compile(
    r"gpt_?neox|cat_?(neox|llama|mamba)|^llama$|Cat(Config|ForC|Model)"
    r"|(Llama|Mamba2?)(Config|ForC|Model)",
    re.I,
)
# Of a projection or an embedding of one family.
FAMILY_PARTS = re.compile(r"query_key_value|embed_in\b|embed_out|embed_tokens")
ELSEWHERE = {
    "cat_lm/__init__.py": "the names that people import",
    "cat_lm/pretrained/standalone/__init__.py": "the classes that the file has stand-ins for",
    "cat_lm/training/callback_check.py": "the model of a pretended run",
    "cat_lm/testing.py": "the body in which an attention entry is tried by default",
    "eval/speed/kernels.py": "transformers' own rotation, to compare with",
}


def family_names(source: str) -> list[str]:
    """Names and strings of a family in a module, its docstrings aside."""
    tree = ast.parse(source)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in documentation:
            continue
        words = [getattr(node, name, None) for name in ("id", "attr", "name", "value", "module")]
        words = [word for word in words if isinstance(word, str)]
        found += [word for word in words if FAMILY.search(word) or FAMILY_PARTS.search(word)]
    return found


def test_no_module_elsewhere_names_a_family():
    found = {}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]:
        name = path.relative_to(ROOT).as_posix()
        # Runs hold exports with code of their own.
        own = name.startswith(("tests/", "cat_lm/architectures/", "cat_lm/model/", "runs/"))
        if not own and family_names(path.read_text(encoding="utf-8")):
            found[name] = family_names(path.read_text(encoding="utf-8"))
    assert found.keys() == ELSEWHERE.keys(), found


SHAPES = [
    {"conv_type": "none"},
    {"conv_type": "none", **ROPE_NEVER, "tie_word_embeddings": True},
    {"conv_type": "head", "conv_window": 5, "intermediate_size": 24},
    {"conv_type": "multihead", "conv_streams": "kv", "use_parallel_residual": False},
    {"conv_type": "multihead", "conv_mixing": "maps"},
    {"conv_type": "depthwise", "conv_streams": "q", "conv_activation": "silu"},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_section_goes_through_the_model_configuration_and_back(shape):
    config = loaded(vocab_size=99, layer_norm_eps=1e-4, rotary_pct=0.5, rope_theta=500, **shape)
    back = architectures.section_of(meta_model(config, 0).config)
    expected = config.model.model_copy(update={"intermediate_size": config.model.inner_size})
    assert back.model_dump() == expected.model_dump()
    assert config.architecture.summary(back) == config.architecture.summary(expected)


def test_unknown_architecture_is_one_line():
    for odd in ("nowhere", "GPT_NeoX", "null", "[1]"):
        message = error_of(f"model.architecture={odd}", "model.key_of_it=1")
        assert "model.architecture=" in message and "must be one of gpt_neox" in message
        assert "\n" not in message
    assert architectures.find({"model_type": "gpt2"}) is None and architectures.find({}) is None
    with pytest.raises(UserError, match="model_type is 'gpt2'; known: cat_neox, gpt_neox"):
        architectures.of_config({"model_type": "gpt2"})


class ToySection(architectures.ModelSection):
    architecture: str = "toy"
    toys: int = 3
    toy_box: str = "red"


class Toy(architectures.Architecture):
    name = "toy"
    title = "Toy"
    model_type = "cat_toy"
    Section = ToySection
    layer_weight = "toy.{layer}"

    def classes(self):
        raise AssertionError("nobody asks for a toy's classes")

    def problems(self, section, context_length):
        return [] if section.toys < context_length else [f"toys={section.toys}: too many"]


@pytest.fixture
def toy(monkeypatch):
    families = architectures.ARCHITECTURES
    monkeypatch.setattr(families, "_entries", dict(families._entries))
    architectures.register(Toy())
    return architectures.get("toy")


@pytest.fixture
def run(tmp_path):
    values = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    values["model"] = {"architecture": "toy", "hidden_size": 8, "num_hidden_layers": 2, "toys": 5}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def test_section_is_the_architectures_own(toy, run, tmp_path):
    config = load_config(run, ["model.toys=7", "model.toy_box=a #1: b"])
    assert type(config.model) is ToySection and config.architecture is toy
    assert (config.model.toys, config.model.toy_box) == (7, "a #1: b")
    config.save(tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    with pytest.raises(UserError, match=r"model\.toys=200: too many"):
        load_config(run, ["model.toys=200", "data.context_length=100"])
    assert known_keys({"model": {"architecture": "toy"}})["model"][-2:] == ["toys", "toy_box"]


def test_keys_of_another_architecture_are_unknown(toy, run):
    with pytest.raises(UserError) as raised:
        load_config(run, ["model.rotary_pct=1"])
    known = "model.rotary_pct: unknown key (it is one of model.architecture=gpt_neox)"
    assert known in str(raised.value)
    message = error_of("model.architecture=llama", "model.layer_norm_eps=1e-4")
    assert message.endswith("=gpt_neox); the nearest known one is model.rms_norm_eps")
    # The architecture counts wherever it stands among the overrides.
    message = error_of("model.toys=3", "model.architecture=toy")
    assert "model.toys: " not in message and "model.conv_type: unknown key" in message


def test_wrong_family_is_not_registered(toy):
    def kind(**attributes):
        return type("Other", (Toy,), {"name": "other", "model_type": "cat_other", **attributes})()

    for family, said in (
        (Toy(), "'toy': there is one of this name already"),
        (kind(model_type="cat_toy"), "'other': model type 'cat_toy' is taken"),
        (kind(), "'other': its Section's key architecture has .*'toy'"),
        (kind(title=""), "'other': its class Other must give title, a text"),
        (kind(classes=architectures.Architecture.classes), "class Other must define classes"),
        (kind(Section=dict), "Section must be a ModelSection"),
        (Toy, "must be an instance of a subclass"),
    ):
        with pytest.raises(ValueError, match=said):
            architectures.register(family)
    assert architectures.names() == (*BUILT_IN, "toy")


def renamed_in(folder: Path, pattern: str, replacement: str, **more: torch.Tensor) -> None:
    """Give tensors of a model's file other names, and add some."""
    file = folder / "model.safetensors"
    tensors = {re.sub(pattern, replacement, k): v.clone() for k, v in load_file(file).items()}
    save_file(tensors | more, file, {"format": "pt"})


@pytest.mark.parametrize("library", [True, False])
def test_constants_that_old_files_of_llama_hold_are_left_out(library, tmp_path):
    fields = {"family": "llama", "attention_bias": True}
    model = stock_model(**fields) if library else cat_model(**fields)
    model.save_pretrained(tmp_path)
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    renamed_in(tmp_path, "^$", "", **constant)
    ids = random_ids(1, 9)
    assert torch.equal(load_model(tmp_path)(ids).logits, model.eval()(ids).logits)
    renamed_in(tmp_path, "^$", "", **{"model.layers.0.self_attn.rotary_emb.odd": torch.ones(4)})
    with pytest.raises(UserError, match=r"unexpected keys .*rotary_emb\.odd"):
        load_model(tmp_path)


PLUGIN = """
from typing import Literal

from cat_lm import architectures
from cat_lm.architectures.families.gpt_neox import GPTNeoX, GPTNeoXSection
from cat_lm.ops.convolution import kinds

architectures.names()  # a registry that is asked while the plugin is imported


class Section(GPTNeoXSection):
    architecture: Literal["toy_neox"] = "toy_neox"
    hidden_act: str = "relu"


class Toy(GPTNeoX):
    name, title, model_type, library_type = "toy_neox", "Toy", "toy_neox", None
    Section = Section

    def config_class(self):
        from toy_classes import ToyConfig
        return ToyConfig

    def classes(self):
        from toy_classes import ToyConfig, ToyForCausalLM
        return architectures.Classes(ToyConfig, ToyForCausalLM)


architectures.register(Toy())
kinds.register(kinds.Kind("toy_shared", ("W",), lambda taps, lag, x: taps[lag] * x, "one for all"))
print("imported")
"""
CLASSES = """
from cat_lm.model import CatConfig, CatForCausalLM


class ToyConfig(CatConfig):
    model_type = "toy_neox"


class ToyForCausalLM(CatForCausalLM):
    config_class = ToyConfig
"""


def install(folder: Path, code: str) -> dict[str, str]:
    """A package as pip would leave it; the environment of a process that finds it."""
    folder.mkdir(exist_ok=True)
    (folder / "toy_plugin.py").write_text(code, encoding="utf-8")
    (folder / "toy_classes.py").write_text(CLASSES, encoding="utf-8")
    info = folder / "toy-1.5.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[cat_lm.plugins]\nmine = toy_plugin\n")
    return dict(os.environ) | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


def python(environment, *arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )


def test_an_installed_package_is_known_to_all(tmp_path):
    environment = install(tmp_path / "site", PLUGIN)
    code = f"""
import sys
from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.ops.convolution import kinds
assert architectures.names() == {(*BUILT_IN, "toy_neox")!r}, architectures.names()
assert "toy_shared" in kinds.names() and "torch" not in sys.modules
given = ["model.conv_type=toy_shared", "model.architecture=toy_neox"]
config = load_config({str(QUICKSTART)!r}, given)
from transformers import AutoConfig, AutoModelForCausalLM
from cat_lm.training.estimate import meta_model
model = meta_model(config, 99)
assert type(model).__name__ == "ToyForCausalLM" and model.config.hidden_act == "relu"
assert type(AutoConfig.for_model("toy_neox")).__name__ == "ToyConfig"
assert type(AutoModelForCausalLM.from_config(model.config)).__name__ == "ToyForCausalLM"
"""
    done = python(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "imported\n"  # once


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two; mend or uninstall it"),
        ("import sys\nsys.exit(3)", "imported: SystemExit: 3; mend or uninstall it"),
    ],
)
def test_a_plugin_that_is_broken_is_one_line(code, said, tmp_path):
    environment = install(tmp_path / "site", code)
    done = python(environment, "-m", "launch.doctor", QUICKSTART, "--ranks", "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: plugin mine of toy 1.5: toy_plugin cannot be imported: ")
    assert said in done.stderr
