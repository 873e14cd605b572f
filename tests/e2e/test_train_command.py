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
from tests.conftest import REPOSITORY
from tests.runs import losses, records, run_values, write_config

BIN = Path(sys.executable).parent


def start(*command: str | Path, **environment: str) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "WORLD_"))}
    env |= {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=REPOSITORY,
        env=env | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("times", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_sigkill_at_random_moments_costs_nothing(times, tiny_corpus, tmp_path):
    """SIGKILL between and during saves; each restart goes on to equal losses."""
    values = run_values(tiny_corpus, tmp_path / "straight", max_steps=40)
    values["checkpoint"] = {"every_steps": 2, "keep_last": 2}
    straight = Command("train.py", write_config(tmp_path, values))
    values["train"] |= {"output_dir": str(tmp_path / "killed"), "resume": "auto"}
    (tmp_path / "killed").mkdir()
    config = write_config(tmp_path / "killed", values)
    moments, folder, killed = random.Random(20), tmp_path / "killed/checkpoints", 0
    while killed < times:
        process = Command("train.py", config)
        before = {path.name for path in complete_checkpoints(folder)}
        while process.poll() is None and before >= {p.name for p in complete_checkpoints(folder)}:
            time.sleep(0.01)  # kill only after progress, or the run would never end
        time.sleep(moments.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        killed += 1
    finish(straight)
    finish(Command("train.py", config))
    assert killed, "the run ended before it could be killed once"
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")


def endless(data: Path, folder: Path) -> Path:
    values = run_values(data, folder / "run", max_steps=100_000, log_every_steps=1)
    values["checkpoint"] = {"every_steps": 100_000}
    values["validation"] = {"every_steps": 100_000, "max_tokens": 512}
    return write_config(folder, values)


def check_stopped(folder: Path, said: str) -> None:
    step = records(folder / "run")[-1]["step"]
    assert find_checkpoint(folder / "run").name == f"step-{step:08d}"
    assert f"stopped by a signal after step {step}" in said


def test_signal_saves_and_exits_with_the_requeue_code(tiny_corpus, tmp_path):
    process = Command("train.py", endless(tiny_corpus, tmp_path))
    metrics = tmp_path / "run/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    check_stopped(tmp_path, finish(process, REQUEUE_EXIT_CODE))


@pytest.mark.long
def test_closed_terminal_stops_a_run_after_a_checkpoint(tiny_corpus, tmp_path):
    """As an ended ssh does: a signal, and a terminal that takes no more lines nor the bar."""
    config = endless(tiny_corpus, tmp_path)
    process, terminal = pty.fork()
    if process == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup before the tests had ignored
        os.chdir(REPOSITORY)
        os.execv(sys.executable, [sys.executable, "train.py", str(config)])
    log, shown = tmp_path / "run/train.log", b""
    while not (log.exists() and "step 3/" in log.read_text()):
        shown += os.read(terminal, 2**16)  # ends where the run does
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == REQUEUE_EXIT_CODE, shown
    check_stopped(tmp_path, log.read_text())


# What is started, and the variables of each of its tasks.
PORT = 20_000 + os.getpid() % 20_000
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(PORT + 2)}
SRUN |= {"SLURM_STEP_NODELIST": "127.0.0.1"}
LAUNCHERS = {
    "torchrun": ([BIN / "torchrun", "--nproc-per-node=2", f"--master-port={PORT}"], {}),
    "deepspeed": (
        [BIN / "deepspeed", "--num_gpus=2", f"--master_port={PORT + 1}"],
        {"DS_ACCELERATOR": "cpu"},
    ),
    "torchrun, one": ([BIN / "torchrun", "--standalone", "--nproc-per-node=1"], {}),
}


@pytest.mark.parametrize(
    "launchers",
    [
        pytest.param(["torchrun"], marks=pytest.mark.long),
        pytest.param(["deepspeed", "torchrun, one"], marks=pytest.mark.nightly),
    ],
)
def test_every_launcher_trains_the_same(launchers, tiny_corpus, tmp_path):
    """Two ranks each have equal losses, and one rank has nearly theirs."""
    configs = {}
    for name in ("alone", "srun", *launchers):
        (tmp_path / name).mkdir()
        values = run_values(tiny_corpus, tmp_path / name / "run", max_steps=4)
        values["model"]["hidden_dropout"] = 0.0  # or one rank would draw another mask than two
        configs[name] = write_config(tmp_path / name, values)
    ranks = ({"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2))
    tasks = [Command("train.py", configs["srun"], **SRUN, **rank) for rank in ranks]
    for task in [*tasks, Command("train.py", configs["alone"])]:
        finish(task)
    for name in launchers:
        words, variables = LAUNCHERS[name]
        end(start(*words, "train.py", configs[name], **variables))
    alone, expected = losses(tmp_path / "alone/run"), losses(tmp_path / "srun/run")
    assert len(expected) == 5
    for one, two in zip(alone, expected, strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    for name in launchers:
        assert losses(tmp_path / name / "run") == (alone if "one" in name else expected), name


@pytest.mark.long
def test_run_starts_without_a_compiler(tiny_corpus, tmp_path):
    """DeepSpeed must not try to build an operator: no compiler on PATH, an empty build cache."""
    config = write_config(tmp_path, run_values(tiny_corpus, tmp_path / "run", max_steps=3))
    given = {"PATH": str(tmp_path), "CXX": "/nonexistent/c++"}
    given["TORCH_EXTENSIONS_DIR"] = str(tmp_path / "extensions")
    assert "finished: 3 steps" in end(start(sys.executable, "train.py", config, **given))
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
def test_wrong_input_ends_with_code_2(tiny_corpus, tmp_path, overrides, part):
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


def test_too_many_bad_steps_stop_a_run(tiny_corpus, tmp_path):
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
