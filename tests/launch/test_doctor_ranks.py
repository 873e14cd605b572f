"""launch.doctor --ranks: a large run looked at on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.doctor import __main__ as doctor
from tests.calls import call_main

ROOT = Path(__file__).parents[2]
MEDIUM = str(ROOT / "configs/pretrain/cat_rope_1b4.yaml")
LARGE = str(ROOT / "configs/pretrain/cat_rope_7b.yaml")


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        return call_main(doctor.main, monkeypatch, capsys, "launch.doctor", *arguments)

    return run


def test_a_large_run(command, tmp_path):
    path = tmp_path / "dry.json"
    code, out, _ = command(LARGE, "--ranks", 64, "--device", "h100", "--json", path)
    assert code == 0, out
    assert out.splitlines()[-1] == "this run can start on 64 ranks"
    assert "64 ranks on 8 nodes of 8 H100" in out
    assert "2048 sequences of 2048 a step: 32 a rank, 1 at once, 32 micro-batches" in out
    assert "6,857,366,528 parameters" in out and "238,418 steps" in out
    assert "note: data: data/pretraining-1t: no such folder" in out
    found = {f["name"]: f["value"] for f in json.loads(path.read_text("utf-8"))["findings"]}
    assert found["host_memory"] == 4 * found["parameters"], "the first rank alone builds it"
    words = " ".join(out.split())
    # The last two, the next, and those of each 20,000th of 238,418 steps.
    kept = (2 + 1 + 11) * found["checkpoint"] / 2**30
    assert f"every 1,000 steps; up to {kept:,.1f} GiB at the end" in words
    assert "25.5 GiB of the first node while its first rank builds the model" in words
    assert found["accumulation"] == 32 and found["checkpoint"] == 12 * found["parameters"]


def test_everything_wrong_at_once(command):
    code, out, _ = command(
        LARGE, "--ranks", 60, "--device", "l4", "train.zero_stage=0", "model.conv_window=3"
    )
    assert code == 1
    broken = [line for line in out.splitlines() if line.startswith("BROKEN")]
    assert len(broken) == 3, out
    assert "BROKEN: ranks: --ranks 60: is not a multiple of --gpus-per-node 8" in broken[0]
    assert broken[1].startswith("BROKEN: batch: train.global_batch_size=2048 is not a multiple")
    assert broken[2].startswith("BROKEN: memory: about 1")
    assert out.splitlines()[-1] == "3 broken: this run cannot start on 60 ranks"


def test_real_data_are_read(command, tiny_corpus):
    arguments = (ROOT / "configs/quickstart.yaml", "--ranks", 2, "--gpus-per-node", 2)
    code, out, err = command(*arguments, f"data.path={tiny_corpus}", "train.micro_batch_size=8")
    assert code == 0 and "note" not in out, out + err
    assert "epochs" in out and "2 ranks on 1 node\n" in out


def test_costs_stand_beside_what_was_found(command, tmp_path):
    path = tmp_path / "costs.json"
    asked = ("--ranks", 64, "--device", "H100", "--mfu", 0.5, "train.max_tokens=30B")
    code, out, _ = command(MEDIUM, *asked, "--json", path)
    assert code == 0, out
    assert max(map(len, out.splitlines())) <= doctor.WIDTH
    found = {f["name"]: f["value"] for f in json.loads(path.read_text("utf-8"))["findings"]}
    (cost,) = found["costs"]
    words = " ".join(out.split())
    assert "50% of 989 TFLOP/s (MFU; given by --mfu)" in words
    assert f"{cost['tokens_per_second']:,.0f} tokens/s" in words
    assert f"{cost['days']:.2f} days, {cost['gpu_hours']:,.0f} GPU-hours" in words
    assert cost["compute_seconds"] == pytest.approx(
        2**21 * found["flops_per_token"] / (64 * 0.5 * 989e12)
    )
    code, out, _ = command(MEDIUM, *asked, "train.precision=fp32")
    assert code == 0 and "note: speed: train.precision=fp32: only peaks in bf16 are known" in out


def test_a_configuration_is_needed(command):
    code, _, err = command("--ranks", 8)
    assert code == 2 and "needs a run's configuration" in err
