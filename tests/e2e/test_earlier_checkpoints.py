"""A run that version 0.1 began, whose projections held the filters, is continued bit for bit."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.checkpoints import seal_as_before
from tests.commands import python
from tests.runs import losses, run_values, write_config


def as_version_01_wrote_it(file: Path) -> None:
    """The same tensors by the names of that version."""
    with safe_open(file, framework="pt") as stored:
        tensors = {
            re.sub(r"\.convolution\.(bias|[qkv]_filter)\b", r".query_key_value.\1", name): (
                stored.get_tensor(name)
            )
            for name in stored.keys()  # noqa: SIM118 (not a dictionary)
        }
        metadata = stored.metadata()
    assert any(".query_key_value.q_filter" in name for name in tensors)
    save_file(tensors, file, metadata)


def train(data: Path, folder: Path, **train: object) -> Path:
    folder.mkdir(exist_ok=True)
    values = run_values(data, folder / "run", zero_stage=1, resume="auto", **train)
    done = python("train.py", write_config(folder, values))
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_checkpoint_with_the_earlier_names_is_continued(tiny_corpus, tmp_path):
    expected = train(tiny_corpus, tmp_path / "whole")
    run = tmp_path / "begun" / "run"
    shutil.copytree(expected, run)
    shutil.rmtree(run / "checkpoints/step-00000012")
    step = run / "checkpoints/step-00000010"
    shutil.rmtree(run / "checkpoints/step-00000005", ignore_errors=True)
    for file in (step / "model/model.safetensors", step / "state/rank-00000.safetensors"):
        as_version_01_wrote_it(file)
    seal_as_before(step)
    train(tiny_corpus, tmp_path / "begun")
    assert losses(run) == losses(expected)
    ends = [
        folder / "checkpoints/step-00000012/model/model.safetensors" for folder in (run, expected)
    ]
    with safe_open(ends[0], "pt") as mine, safe_open(ends[1], "pt") as its:
        assert set(mine.keys()) == set(its.keys())
        for name in mine.keys():  # noqa: SIM118
            assert torch.equal(mine.get_tensor(name), its.get_tensor(name)), name
