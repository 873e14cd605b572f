"""`train.py --keys`: every key, with the default that a run without it has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field

from cat_lm import architectures
from cat_lm.config import known_keys, load_config
from cat_lm.config.loading import _format_key, describe_keys
from cat_lm.core.fields import Section
from tests.commands import python

NEEDED = {
    "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_heads": 4},
    "data": {"context_length": 32},
    "optimizer": {"lr": 0.001},
    "train": {"output_dir": "runs/a", "global_batch_size": 4, "micro_batch_size": 2},
}
NEEDED["model"] |= {"mixer": "gla"}


@pytest.mark.parametrize("name", architectures.names())
def test_printed_keys_are_a_run(name, tmp_path):
    """With what is needed it is the run that these few values alone make; each has a meaning."""
    text = describe_keys(name)
    printed = yaml.safe_load(text)
    known = known_keys({"model": {"architecture": name}})
    assert {section: list(keys) for section, keys in printed.items()} == known
    lines = [line for line in text.splitlines() if line.startswith(" ")]
    assert [line.split(":")[0].strip() for line in lines if " # " not in line] == ["architecture"]
    needed = {line.split(":")[0].strip() for line in lines if "# needed" in line}
    few = {"model": {"architecture": name}, "train": {"max_steps": 3}, "data": {"path": "data/a"}}
    for section, values in NEEDED.items():
        asked = {key: value for key, value in values.items() if key in needed & {*known[section]}}
        assert all(printed[section][key] is None for key in asked)
        few[section] = {**few.get(section, {}), **asked}
    runs = []
    for number, values in enumerate((few, {s: printed[s] | few.get(s, {}) for s in printed})):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(values))
        runs.append(load_config(tmp_path / f"{number}.yaml", []))
    assert runs[0] == runs[1]


def test_kinds_and_meanings_are_told():
    lines = {line.split(":")[0].strip(): line for line in describe_keys("mamba2").splitlines()}
    assert re.fullmatch(r"  precision: auto +# auto \| bf16 \| fp32; auto: .*", lines["precision"])
    assert re.fullmatch(r"  lr: +# needed; number; peak learning rate", lines["lr"])
    assert re.search(r": null +# \[number, number\]; b", lines["time_step_limit"])


class Odd(Section):
    """What a plugin's family may ask for."""

    kinds: set[int] | None = None
    paths: tuple[Path, ...] = (Path("a b"), Path("c"))
    names: list[str] = Field(["x" * 60, "y" * 60], description="of two\n    lines")
    weights: dict[str, float] = Field({"b": 1.0, "a": 2.0})
    other: object = object()
    mode: Literal["one", "two"]


def test_keys_of_every_kind_are_a_line_of_yaml_each():
    lines = [_format_key(key, field) for key, field in Odd.model_fields.items()]
    assert not any("\n" in line for line in lines)
    values = yaml.safe_load("\n".join(lines))
    assert values.pop("other").startswith("<object")
    assert values == {
        "kinds": None,
        "paths": ["a b", "c"],
        "names": ["x" * 60, "y" * 60],
        "weights": {"b": 1.0, "a": 2.0},
        "mode": None,
    }
    assert lines[2].endswith("# of two lines") and lines[-1].endswith("# needed; one | two")


def test_command_prints_keys_of_a_family():
    for words, name in ((("--keys",), "gpt_neox"), (("no/file.yaml", "--keys", "gla"), "gla")):
        done = python("train.py", *words)
        assert (done.returncode, done.stdout) == (0, describe_keys(name) + "\n"), done.stderr
    done = python("train.py", "--keys", "a.yaml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--keys a.yaml: no such architecture; choose one of gpt" in done.stderr
