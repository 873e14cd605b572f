"""A family from a configuration to text: killed, resumed, exported, generated."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.commands import Command, finish
from tests.runs import losses, records, run_values, write_config

STEPS = 20
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
LLAMA = {"architecture": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"conv_type": "head", "conv_window": 4, "attention_dropout": 0.1}
MIXER = {"architecture": "mixer", "mixer": "gated-deltanet"}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (LLAMA, "cat_llama"),
        pytest.param(MIXER, "cat_mixer", marks=pytest.mark.long),
    ],
    ids=["llama", "mixer"],
)
def test_family_trains_is_killed_resumes_exports_and_writes(model, kind, tiny_corpus, tmp_path):
    configs = []
    for name in ("whole", "part"):
        values = run_values(tiny_corpus, tmp_path / name, max_steps=STEPS, resume="auto")
        values["model"] = SIZES | model
        values["data"]["mask_documents"] = True
        (tmp_path / f"{name}-config").mkdir()
        configs.append(write_config(tmp_path / f"{name}-config", values))
    finish(Command("train.py", configs[0]))
    expected = losses(tmp_path / "whole")
    seen = [record["loss"] for record in records(tmp_path / "whole") if "loss" in record]
    assert len(seen) == STEPS and seen[-1] < seen[0]
    process = Command("train.py", configs[1])
    latest = tmp_path / "part/checkpoints/latest"
    while not latest.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(losses(tmp_path / "part")) <= len(expected)
    finish(Command("train.py", configs[1]))
    assert losses(tmp_path / "part") == expected
    out = tmp_path / "model"
    said = finish(Command("-m", "cat_lm.export", tmp_path / "part", out))
    assert "read back and equal" in said
    assert json.loads((out / "config.json").read_text())["model_type"] == kind
    text = finish(Command("-m", "cat_lm.generate", out, "def", "--max-new-tokens", 8))
    assert text.strip()
