"""train.py as a command: killed at any moment, started by every launcher, wrong input."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from cat_lm.core.errors import REQUEUE_EXIT_CODE
from cat_lm.training.checkpoint import complete_checkpoints, find_checkpoint
from tests.commands import Command, finish, python
from tests.runs import losses, records, run_values, write_config

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def start(*command: str | Path, **environment: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_"))}
    env |= {"OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def test_sigkill_at_random_moments(tiny_corpus, tmp_path):
    """SIGKILL between and during saves; each restart goes on to equal losses."""
    values = run_values(tiny_corpus, tmp_path / "straight", max_steps=30)
    values["checkpoint"] = {"every_steps": 2, "keep_last": 2}
    finish(Command("train.py", write_config(tmp_path, values)))
    values["train"] |= {"output_dir": str(tmp_path / "killed"), "resume": "auto"}
    config = write_config(tmp_path, values)
    moments = random.Random(20)
    killed_at = []
    for _ in range(40):
        process = Command("train.py", config)
        folder = tmp_path / "killed/checkpoints"
        before = {path.name for path in complete_checkpoints(folder)}
        while process.poll() is None and before >= {p.name for p in complete_checkpoints(folder)}:
            time.sleep(0.01)  # kill only after progress, or the run would never end
        time.sleep(moments.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        killed_at.append(find_checkpoint(tmp_path / "killed").name)
        if len(killed_at) == 2:
            finish(Command("train.py", config))
            break
    assert killed_at, "the run ended before it could be killed once"
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")


def test_a_signal_saves_and_exits_with_the_requeue_code(tiny_corpus, tmp_path):
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=100_000)
    values["checkpoint"] = {"every_steps": 100_000}
    values["validation"] = {"every_steps": 100_000, "max_tokens": 512}
    process = Command("train.py", write_config(tmp_path, values))
    metrics = tmp_path / "run/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = finish(process, REQUEUE_EXIT_CODE)
    step = records(tmp_path / "run")[-1]["step"]
    assert find_checkpoint(tmp_path / "run").name == f"step-{step:08d}"
    assert f"stopped by a signal after step {step}" in output


@pytest.mark.long
def test_a_closed_terminal_stops_a_run_after_a_checkpoint(tiny_corpus, tmp_path):
    """As an ended ssh does: a signal, and a terminal that takes no more lines nor the bar."""
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=100_000, log_every_steps=1)
    values["checkpoint"] = {"every_steps": 100_000}
    values["validation"] = {"every_steps": 100_000, "max_tokens": 512}
    config = write_config(tmp_path, values)
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup before the tests had ignored
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "train.py", str(config)])
    log, shown = tmp_path / "run/train.log", b""
    while not (log.exists() and "step 3/" in log.read_text()):
        shown += os.read(terminal, 2**16)  # ends where the run does
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == REQUEUE_EXIT_CODE, shown
    step = records(tmp_path / "run")[-1]["step"]
    assert find_checkpoint(tmp_path / "run").name == f"step-{step:08d}"
    assert f"stopped by a signal after step {step}" in log.read_text()


@pytest.mark.long
def test_every_launcher_trains_the_same(tiny_corpus, tmp_path):
    """torchrun, deepspeed and srun's variables: two ranks each, equal losses; so does one rank,
    by itself and under torchrun."""
    configs = {}
    for launcher in ("torchrun", "deepspeed", "srun", "alone", "torchrun-one"):
        (tmp_path / launcher).mkdir()
        values = run_values(tiny_corpus, tmp_path / launcher / "run", max_steps=4)
        values["model"]["hidden_dropout"] = 0.0  # or one rank would draw another mask than two
        configs[launcher] = write_config(tmp_path / launcher, values)
    port = 20_000 + os.getpid() % 20_000
    end(
        start(
            *(BIN / "torchrun", "--nproc-per-node=2", f"--master-port={port}"),
            *("train.py", configs["torchrun"]),
        )
    )
    end(
        start(
            *(BIN / "deepspeed", "--num_gpus=2", f"--master_port={port + 1}"),
            *("train.py", configs["deepspeed"]),
            PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
            DS_ACCELERATOR="cpu",
        )
    )
    tasks = [
        Command(
            *("train.py", configs["srun"]),
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            SLURM_STEP_NUM_TASKS="2",
            SLURM_JOB_ID=str(port + 2),
            SLURM_STEP_NODELIST="127.0.0.1",
        )
        for rank in range(2)
    ]
    for task in tasks:
        finish(task)
    finish(Command("train.py", configs["alone"]))
    one = (BIN / "torchrun", "--standalone", "--nproc-per-node=1", "train.py")
    end(start(*one, configs["torchrun-one"]))
    assert losses(tmp_path / "torchrun-one/run") == losses(tmp_path / "alone/run")
    expected = losses(tmp_path / "torchrun/run")
    assert len(expected) == 5
    for launcher in ("deepspeed", "srun"):
        assert losses(tmp_path / launcher / "run") == expected, launcher
    for one, two in zip(losses(tmp_path / "alone/run"), expected, strict=True):
        assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.long
def test_starts_without_a_compiler(tiny_corpus, tmp_path):
    """DeepSpeed must not try to build an operator: no compiler on PATH, an empty build cache."""
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=3)
    output = end(
        start(
            *(sys.executable, "train.py", write_config(tmp_path, values)),
            PATH=str(tmp_path),
            CXX="/nonexistent/c++",
            TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"),
        )
    )
    assert "finished: 3 steps" in output
    assert not (tmp_path / "extensions").exists()


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["train.output_dirr=x"], "train.output_dirr: unknown key; the nearest known one is"),
        (["data.path=nowhere"], "nowhere: no such folder"),
        (["model.vocab_size=5"], "model.vocab_size=5"),
        (["data.context_length=10M"], "one window of context length 10000000 needs"),
        (["train.resume=tests"], "tests: holds no complete checkpoint"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tiny_corpus, tmp_path, overrides, part):
    config = write_config(tmp_path, run_values(tiny_corpus, tmp_path / "run"))
    done = python("train.py", config, *overrides)
    output = done.stdout + done.stderr
    assert done.returncode == 2
    assert output.startswith("error: ") and part in output, output
    assert len(output.splitlines()) == 1, output


def test_help_is_quick_and_true():
    code = "import sys, runpy; sys.argv = ['train.py', '--help']\n"
    code += "try: runpy.run_path('train.py', run_name='__main__')\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    output = end(start(sys.executable, "-c", code))
    assert "section.key=value" in output and output.splitlines()[-1] == "False"


def test_too_many_bad_steps_stop_the_run(tiny_corpus, tmp_path):
    """An absurd rate and decay: a message, exit code 2, and the checkpoint from before intact."""
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=200, max_skipped_steps=3)
    values["optimizer"] |= {"lr": 1e3, "warmup_steps": 0, "grad_clip": 0, "schedule": "constant"}
    values["optimizer"]["weight_decay"] = 1e3  # a step multiplies the weights by -1e6
    values["checkpoint"] = {"every_steps": 1, "keep_last": 2}
    output = finish(Command("train.py", write_config(tmp_path, values)), code=2)
    assert "3 steps in a row were not finite" in output.splitlines()[-1]
    found = records(tmp_path / "run")
    assert [r.get("skipped", False) for r in found if "loss" in r][-3:] == [True] * 3
    newest = find_checkpoint(tmp_path / "run")
    assert f"newest complete one: {newest.name}, of " in output.splitlines()[-1]
    weights = load_file(newest / "model/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert resolved["train"]["max_skipped_steps"] == 3
