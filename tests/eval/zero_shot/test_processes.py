"""The zero-shot command in a process without a network, and beside the harness's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lm_eval.tasks
import pytest

from eval.zero_shot.run import run
from eval.zero_shot.tasks import table2
from tests.conftest import REPOSITORY
from tests.eval.zero_shot.calls import settings


class TestOtherProcesses:
    @pytest.mark.long
    def test_no_network_is_used(self, model, rows, tmp_path):
        """R27: with --data-dir every try to open a connection would fail the command."""
        code = f"""
import runpy, socket, sys
class Blocked(socket.socket):
    def connect(self, *_): raise AssertionError("a connection was opened")
    connect_ex = connect
socket.socket = Blocked
socket.getaddrinfo = Blocked.connect
sys.argv = ["zero_shot", {str(model)!r}, "--data-dir", {str(rows)!r}, "--out", "out"]
runpy.run_module("eval.zero_shot", run_name="__main__", alter_sys=True)
"""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environment |= {"PYTHONPATH": str(REPOSITORY), "HF_HOME": str(tmp_path / "empty")}
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr
        first, *lines = result.stderr.splitlines()
        assert first.startswith("zero-shot tasks ") and len(lines) == len(table2.TASKS), lines
        assert result.stdout.startswith("task ") and "of 7 accuracies" in result.stdout
        tasks = json.loads((tmp_path / "out/zero_shot.json").read_text(encoding="utf-8"))["tasks"]
        assert list(tasks) == list(table2.TASKS)

    @pytest.mark.long
    def test_the_harness_own_command_gives_the_same_numbers(self, model, rows, tmp_path):
        """`lm_eval --model hf` reads the model by the file beside its weights."""
        stock = Path(lm_eval.tasks.__file__).parent
        folders = {"piqa": ("piqa", "validation"), "lambada_openai": ("lambada", "test")}
        for name, (folder, split) in folders.items():
            definition = {
                "include": str(stock / folder / f"{name}.yaml"),
                "task": f"local_{name}",
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: str(rows / f"{name}.jsonl")}},
                "training_split": None,
            }
            (tmp_path / f"{name}.yaml").write_text(json.dumps(definition), encoding="utf-8")
        program = Path(sys.executable).with_name("lm_eval")
        arguments = [
            "--model",
            "hf",
            "--model_args",
            f"pretrained={model},trust_remote_code=True",
            "--device",
            "cpu",
        ]
        arguments += ["--tasks", "local_piqa,local_lambada_openai", "--include_path", tmp_path]
        subprocess.run(
            [program, *arguments, "--output_path", tmp_path / "harness.json"],
            check=True,
            cwd=tmp_path,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")},
            timeout=300,
        )
        (path,) = tmp_path.rglob("harness*.json")
        theirs = json.loads(path.read_text(encoding="utf-8"))["results"]
        ours = run(model, list(folders), tmp_path / "out", settings(rows))["tasks"]
        for name in folders:
            for metric, value in ours[name]["metrics"].items():
                expected = theirs[f"local_{name}"][f"{metric},none"]
                assert value == pytest.approx(expected, rel=1e-6), (name, metric)
