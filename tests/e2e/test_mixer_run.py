"""A language model around a mixer through the commands, from training to writing."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from cat_lm.training.checkpoint import complete_checkpoints
from tests.commands import Command, finish
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import losses, run_values, write_config

MODEL = {"architecture": "mixer", "hidden_size": 32, "num_hidden_layers": 2}
MODEL |= {"intermediate_size": 64}


def values_of(data: Path, out: Path, mixer: str, options: dict | None = None, **train) -> dict:
    values = run_values(data, out, **train)
    values["model"] = MODEL | {"mixer": mixer, "mixer_options": options or {}}
    values["data"]["mask_documents"] = True
    return values


def test_killed_resumed_exported_and_asked_to_write(tiny_corpus, tmp_path):
    values = values_of(tiny_corpus, tmp_path / "straight", "gated-deltanet", max_steps=24)
    values["train"]["global_batch_size"] = 2
    values["checkpoint"] = {"every_steps": 4, "keep_last": 2}
    straight = Command("train.py", write_config(tmp_path, values))
    assert "mixer gated-deltanet" in finish(straight)
    values["train"] |= {"output_dir": str(tmp_path / "killed"), "resume": "auto"}
    config = write_config(tmp_path, values)
    process = Command("train.py", config)
    folder = tmp_path / "killed/checkpoints"
    while process.poll() is None and not complete_checkpoints(folder):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() != 0, "the run ended before it could be killed"
    finish(Command("train.py", config))
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")

    exported = tmp_path / "exported"
    finish(Command("-m", "cat_lm.export", tmp_path / "killed", exported))
    assert AutoModelForCausalLM.from_pretrained(exported).config.mixer == "gated-deltanet"
    assert "gated-deltanet" in (exported / "README.md").read_text()
    command = ("-m", "cat_lm.generate", exported, "The ", "--max-new-tokens", "8")
    assert "The " in finish(Command(*command))


def train(ranks, data: str, folder: str, runs: list[tuple]) -> list[int]:
    from train import Trainer

    codes = []
    for mixer, options, stage, precision in runs:
        name = f"{mixer}-{stage}-{precision}"
        values = values_of(data, Path(folder) / name, mixer, options)
        values["train"] |= {"zero_stage": stage, "precision": precision, "max_steps": 4}
        values["validation"], values["checkpoint"] = {}, {}
        with opened(Trainer, ranks, values) as trainer:
            codes.append(trainer.run())
    return codes


RUNS = [
    ("gla", {}, 0, "bf16"),
    ("deltanet", {}, 0, "bf16"),
    ("lincat", {"heads": 2}, 0, "bf16"),
    ("mamba", {}, 1, "bf16"),
    ("gated-deltanet", {}, 3, "bf16"),
    ("cat", {"heads": 2}, 3, "fp32"),
    ("mamba", {}, 3, "fp32"),
]


@pytest.mark.parametrize(
    ("world_size", "runs"),
    [
        pytest.param(2, RUNS[-3:], id="stage 3"),
        pytest.param(2, RUNS[:-3], id="other stages", marks=pytest.mark.long),
        pytest.param(1, RUNS, id="one rank", marks=pytest.mark.long),
    ],
)
def test_every_stage_trains_mixers(world_size, runs, tiny_corpus, tmp_path):
    """Autocast and shards of parameters: what mixers hold beside linear layers is gathered too."""
    for codes in run_on_ranks(train, world_size, str(tiny_corpus), str(tmp_path), runs):
        assert codes == [0] * len(runs)
    for mixer, _, stage, precision in runs:
        found = losses(tmp_path / f"{mixer}-{stage}-{precision}")
        assert all(x == x and x < 7 for _, x, *_ in found), mixer
