"""The registry of families: one place knows each, and a family of one's own is known everywhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from cat_lm import architectures
from cat_lm.architectures.families.gpt_neox import GPTNeoX, GPTNeoXSection
from cat_lm.config import changed_values, known_keys, load_config
from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.model import CatConfig, CatForCausalLM
from cat_lm.ops.convolution import kinds
from cat_lm.pretrained.loading import load_model
from cat_lm.training.checkpoint.files import RUN_CONFIG, read_run_config
from cat_lm.training.estimate import meta_model
from tests.unit.tiny_models import cat_model, random_ids, stock_model

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs/quickstart.yaml"
BUILT_IN = architectures.ARCHITECTURES.own_names()
ROPE_NEVER = {"position_embedding": "none"}


def loaded(**model):
    return load_config(QUICKSTART, [f"model.{key}={value}" for key, value in model.items()])


def error_of(*overrides) -> str:
    with pytest.raises(UserError) as raised:
        load_config(QUICKSTART, overrides)
    return str(raised.value)


# Nobody else knows a family by name

FAMILY = re.compile(
    r"gpt_?neox|cat_?(neox|llama|mamba)|^llama$|Cat(Config|ForC|Model)"
    r"|(Llama|Mamba2?)(Config|ForC|Model)",
    re.I,
)
# Of a projection or an embedding of one family.
FAMILY_PARTS = re.compile(r"query_key_value|embed_in\b|embed_out|embed_tokens")
ELSEWHERE = {
    "cat_lm/__init__.py": "the names that people import",
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
        own = name.startswith(("tests/", "cat_lm/architectures/", "cat_lm/model/"))
        if not own and family_names(path.read_text(encoding="utf-8")):
            found[name] = family_names(path.read_text(encoding="utf-8"))
    assert found.keys() == ELSEWHERE.keys(), found


@pytest.mark.parametrize(
    "line",
    [
        "if config.model_type == 'gpt_neox': pass",
        "from transformers import GPTNeoXConfig",
        "from transformers.models.gpt_neox import x",
        "isinstance(config, CatConfig)",
        "weights['layers.0.query_key_value.weight']",
        "name = f'gpt_neox.layers.{number}'",
    ],
)
def test_a_family_that_is_named_is_found(line):
    assert family_names(f"'''CatConfig.'''\n{line}\n")
    assert not family_names(f"''' {line} '''\n\ndef f():\n    '''gpt_neox'''\n# {line}\n")


def test_the_registry_needs_no_torch():
    code = (
        "import sys; import cat_lm.architectures as a, cat_lm.config; a.names()\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# The built-in families

SHAPES = [
    {"conv_type": "none"},
    {"conv_type": "none", **ROPE_NEVER, "tie_word_embeddings": True},
    {"conv_type": "head", "conv_window": 5, "intermediate_size": 24},
    {"conv_type": "multihead", "conv_streams": "kv", "use_parallel_residual": False},
    {"conv_type": "multihead", "conv_mixing": "maps"},
    {"conv_type": "depthwise", "conv_streams": "q", "conv_activation": "silu"},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_section_goes_through_the_models_configuration_and_back(shape):
    config = loaded(vocab_size=99, layer_norm_eps=1e-4, rotary_pct=0.5, rope_theta=500, **shape)
    model = meta_model(config, 0)
    architecture = architectures.of_config(model.config)
    back = architectures.section_of(model.config)
    expected = config.model.model_copy(update={"intermediate_size": config.model.inner_size})
    assert back.model_dump() == expected.model_dump()
    assert architecture.summary(back) == architecture.summary(expected)


def test_words():
    words = {
        "no convolution; RoPE": {"conv_type": "none"},
        "head convolution of q, v, W=4; no positions": {
            "conv_type": "head", "conv_streams": "qv", "conv_window": 4, **ROPE_NEVER,
        },
        "multihead convolution of q, k, v, W=21, mixing attention maps; RoPE": SHAPES[4],
        "depthwise convolution of q, W=21, then SiLU; RoPE": SHAPES[5],
    }  # fmt: skip
    for said, shape in words.items():
        config = loaded(**{"conv_window": 21} | shape)
        assert config.architecture.summary(config.model).words == said
        described = config.architecture.summary(config.model).description
        assert said in described and "GPT-NeoX" in described
        assert ("(CAT)" in described) == (shape["conv_type"] != "none")


def test_families_by_the_type_of_a_model():
    family = architectures.get("gpt_neox")
    assert architectures.find({"model_type": "cat_neox"}) is family
    assert architectures.find({"model_type": "gpt_neox"}) is family
    assert architectures.of_config(CatConfig()) is family
    assert architectures.find({"model_type": "gpt2"}) is None and architectures.find({}) is None
    with pytest.raises(UserError, match="model_type is 'gpt2'; known: cat_neox, gpt_neox"):
        architectures.of_config({"model_type": "gpt2"})


# Configurations


def test_a_part_of_llamas_rotation_is_refused_before_there_is_a_model():
    part = "model.rope_parameters={rope_type: default, partial_rotary_factor: 0.5}"
    assert "partial_rotary_factor=0.5: all channels" in error_of("model.architecture=llama", part)
    load_config(QUICKSTART, [part, "model.rotary_pct=0.5"])


def test_files_of_before_the_key_and_what_is_written_now(tmp_path):
    config = loaded(conv_type="multihead")
    values = config.model_dump(mode="json")
    assert values["model"].keys() == GPTNeoXSection.model_fields.keys()
    assert values["model"].pop("architecture") == "gpt_neox"
    (tmp_path / RUN_CONFIG).write_text(yaml.safe_dump(values), encoding="utf-8")
    old = read_run_config(tmp_path)
    assert old == config and type(old.model) is GPTNeoXSection
    assert changed_values(old.model_dump(mode="json"), config.model_dump(mode="json")) == {}


def test_unknown_architectures(tmp_path):
    for odd in ("nowhere", "GPT_NeoX", "null", "[1]", "3", "{a: 1}"):
        message = error_of(f"model.architecture={odd}", "model.key_of_it=1")
        assert "model.architecture=" in message and "must be one of gpt_neox" in message
        assert "\n" not in message
    with pytest.raises(UserError, match="architecture='nowhere': must be one of gpt_neox"):
        architectures.get("nowhere")
    values = loaded().model_dump(mode="json")
    values["model"]["architecture"] = "nowhere"
    (tmp_path / RUN_CONFIG).write_text(yaml.safe_dump(values), encoding="utf-8")
    with pytest.raises(UserError, match=r"model\.architecture.*must be one of gpt_neox"):
        read_run_config(tmp_path)


# A family of one's own


class ToySection(architectures.ModelSection):
    architecture: str = "toy"
    toys: int = 3
    toy_box: str = "red"


class Toy(architectures.Architecture):
    name = "toy"
    title = "Toy"
    model_type = "cat_toy"
    Section = ToySection
    embedding = "toys"
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


def test_the_section_is_the_architectures(toy, run, tmp_path):
    config = load_config(run, ["model.toys=7", "model.toy_box=a #1: b"])
    assert type(config.model) is ToySection and config.architecture is toy
    assert (config.model.toys, config.model.toy_box) == (7, "a #1: b")
    config.save(tmp_path / "saved.yaml")
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text())["model"] == {
        "architecture": "toy", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": None,
        "tie_word_embeddings": False, "toys": 7, "toy_box": "a #1: b",
    }  # fmt: skip
    assert load_config(tmp_path / "saved.yaml") == config
    with pytest.raises(UserError, match=r"model\.toys=200: too many"):
        load_config(run, ["model.toys=200", "data.context_length=100"])
    assert known_keys({"model": {"architecture": "toy"}})["model"][-2:] == ["toys", "toy_box"]


def test_keys_of_another_architecture_are_unknown(toy, run):
    with pytest.raises(UserError) as raised:
        load_config(run, ["model.rotary_pct=1"])
    assert "model.rotary_pct: unknown key (it is one of model.architecture=gpt_neox)" in str(
        raised.value
    )
    # What has no counterpart here is not likened to anything.
    assert "nearest" not in str(raised.value)
    message = error_of("model.toys=3")
    assert message.endswith("model.toys: unknown key (it is one of model.architecture=toy)")
    message = error_of("model.architecture=llama", "model.layer_norm_eps=1e-4")
    assert message.endswith("=gpt_neox); the nearest known one is model.rms_norm_eps")
    # The architecture counts wherever it stands among the overrides, also for what is text.
    run.write_text(run.read_text().replace("architecture: toy", "architecture: gpt_neox"))
    config = load_config(run, ["model.toy_box=a #1: b", "model.architecture=toy"])
    assert config.model.toy_box == "a #1: b"
    message = error_of("model.toys=3", "model.architecture=toy")
    assert "model.toys: " not in message and "model.conv_type: unknown key" in message


def test_what_cannot_be_registered(toy):
    def kind(**attributes):
        return type("Other", (Toy,), {"name": "other", "model_type": "cat_other", **attributes})()

    with pytest.raises(ValueError, match="'toy': there is one of this name already"):
        architectures.register(Toy())
    with pytest.raises(ValueError, match="'other': model type 'cat_toy' is taken"):
        architectures.register(kind(model_type="cat_toy"))
    with pytest.raises(ValueError, match="'other': model type 'gpt_neox' is taken"):
        architectures.register(kind(library_type="gpt_neox"))
    with pytest.raises(ValueError, match=r"'other': its Section's key architecture has .*'toy'"):
        architectures.register(kind())
    for changes, said in (
        ({"title": ""}, "its class Other must give title, a text"),
        ({"layer_weight": None}, "its class Other must give layer_weight, a text"),
        ({"classes": architectures.Architecture.classes}, "its class Other must define classes"),
        ({"summary": "toy"}, "Other.summary must be a method"),
        ({"Section": dict}, "Section must be a ModelSection"),
    ):
        with pytest.raises(ValueError, match=f"architecture 'other': {said}"):
            architectures.register(kind(**changes))
    with pytest.raises(
        ValueError, match=r"architecture <class .*must be an instance of a subclass"
    ):
        architectures.register(Toy)
    assert architectures.names() == (*BUILT_IN, "toy")


def test_a_subclass_with_another_name_is_whole(monkeypatch):
    """What a family does not change is its parent's."""

    class Section(GPTNeoXSection):
        architecture: str = "other_neox"

    class OtherConfig(CatConfig):
        model_type = "other_neox"

    class OtherForCausalLM(CatForCausalLM):
        config_class = OtherConfig

    class Other(GPTNeoX):
        name, model_type, library_type = "other_neox", "other_neox", None

        def config_class(self):
            return OtherConfig

        def classes(self):
            return architectures.Classes(OtherConfig, OtherForCausalLM)

    Other.Section = Section
    families = architectures.ARCHITECTURES
    monkeypatch.setattr(families, "_entries", dict(families._entries))
    architectures.register(Other())
    config = loaded(architecture="other_neox", conv_type="head")
    model = meta_model(config, 99)
    assert (
        type(model) is OtherForCausalLM
        and architectures.of_config(model.config).name == config.model.architecture
    )


def renamed_in(folder: Path, pattern: str, replacement: str, **more: torch.Tensor) -> None:
    """Give tensors of a model's file other names, and add some."""
    file = folder / "model.safetensors"
    tensors = {re.sub(pattern, replacement, k): v.clone() for k, v in load_file(file).items()}
    save_file(tensors | more, file, {"format": "pt"})


@pytest.mark.parametrize("variant", [{}, {"conv_type": "none"}, {"family": "llama"}])
def test_family_reads_its_library_names(variant, tmp_path, monkeypatch):
    model = cat_model(attention_bias=True, **variant)
    kind = type(model.config)
    monkeypatch.setattr(kind, "library_names", {r"^old_head\.": "lm_head."})
    model.save_pretrained(tmp_path)
    expected = load_model(tmp_path).state_dict()
    assert expected.keys() == model.state_dict().keys()
    renamed_in(tmp_path, "^lm_head", "old_head")
    found = load_model(tmp_path).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    renamed_in(tmp_path, "^old_head", "older.head")
    with pytest.raises(UserError, match=r"missing keys lm_head\.weight"):
        load_model(tmp_path)


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


# Packages that bring their own

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
        ("(", "SyntaxError: "),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two; mend or uninstall it"),
        ("from cat_lm.architectures import get\nget('odd')", "architecture='odd': must be one of"),
        ("import sys\nsys.exit(3)", "imported: SystemExit: 3; mend or uninstall it"),
        ("import sys\nsys.exit()", "imported: SystemExit; mend or uninstall it"),
    ],
)
def test_a_plugin_that_is_broken_is_one_line(code, said, tmp_path):
    environment = install(tmp_path / "site", code)
    done = python(environment, "-m", "launch.doctor", QUICKSTART, "--ranks", "1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: plugin mine of toy 1.5: toy_plugin cannot be imported: ")
    assert said in done.stderr


@pytest.mark.long
def test_a_broken_plugin_is_no_matter_of_other_models(tmp_path):
    """transformers' own models and ours open in a program that has cat_lm; a line says why."""
    environment = install(tmp_path / "site", "1 / 0")
    code = (
        "import cat_lm\nfrom transformers import AutoConfig\n"
        "assert AutoConfig.for_model('gpt2').model_type == 'gpt2'\n"
        "assert AutoConfig.for_model('cat_neox').model_type == 'cat_neox'\n"
    )
    done = python(environment, "-c", code)
    assert done.returncode == 0, done.stderr
    said = "plugin mine of toy 1.5: toy_plugin cannot be imported"
    assert f"cat_lm: {said}" in done.stderr


def test_a_broken_plugin_stays_broken(monkeypatch):
    """The second question is not answered as if there were no plugin."""

    class Entry(tuple):
        name, value, dist = "bad", "bad_module", None

        def load(self):
            raise ImportError("no such thing")

    monkeypatch.setattr(plugins, "_begun", False)
    monkeypatch.setattr(plugins, "_failed", None)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry()])
    for ask in (architectures.names, kinds.names, lambda: architectures.find({})):
        with pytest.raises(UserError, match="plugin bad: bad_module cannot be imported: ImportErr"):
            ask()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [a.name for a in architectures.built_in()] == list(BUILT_IN)
