"""The test cluster by hand, data preparation on both nodes, and launch/README.md's commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from cat_lm.training.checkpoint import complete_checkpoints
from tests.conftest import REPOSITORY, generated_text, write_jsonl
from tests.prepared_data import digests
from tests.readme import blocks, user_checkout
from tests.runs import records
from tests.slurm.cluster import NODES, Cluster, environments, wait_for
from tests.slurm.jobs import OF_A_USER, Job

pytestmark = pytest.mark.slurm


def processes_of(configuration: str) -> list[int]:
    return [
        process
        for process, environment in environments()
        if environment.get("SLURM_CONF") == configuration and process != os.getpid()
    ]


@pytest.mark.long
def test_by_hand_until_ctrl_c(cluster: Cluster, tmp_path: Path):
    """`python -m tests.slurm.cluster` while a job of two nodes runs on it."""
    by_hand = subprocess.Popen(
        [sys.executable, "-m", "tests.slurm.cluster"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    configuration = by_hand.stdout.readline().strip().removeprefix("export SLURM_CONF=")
    assert configuration != cluster.environment["SLURM_CONF"]
    subprocess.run(
        ["sbatch", "--nodes=2", "--wrap=srun sh -c 'touch $SLURMD_NODENAME; sleep 1000'"],
        env={**os.environ, "SLURM_CONF": configuration},
        cwd=tmp_path,
        check=True,
    )
    wait_for(lambda: all((tmp_path / node).exists() for node in NODES), "a task on each node")
    assert len(processes_of(configuration)) > 6
    by_hand.send_signal(signal.SIGINT)
    assert by_hand.wait(timeout=60) == 0
    assert processes_of(configuration) == [] and not Path(configuration).parent.exists()
    assert set(cluster.node_states().values()) == {"idle"}


def test_preparation_by_an_array_has_the_bytes_of_one_machine(
    cluster: Cluster, prepare: Callable[..., Path], tmp_path: Path
):
    source = tmp_path / "source"
    source.mkdir()
    for seed in range(5):
        write_jsonl(source / f"{seed}.jsonl", generated_text(100, seed))
    flags = ("--source", "files", "--path", source, "--tokenizer", "bytes", "--shard-tokens", 20000)
    local = prepare(tmp_path / "local", *flags, "--workers", 1)

    out = tmp_path / "cluster"
    command = ("prepare", "--tasks", 2, "--time", 10, "--", *flags, "--out", out)
    done = subprocess.run(
        [sys.executable, "-m", "launch.slurm", *map(str, command)],
        cwd=REPOSITORY,
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    jobs = re.findall(r"job (\d+)", done.stdout)
    assert len(jobs) == 2
    queue = ("squeue", "--noheader", f"--jobs={','.join(jobs)}")
    wait_for(lambda: not cluster.run(*queue).strip(), "end of the jobs", 300)
    logs = {path.name: path.read_text() for path in (tmp_path / "cluster.slurm").glob("*.log")}
    assert sorted(logs) == ["assemble.log", "encode-0.log", "encode-1.log"], logs
    assert digests(out) == digests(local), logs
    assert len(json.loads((out / "manifest.json").read_text())["splits"]["train"]["shards"]) > 1


def test_command_runs_as_a_job_with_its_words_and_exit_code(cluster: Cluster, tmp_path: Path):
    """Also with shell variables that sbatch alone would prefer to the script."""
    words = ["a b", "it's", '"$HOME" `x` \\', "two\nlines", "", "*", "--", "é"]

    def launch(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "launch.slurm", *command],
            cwd=tmp_path,
            env={**cluster.environment, **OF_A_USER, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
        )

    show = "import cat_lm, json, os, sys; print(json.dumps([cat_lm.__file__, *sys.argv[1:]]))"
    done = launch("run", "--name", "works", "--wait", "--", "python", "-c", show, *words)
    log = tmp_path / "runs/jobs/works/slurm/job.log"
    assert done.returncode == 0 and str(log) in done.stdout, done.stderr
    copy, *arrived = json.loads(log.read_text())
    assert arrived == words and Path(copy).is_relative_to(log.parent / "code")
    for code, program in ((2, ("torchrun", "--nproc-per-node", "2")), (75, ("python",))):
        fail = tmp_path / "fail.py"
        fail.write_text(f"import sys\nprint('bad input', flush=True)\nsys.exit({code})\n")
        words = ("run", "--name", f"fails{code}", "--wait", "--", *program, str(fail))
        done = launch(*words)
        assert done.returncode == code, done.stderr
        assert f"failed, exit code {code}; the end of " in done.stderr
        assert "\nbad input\n" in done.stderr
        log = tmp_path / f"runs/jobs/fails{code}/slurm/job.log"
        ranks = 2 if program[0] == "torchrun" else 1
        assert 1 <= log.read_text().count("bad input") <= ranks, "started again"
    table = launch("status", *(f"runs/jobs/{name}" for name in ("works", "fails2"))).stdout
    states = [line.split()[1] for line in table.splitlines()]
    assert states == ["state", "completed", "failed"], table


@pytest.mark.long
def test_commands_of_the_readme_run(cluster: Cluster, served: str, tmp_path: Path) -> None:
    folder = user_checkout(tmp_path)
    site = folder / "site.yaml"
    values = {"env": {"GLOO_SOCKET_IFNAME": "lo"}, "python": served}
    site.write_text(yaml.safe_dump(values), encoding="utf-8")
    job = Job(cluster, folder / "runs/two-nodes", site)

    def user(line: str) -> str:
        command = shlex.split(line)
        assert command[0] == "python"
        done = subprocess.run(
            [sys.executable, *command[1:]],
            cwd=folder,
            env={**cluster.environment, "CAT_LM_SITE": str(site)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    user(next(line for line in blocks("bash")[1].splitlines() if "data_prep.prepare" in line))
    submit, status, cancel, resume = "".join(
        blocks("bash-slurm", REPOSITORY / "launch/README.md")
    ).splitlines()
    assert "submitted job" in user(submit)
    first = job.id
    assert first in user(status)
    job.wait_for_step(2)
    assert "step" in user(status)
    assert f"cancelled job {first}" in user(cancel)
    job.wait_until_over()
    saved = complete_checkpoints(job.run / "checkpoints")
    before = saved[-1].name if saved else "none"
    assert "resumed job" in user(resume) and job.id != first
    job.wait_for_log(f"checkpoint {before}")
    job.wait_for_step(job.step + 1)
    assert records(job.run)[0]["step"] == 1  # the records go on in the same file
    user(cancel)
    job.wait_until_over()
