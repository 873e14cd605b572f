"""`train.py --keys`: every key, with the default that a run without it has."""

import re
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import Field

from cat_lm import architectures
from cat_lm.config import RunConfig, known_keys, load_config
from cat_lm.config.loading import _line, all_keys
from cat_lm.core.errors import UserError
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
def test_what_is_printed_is_a_run(name, tmp_path):
    """With what is needed it is the run that these few values alone make."""
    printed = yaml.safe_load(all_keys(name))
    known = known_keys({"model": {"architecture": name}})
    assert {section: list(keys) for section, keys in printed.items()} == known
    needed = {
        (section, key): NEEDED[section][key]
        for section, key in re.findall(r"^(\w+)\.(\w+)$", "\n".join(dotted(name)), re.MULTILINE)
    }
    few = {"model": {"architecture": name}, "train": {"max_steps": 3}, "data": {"path": "data/a"}}
    for (section, key), value in needed.items():
        assert printed[section][key] is None
        few.setdefault(section, {})[key] = value
    runs = []
    for number, values in enumerate((few, {s: printed[s] | few.get(s, {}) for s in printed})):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(values))
        runs.append(load_config(tmp_path / f"{number}.yaml", []))
    assert runs[0] == runs[1] and isinstance(runs[0], RunConfig)


def dotted(name: str) -> list[str]:
    """The keys that are said to be needed."""
    section, found = "", []
    for line in all_keys(name).splitlines():
        key, _, rest = line.partition(":")
        section = section if key.startswith(" ") else key
        if re.match(r"\s+# needed", rest):
            found.append(f"{section}.{key.strip()}")
    return found


@pytest.mark.parametrize("name", architectures.names())
def test_every_key_says_what_it_means(name):
    sections = {n: field.annotation for n, field in RunConfig.model_fields.items()}
    sections["model"] = architectures.get(name).Section
    keys = [item for section in sections.values() for item in section.model_fields.items()]
    assert [key for key, field in keys if not field.description] == ["architecture"]


def test_kinds_and_meanings_are_told():
    lines = {line.split(":")[0].strip(): line for line in all_keys("mamba2").splitlines()}
    assert re.fullmatch(r"  precision: auto +# auto \| bf16 \| fp32; auto: .*", lines["precision"])
    assert re.fullmatch(r"  lr: +# needed; number; peak learning rate", lines["lr"])
    assert lines["architecture"].strip() == "architecture: mamba2"
    assert (
        "null  " in lines["time_step_limit"]
        and "# [number, number]; b" in (lines["time_step_limit"])
    )
    assert "n_groups" in lines and "conv_type" not in lines
    with pytest.raises(UserError, match="--keys cat: no such architecture; choose one of gpt"):
        all_keys("cat")


class Odd(Section):
    """What a plugin's family may ask for."""

    kinds: set[int] | None = None
    paths: tuple[Path, ...] = (Path("a b"), Path("c"))
    names: list[str] = Field(["x" * 60, "y" * 60], description="of two\n    lines")
    weights: dict[str, float] = Field({"b": 1.0, "a": 2.0})
    other: object = object()
    mode: Literal["one", "two"]


def test_keys_of_every_kind_are_a_line_of_yaml_each():
    lines = [_line(key, field) for key, field in Odd.model_fields.items()]
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


def test_the_command():
    for words, name in ((("--keys",), "gpt_neox"), (("no/file.yaml", "--keys", "gla"), "gla")):
        done = python("train.py", *words)
        assert (done.returncode, done.stdout) == (0, all_keys(name) + "\n"), done.stderr
    done = python("train.py", "--keys", "a.yaml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "--keys a.yaml: no such architecture" in done.stderr
