"""The front README's commands, run word by word in an empty folder beside links to the checkout.

Training gets a few overrides at its end that make it short and the model small; nothing else is
changed. Of the quickstart's commands some are forked (tests/served.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cat_lm.config import load_config
from tests.commands import python
from tests.conftest import REPOSITORY as ROOT
from tests.readme import READMES, blocks, user_checkout
from tests.served import served_python

SHORT = ["train.max_steps=3", "optimizer.warmup_steps=1", "validation.max_tokens=1K"]
SHORT += ["model.hidden_size=64", "model.num_hidden_layers=2"]
# In a shell the data and the first model are PATH's python's, which the environment put there.
PYTHON = """() {{
    case $* in
        *data_prep*|*/pythia*) command python "$@" ;;
        *) {served} "$@" ;;
    esac
}}"""


def run(command: list[str], folder: Path, timeout: int = 600, **variables: str) -> str:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= variables
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def call(words: list[str], folder: Path) -> str:
    done = python(*words, cwd=folder)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory) -> Path:
    return user_checkout(tmp_path_factory.mktemp("user"))


def test_the_first_two_commands_are_scripts():
    first = blocks("bash")[0].split("\n")[:2]
    assert first == ["bash launch/quickstart.sh", "bash tests/run.sh"]
    assert all((ROOT / command.split()[1]).is_file() for command in first)


@pytest.mark.long
def test_commands_of_the_readme(user_folder):
    commands = [line for block in blocks("bash")[1:] for line in block.splitlines() if line]
    assert len(commands) >= 8
    for line in commands:
        program, *words = shlex.split(line)
        assert program == "python"
        if words[0] == "train.py":
            words += SHORT
        call(words, user_folder)
    assert (user_folder / "runs/mine/report/index.html").is_file()
    operators, (example,) = blocks("python", ROOT / "cat_lm/README.md")[0], blocks("python")
    assert "torch.Size([2, 100, 8, 64])" in call(
        ["-c", f"{operators}\nprint(y.shape)"], user_folder
    )
    ids = "print(model.generate(**tokenizer('x', return_tensors='pt'), max_new_tokens=3).shape)"
    assert "torch.Size([1, " in call(["-c", f"{example}\n{ids}"], user_folder)


@pytest.mark.long
def test_quickstart_from_the_environment_to_the_page(tmp_path):
    """`launch/quickstart.sh` itself, with --compare, but three training steps."""
    out = tmp_path / "quick #1: start"  # a path that YAML would read otherwise
    command = ["bash", str(ROOT / "launch/quickstart.sh"), "--compare", "--out", str(out)]
    command += ["--data", str(tmp_path / "data")]
    command += ["--", *SHORT, "checkpoint.every_steps=2"]
    with served_python() as served:
        python = {"BASH_FUNC_python%%": PYTHON.format(served=served)}
        output = run(command, tmp_path, timeout=900, **python)
    page = (out / "index.html").read_text(encoding="utf-8")
    assert str(out / "index.html") in output
    for name in ("cat", "pythia", "cat-nope"):
        assert (out / name / "model/model.safetensors").is_file()
        records = [json.loads(r) for r in (out / name / "metrics.jsonl").read_text().splitlines()]
        assert records[-1]["step"] == 3
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_configurations_that_the_readmes_name_are_valid():
    text = "\n".join(path.read_text(encoding="utf-8") for path in READMES)
    names = set(re.findall(r"configs/\w+/(?!base_|models\b)\w+\.yaml", text)) | {
        "configs/quickstart.yaml"
    }
    assert len(names) >= 2
    for name in names:
        load_config(ROOT / name)
    nodes, tasks = re.findall(r"--nodes (\d+) --gpus-per-node (\d+)", text)[0]
    gpus = re.findall(r"--nproc-per-node (\d+)", text)[0]
    lines = text.replace("\\\n", " ")
    on_one_node = re.findall(r"slurm local (\S+) --gpus-per-node (\d+)(.*)", lines)
    assert gpus in [number for _, number, _ in on_one_node]
    for file, number, rest in on_one_node:
        config = load_config(ROOT / file, [part for part in rest.split() if "=" in part])
        assert config.accumulation_steps(int(number)) >= 1
    for row in map(ROOT.joinpath, sorted(names)):
        if row.parent.name != "pretrain":
            continue
        for world_size in (int(nodes) * int(tasks), int(gpus), 1):
            assert load_config(row).accumulation_steps(world_size) >= 1
    for name in re.findall(r"(?:torchrun|deepspeed|srun)[^\n]*?(configs/\S+\.yaml)(.*)", text):
        load_config(ROOT / name[0], [part for part in name[1].split() if "=" in part])
