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
from tests.runs import losses, records, run_values, write_config

IDEAS = REPOSITORY / "tests/own_ideas"
SIZE = {"hidden_size": 32, "num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "convolution": SIZE
    | {"num_attention_heads": 4, "conv_type": "neighbour", "conv_window": 4, "hidden_dropout": 0.1}
    | {"conv_options": {"distance": 2}},
    "scores": SIZE
    | {"num_attention_heads": 2, "position_embedding": "none", "score_transform": "log_distance"}
    | {"score_options": {"slope": 0.3}},
    "pattern": SIZE
    | {"num_attention_heads": 2, "attention": "forgetting", "attention_options": {"start": 3}},
    "mixer": SIZE
    | {"architecture": "mixer", "mixer": "leaky", "mixer_options": {"memory": 8}}
    | {"intermediate_size": 64},
    "family": SIZE | {"architecture": "ngram", "expansion": 2},
}
# Part of what the log of a run says of each.
SAID = {
    "convolution": "neighbour:distance=2 convolution of q, k, v",
    "scores": "logarithmic distances",
    "pattern": "forgetting attention",
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


# Each goes through all commands; the other three through the registries' tests in the short tier.
SHORT = ("convolution", "family")


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=() if m in SHORT else pytest.mark.long) for m in MODELS],
)
def idea(request, tmp_path_factory) -> Idea:
    folder = tmp_path_factory.mktemp(request.param)
    code = (IDEAS / f"{request.param}.py").read_text(encoding="utf-8")
    return Idea(request.param, folder, install(folder / "site", code))


# train.py, which is killed at its fifth step.
KILLED = """
import os, runpy, signal, sys
from cat_lm.training.engine import Engine
launch_step, steps = Engine.launch_step, []
def until_killed(self, *given):
    steps.append(given)
    if len(steps) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return launch_step(self, *given)
Engine.launch_step = until_killed
sys.argv = ["train.py", {!r}]
runpy.run_path("train.py", run_name="__main__")
"""


RECALL = ("-m", "eval.recall", "run", "--task", "mqar:vocab_size=32,keys=2", "--d-model", 16)
RECALL += ("--seq-len", 16, "--epochs", 1, "--train-examples", 64, "--test-examples", 16)


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
    made = json.loads((model / "export.json").read_text())["code"]["plugins"]["mine"]
    assert made.startswith("own_idea 1.0, ")

    # With other code of the idea nothing that was computed is told again, and a run says so.
    before, source = len(list(out.rglob("*.json"))), idea.folder / "site/own_idea.py"
    source.write_text(source.read_text() + "# another version\n")
    more = idea.config(tiny_corpus, "run", resume="auto")
    said = idea.run("train.py", more, "train.max_steps=8")
    assert f"the plugin mine: was {made}, is own_idea 1.0, " in said
    idea.run(*sweep, "--lengths", "32,64", "--max-tokens", 512)
    assert len(list(out.rglob("*.json"))) == before + 2
    if idea.name == "family":  # whose words no other family has
        idea.run("-m", "eval.report", run, "--out", idea.folder / "page")
        assert "expansion=2" in (idea.folder / "page/index.html").read_text()


def test_callback_of_a_package_is_chosen_by_the_configuration(tiny_corpus, tmp_path):
    """Its state is saved; a checkpoint is exported where the package is not installed, too."""
    code = (IDEAS / "callback.py").read_text(encoding="utf-8")
    environment, run = install(tmp_path / "site", code), tmp_path / "run"
    values = run_values(tiny_corpus, run, max_steps=3, callbacks={"slow_steps": {"factor": 1.5}})
    config = write_config(tmp_path, values)
    done = python("train.py", config, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(run)[-1]["steps/slow"] >= 0
    (state,) = run.glob("checkpoints/*/callbacks/*.safetensors")
    assert state.name == "slow_steps.safetensors"
    done = python("train.py", config, "train.callbacks={slow_steps: {factor: 1}}", **environment)
    assert "train.callbacks: slow_steps: factor=1.0: must be above 1" in refused(done)
    said = refused(python("train.py", config))
    assert "train.callbacks='slow_steps': must be one of ema, profile, " in said
    assert python("-m", "cat_lm.export", run).returncode == 0


# A name that is known nowhere


def refused(done: subprocess.CompletedProcess) -> str:
    """The one line of a command that ends with exit code 2."""
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said.removesuffix("\n")


# The key that names the idea, its name, and known names that an error lists.
NAMED = {
    "convolution": ("conv_type", "neighbour", "none, head, depthwise, multihead"),
    "scores": ("score_transform", "log_distance", "must be one of none"),
    "pattern": ("attention", "forgetting", "must be one of softmax, chunk"),
    "mixer": ("mixer", "leaky", "attention, based, cat"),
    "family": ("architecture", "ngram", "gpt_neox, llama, delta_net"),
}
# What is said of its export.
EXPORTED = {
    "convolution": "conv_type='neighbour': must be one of none, head, depthwise",
    "scores": "score_transform='log_distance': must be one of none",
    "pattern": "attention='forgetting': must be one of softmax, chunk",
    "mixer": "mixer='leaky': must be one of attention, based, cat",
    "family": "does not recognize this architecture",
}


def test_without_the_package_its_name_is_one_clear_line(idea: Idea, tiny_corpus):
    """For the run's configuration, its checkpoints and its export."""
    key, name, known = NAMED[idea.name]
    said = refused(python("train.py", idea.config(tiny_corpus, "other")))
    assert f"model.{key}='{name}': " in said and known in said, said
    run, model = idea.folder / "run", idea.folder / "run/model"
    said = refused(python("-m", "cat_lm.export", run, idea.folder / "export"))
    assert f'model.{key} is "{name}": ' in said and known in said, said
    said = refused(python("-m", "cat_lm.generate", model, "The cat"))
    assert f"model {model}: config.json cannot be used: " in said and EXPORTED[idea.name] in said


def test_names_elsewhere(tiny_corpus, tmp_path):
    """A mixer of the recall suite, and a pattern of attention, that nobody brings."""
    said = refused(python(*RECALL, "--mixer", "leaky", "--out", tmp_path / "cells"))
    assert "--mixer='leaky': must be one of attention, based, cat" in said
    config = write_config(tmp_path, run_values(tiny_corpus, tmp_path / "run"))
    said = refused(python("train.py", config, "model.attention=nowhere"))
    assert "model.attention='nowhere': must be one of softmax, chunk" in said
    assert not (tmp_path / "run").exists()


def test_the_recall_suite_trains_the_mixer(tmp_path):
    code = (IDEAS / "mixer.py").read_text(encoding="utf-8")
    environment = install(tmp_path / "site", code)
    out = ("--out", tmp_path / "cells")
    done = python(*RECALL, "--mixer", "leaky:memory=4", *out, **environment)
    assert done.returncode == 0, done.stderr
    (cell,) = (tmp_path / "cells").glob("**/*.json")
    assert json.loads(cell.read_text())["mixer"]["options"] == {"memory": 4.0}
    said = refused(python(*RECALL, "--mixer", "leaky:memry=4", *out, **environment))
    assert "mixer leaky: unknown option 'memry'; did you mean memory?" in said


def test_a_parameter_of_another_shape_since_is_told_by_its_shapes(tiny_corpus, tmp_path):
    """Moments lie flat, and said that elements are stored twice."""
    code = (IDEAS / "scores.py").read_text(encoding="utf-8")
    idea = Idea("scores", tmp_path, install(tmp_path / "site", code))
    config = idea.config(tiny_corpus, "run", resume="auto")
    idea.run("train.py", config)
    for whole, changed in (
        ("torch.empty(heads)", "torch.empty(1)"),
        ("slopes[head]", "slopes[0 * head]"),
    ):
        assert whole in code
        code = code.replace(whole, changed)
    environment = install(tmp_path / "other", code)
    done = python("train.py", config, "train.max_steps=8", **environment)
    line = (done.stdout + done.stderr).splitlines()[-1]
    assert done.returncode == 2 and line.startswith("error: ") and "model.safetensors: " in line
    assert line.endswith("score_transform.slopes: the file has [2], the model [1]")


WRONG = {
    "axes that the sum does not have": (
        "convolution",
        ('("H", "W")', '("W", "H")'),
        "add_lag, with filter_axes=('W', 'H'), cannot compute with filters [3, 4]",
    ),
    "a sum that reads other tokens": (
        "convolution",
        ("dims=2)", "dims=1)"),
        "conv_type 'neighbour': add_lag, with filter_axes=('H', 'W'), reads other tokens than",
    ),
    "a start that nobody gives": (
        "scores",
        ("def initial_values", "def initial_value"),
        "score_transform 'log_distance', score_options={\"slope\": 0.3}: nothing says how slopes "
        "of LogDistanceScores must start",
    ),
    "a decay of no parameter": (
        "mixer",
        ('no_decay = ("rate",)', 'no_decay = ("rates",)'),
        "mixer leaky:memory=8.0: LeakyAverage.no_decay=('rates',): must be a tuple of names",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG)
def test_parts_that_do_not_fit_make_no_model(wrong, tiny_corpus, tmp_path):
    """What a registry that imports no torch cannot see, the first model shows."""
    name, (right, changed), said = WRONG[wrong]
    code = (IDEAS / f"{name}.py").read_text(encoding="utf-8")
    assert right in code
    environment = install(tmp_path / "site", code.replace(right, changed))
    config = Idea(name, tmp_path, {}).config(tiny_corpus, "run")
    done = python("train.py", config, **environment)
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 2 and lines[-1].startswith("error: "), lines[-5:]
    assert said in lines[-1]
