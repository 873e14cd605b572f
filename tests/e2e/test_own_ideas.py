"""A newcomer's ideas, each one file outside of the package, through every command.

The files of `tests/own_ideas` are installed as packages are and trained, killed, resumed, exported,
generated from and evaluated; nothing of the project is edited. Then what is said where a name is
known nowhere, or to one place and not to another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from tests.commands import python
from tests.conftest import REPOSITORY
from tests.runs import losses, run_values, write_config

IDEAS = REPOSITORY / "tests/own_ideas"
SIZE = {"hidden_size": 32, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "convolution": SIZE
    | {"num_attention_heads": 4, "conv_type": "neighbour", "conv_window": 4, "hidden_dropout": 0.1},
    "scores": SIZE
    | {"num_attention_heads": 2, "position_embedding": "none", "score_transform": "log_distance"}
    | {"score_options": {"slope": 0.3}},
    "mixer": SIZE
    | {"architecture": "mixer", "mixer": "leaky", "mixer_options": {"memory": 8}}
    | {"intermediate_size": 64},
    "family": SIZE | {"architecture": "ngram", "expansion": 2},
}
# Part of what the log of a run says of each.
SAID = {
    "convolution": "neighbour convolution of q, k, v",
    "scores": "logarithmic distances",
    "mixer": "mixer leaky:memory=8.0",
    "family": "ngram, expansion=2",
}


def install(folder: Path, code: str, name: str = "own_idea") -> dict[str, str]:
    """Install a module as pip would leave it; the environment of a process that finds it."""
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[cat_lm.plugins]\nmine = {name}\n")
    return {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder}"}


class Idea(NamedTuple):
    """An installed idea, and the run that was trained with it."""

    name: str
    folder: Path
    environment: dict[str, str]

    def python(self, *words: object) -> subprocess.CompletedProcess:
        return python(*words, **self.environment)

    def run(self, *words: object) -> str:
        done = self.python(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def config(self, data: Path, run: str, **train: Any) -> Path:
        """The file of a run, with the model of the idea."""
        folder = self.folder / f"{run}-config"
        folder.mkdir(exist_ok=True)
        values = run_values(data, self.folder / run, max_steps=6, **train)
        values["model"] = MODELS[self.name]
        values["data"]["mask_documents"] = True
        values["validation"] = {"every_steps": 3, "max_tokens": 512}
        values["checkpoint"] = {"every_steps": 2}
        return write_config(folder, values)


@pytest.fixture(scope="module", params=MODELS)
def idea(request, tmp_path_factory) -> Idea:
    folder = tmp_path_factory.mktemp(request.param)
    code = (IDEAS / f"{request.param}.py").read_text(encoding="utf-8")
    return Idea(request.param, folder, install(folder / "site", code))


# train.py, which is killed at its fifth step.
KILLED = """
import os, runpy, signal, sys
from cat_lm.training.engine import Engine
train_step, steps = Engine.train_step, []
def until_killed(self, *given):
    steps.append(given)
    if len(steps) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, *given)
Engine.train_step = until_killed
sys.argv = ["train.py", {!r}]
runpy.run_path("train.py", run_name="__main__")
"""


def test_trains_is_killed_goes_on_and_is_used(idea: Idea, tiny_corpus):
    said = idea.run("train.py", idea.config(tiny_corpus, "straight"))
    assert SAID[idea.name] in said and "finished: 6 steps" in said
    config = idea.config(tiny_corpus, "run", resume="auto")
    assert idea.python("-c", KILLED.format(str(config))).returncode == -signal.SIGKILL
    said = idea.run("train.py", config)
    assert "continuing from" in said
    assert losses(idea.folder / "run") == losses(idea.folder / "straight")
    weights, straight = (
        load_file(next((idea.folder / run).glob("checkpoints/step-00000006/**/model.safetensors")))
        for run in ("run", "straight")
    )
    assert weights.keys() == straight.keys()
    assert all(weights[name].equal(straight[name]) for name in weights)

    run, model = idea.folder / "run", idea.folder / "run/model"
    idea.run("-m", "cat_lm.export", run, model)
    said = idea.run("-m", "cat_lm.generate", model, "The cat", "--greedy", "--max-new-tokens", 8)
    assert said.startswith("The cat") and len(said) > len("The cat\n")
    out = run / "eval"
    sweep = ("-m", "eval.length_sweep", model, "--data", tiny_corpus, "--out", out)
    idea.run(*sweep, "--lengths", "32,64", "--max-tokens", 512)
    rows = json.loads((out / "length_sweep.json").read_text())["rows"]
    assert [row["length"] for row in rows] == [32, 64]
    idea.run("-m", "eval.report", run, "--out", idea.folder / "page")
    assert (idea.folder / "page/index.html").is_file()


# A name that is known nowhere


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line of a command that ends with exit code 2."""
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removesuffix("\n")


# What names the idea, and known names that an error lists.
NAMED = {
    "convolution": ("conv_type='neighbour'", "none, head, depthwise, multihead"),
    "scores": ("score_transform='log_distance'", "must be one of none"),
    "mixer": ("mixer='leaky'", "attention, based, cat"),
    "family": ("architecture='ngram'", "gpt_neox, llama, mixer"),
}


def test_without_the_package_its_name_is_one_clear_line(idea: Idea, tiny_corpus):
    """For the run's configuration, its checkpoints and its export."""

    def python_without(*words: object) -> str:
        return refused(python(*words, DS_ACCELERATOR="cpu"))  # which DeepSpeed warns about else

    named, known = NAMED[idea.name]
    config = idea.config(tiny_corpus, "other")
    said = python_without("train.py", config)
    assert f"model.{named}" in said and known in said, said
    run, model = idea.folder / "run", idea.folder / "run/model"
    said = python_without("-m", "cat_lm.export", run, idea.folder / "export")
    assert f"model.{named}" in said and known in said, said
    said = python_without("-m", "cat_lm.generate", model, "The cat")
    assert str(model) in said, said
    print(said)
