"""Every key of a configuration with odd values: accepted, or refused in short lines, at once."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from cat_lm.config import RunConfig, known_keys, load_config, loading
from cat_lm.core import readers
from cat_lm.core.errors import UserError
from tests.runs import run_values, write_config

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "configs/quickstart.yaml"
ODD = ["", " ", "-", "0", "-1", "1", "1e30", str(10**30), str(-(10**19)), "0.5", ".nan", ".inf"]
ODD += [
    "-.inf",
    "1.0e-320",
    "1.0e+300",
    "true",
    "null",
    "[]",
    "{}",
    "a" * 300,
    "../../x",
    "/proc/x",
]
ODD += ["\U0001f600\x01\x85", "2020-99-99", "!!timestamp abc", "[" * 400 + "]" * 400, "9" * 400]
LONGEST_LINE = 400


def keys() -> list[tuple[str, str]]:
    return [(section, key) for section, known in known_keys({}).items() for key in known]


def tried(path: Path, *overrides: str) -> RunConfig | None:
    """The configuration, or None where it was refused as it should be."""
    try:
        return load_config(path, overrides)
    except UserError as error:
        lines = [line for line in str(error).split("\n") if line]
        assert len(lines) <= 22
        for line in lines:
            assert len(line) < LONGEST_LINE and (line.isprintable()), line
        return None


def all_numbers(value: Any) -> list[float]:
    if isinstance(value, BaseModel):
        value = [getattr(value, name) for name in type(value).model_fields]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for part in value for number in all_numbers(part)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [value] if is_number else []


def check_plain(found: RunConfig | None) -> None:
    """What was accepted has no number that ends in infinities, and can be saved and read again."""
    if found is not None:
        assert all(abs(n) <= 1e18 for n in all_numbers(found))
        assert RunConfig.model_validate(found.model_dump(mode="json")) == found


@pytest.mark.parametrize(("section", "key"), keys())
def test_odd_values_are_taken_or_refused_in_short_lines(section, key, tmp_path, monkeypatch):
    values = run_values(tmp_path / "data", tmp_path / "run")
    file = write_config(tmp_path, {})
    # Reading the other keys each time would take most of the time.
    read = readers.read_yaml
    monkeypatch.setattr(loading, "read_yaml", lambda path, what: copy.deepcopy(values))
    for odd in ODD:
        check_plain(tried(file, f"{section}.{key}={odd}"))
    for odd in ODD:
        file.write_text(f"HERE: {odd}", encoding="utf-8")
        try:
            values[section][key] = read(file)["HERE"]
        except UserError as error:
            assert "\n" not in str(error)
        else:
            check_plain(tried(file))


@pytest.mark.parametrize("section", RunConfig.model_fields)
def test_sections_that_are_none_are_refused(section, tmp_path):
    values = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    for odd in (None, [], 3, "a" * 300, [[1]]):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**values, section: odd}))
        assert tried(tmp_path / "run.yaml") is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["optimizer.lr=.inf"], "optimizer.lr=inf: must be from 0 to 1,000"),
        (["optimizer.lr=0"], "must be greater than 0"),
        (["optimizer.lr=true"], "must be a number, not true or false"),
        (["optimizer.eps=.inf"], "optimizer.eps=inf"),
        (["optimizer.betas=[0.9, .nan]"], "optimizer.betas=nan"),
        (["model.rope_theta=1.0e-320"], "must be from 1 to"),
        (["model.attention_temperature=1.0e-320"], "must be from 0.001 to 1,000"),
        (["model.layer_norm_eps=.inf"], "model.layer_norm_eps=inf"),
        (["model.num_hidden_layers=1e30"], "must be from 1 to 1,024"),
        (["train.seed=1e30"], "train.seed='1e30': must be from 0"),
        (["train.max_steps=1e999999999"], "must be from 1 to"),
        (["train.hang_minutes=1e30"], "must be from 0.001 to"),
        (["model.conv_window=22", "data.context_length=21"], "is beyond data.context_length=21"),
        (["model.rope_parameters={rope_type: [1]}"], "model.rope_parameters.rope_type=[1]"),
        (
            ["model.rope_parameters={rope_type: linear, factor: .inf}"],
            "model.rope_parameters.factor=inf: must be from 1 to 4,096",
        ),
        (["train.output_dir="], "is no path"),
        (["train.output_dir=s3://bucket/run"], "is an address"),
        (["data.cache_dir=hf://datasets/x"], "is an address"),
        (["data.path="], "data.path='': is no path"),
        (["data.path=''"], "data.path=\"''\": is no path"),
        (["train.init_from=a\nb"], "has control characters"),
    ],
)
def test_what_cannot_be_meant_is_named(overrides, said):
    with pytest.raises(UserError) as raised:
        load_config(QUICKSTART, overrides)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("mamba", "conv_kernel"),
        ("mamba2", "conv_kernel"),
        ("gla", "conv_size"),
        ("delta_net", "conv_size"),
        ("gated_deltanet", "conv_size"),
    ],
)
def test_taps_beyond_the_rows_are_named_in_every_family(family, key):
    path = QUICKSTART.parent / "pretrain" / f"{family}.yaml"
    overrides = ["data.path=x", "data.context_length=3"]
    if family == "gla":
        overrides.append("model.use_short_conv=true")
    with pytest.raises(UserError) as raised:
        load_config(path, overrides)
    assert f"model.{key}=4: is beyond data.context_length=3" in str(raised.value)


YARN = "rope_type: yarn, factor: 2, original_max_position_embeddings: 32"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["position_embedding=none", "rope_parameters={rope_type: linear, factor: 2}"],
            "rope_parameters.rope_type='linear' with position_embedding='none': there are no posit",
        ),
        (
            ["position_embedding=none", "temperature_scope=rotary"],
            "temperature_scope='rotary' with position_embedding='none': nothing is rotated",
        ),
        (
            ["attention_temperature=0.5", f"rope_parameters={{{YARN}}}"],
            "attention_temperature=0.5 and rope_parameters.attention_factor=1.06931",
        ),
        (
            ["rope_parameters={rope_theta: 500.0}"],
            "rope_parameters.rope_theta=500.0: give it as rope_theta, which is 10000.0",
        ),
        (["rope_parameters={partial_rotary_factor: 0.5}"], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_rotary_positions_that_contradict_each_other(family, overrides, said):
    """Before the run begins, and in the words of the model's own configuration."""
    part = {
        "gpt_neox": "give it as rotary_pct, which is 0.25",
        "llama": "all channels of a head are rotated; leave it out",
    }
    said = said or f"rope_parameters.partial_rotary_factor=0.5: {part[family]}"
    family = f"model.architecture={family}"
    with pytest.raises(UserError) as raised:
        load_config(QUICKSTART, [family, *(f"model.{text}" for text in overrides)])
    assert f": model.{said}" in str(raised.value) and "\n" not in str(raised.value)
    values = readers.parse_yaml(
        "\n".join(text.replace("=", ": ", 1) for text in overrides), "overrides"
    )
    run = load_config(QUICKSTART, [family])
    fields = run.architecture.fields(run.model, 512, 64)
    with pytest.raises(ValueError, match=re.escape(said)):
        run.architecture.config_class()(**fields | values)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("{rope_theta: 500.0}", {"rope_theta": 500.0}),
        ("{rope_theta: null, rope_type: null}", {}),
        (f"{{{YARN}, attention_factor: null}}", readers.parse_yaml(f"{{{YARN}}}", "yarn")),
    ],
)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_rotary_positions_that_agree_are_built(family, given, kept, tmp_path):
    """A base given twice alike, as resolved configurations have it, and keys without a value."""
    more = [f"model.architecture={family}", f"model.rope_parameters={given}"]
    run = load_config(QUICKSTART, [*more, "model.rope_theta=500"])
    assert run.model.rope_parameters == kept
    run.save(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run
    kind = run.architecture.config_class()
    built = kind(**run.architecture.fields(run.model, 512, 64))
    assert built.rope_parameters["rope_theta"] == 500
    assert built.rope_parameters["rope_type"] == kept.get("rope_type", "default")


def test_window_of_a_model_without_convolutions_is_free():
    given = ["model.conv_type=none", "model.conv_window=21", "data.context_length=16"]
    assert load_config(QUICKSTART, given).model.conv_window == 21


def test_counts_are_exact():
    assert load_config(QUICKSTART, ["train.seed=0.57M"]).train.seed == 570_000
    written = f'train.seed="{2**60 + 1}"'
    assert load_config(QUICKSTART, [written]).train.seed == 2**60 + 1


def test_files_that_are_none_are_one_line(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "bytes.yaml").write_bytes(b"model: \xff")
    (tmp_path / "folder.yaml").mkdir()
    names = {
        "loop": "Too many levels of symbolic links",
        "bytes.yaml": "not UTF-8",
        "folder.yaml": "is a folder",
        "x" * 300: "File name too long",
        "bytes.yaml/x": "a part of the path is a file",
        "nul\0": "null byte",
    }
    for name, said in names.items():
        for path in (tmp_path / name, tmp_path / "run.yaml"):
            (tmp_path / "run.yaml").write_text(yaml.safe_dump({"base": name}))
            with pytest.raises(UserError, match=said) as raised:
                load_config(path)
            assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    (tmp_path / "run.yaml").chmod(0)
    with pytest.raises(UserError, match="no permission"):
        load_config(tmp_path / "run.yaml")


def test_a_chain_of_bases_ends(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(UserError, match="leads back"):
        load_config(tmp_path / "a.yaml")
