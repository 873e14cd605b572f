"""`architecture: llama` from a configuration to text: killed, resumed, exported, generated."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import yaml

from tests.commands import Command, finish
from tests.runs import losses, records, run_values, write_config

STEPS = 20


def config(corpus: Path, folder: Path, **train) -> Path:
    values = run_values(corpus, folder / "run", max_steps=STEPS, **train)
    values["model"] = {
        "architecture": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "conv_type": "head",
        "conv_window": 4,
        # Makes every step depend on the generators' states.
        "attention_dropout": 0.1,
    }
    folder.mkdir(exist_ok=True)
    return write_config(folder, values)


def test_llama_trains_is_killed_resumes_exports_and_writes(tiny_corpus, tmp_path):
    whole = config(tiny_corpus, tmp_path / "whole")
    finish(Command("train.py", whole))
    expected = losses(tmp_path / "whole/run")
    assert expected[-1][0] == STEPS
    seen = [record["loss"] for record in records(tmp_path / "whole/run") if "loss" in record]
    assert seen[-1] < seen[0]

    part = config(tiny_corpus, tmp_path / "part", resume="auto")
    process = Command("train.py", part)
    latest = tmp_path / "part/run/checkpoints/latest"
    deadline = time.monotonic() + 300
    while not latest.exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(losses(tmp_path / "part/run")) <= len(expected)
    finish(Command("train.py", part))
    assert losses(tmp_path / "part/run") == expected

    out = tmp_path / "model"
    said = finish(Command("-m", "cat_lm.export", tmp_path / "part/run", out))
    assert "read back and equal" in said
    assert yaml.safe_load((out / "config.json").read_text())["model_type"] == "cat_llama"
    text = finish(Command("-m", "cat_lm.generate", out, "def", "--max-new-tokens", 8))
    assert text.strip()
