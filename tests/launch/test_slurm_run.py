"""launch.slurm run: one job that runs any command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.slurm import cluster, torchrun
from launch.slurm.folder import RunFolder, read_record
from tests.launch.places import copied

ZERO_SHOT = ("python", "-m", "eval.zero_shot")
ODD = ["a b", "it's", '"$HOME" `x` \\', "two\nlines", "", "*", "--", "~", "--wait", "é", "x" * 5000]


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    return place


def jobs(place) -> Path:
    return place.folder / "runs" / "jobs"


def test_command_arrives_exactly(here):
    """It is seen with srun replaced by one that shows its words, and leaves with their code."""
    code, out, err = here("run", "--env", "A=1 2", "--time", 5, "--", *ZERO_SHOT, *ODD)
    assert (code, err) == (0, "")
    folder = RunFolder(jobs(here) / "eval.zero_shot-1")
    assert out == (
        f"submitted job 41: eval.zero_shot-1\nscript {folder.script}\nlog    {folder.log}\n"
    )
    assert here.calls.read_text().splitlines() == [
        "sbatch --test-only",
        f"sbatch --parsable {folder.script}",
    ]
    assert copied(folder) == {"cat_lm/a.py", "train.py"}
    srun = here.folder / "bin" / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\0" "$PWD" "$A" "$PYTHONPATH" "$@"; exit 2')
    srun.chmod(0o755)
    job = {"PATH": os.environ["PATH"], "HOME": "/nowhere"}
    done = subprocess.run(["bash", folder.script], capture_output=True, cwd="/", env=job)
    assert done.returncode == 2 and done.stderr == b""
    words = done.stdout.decode().split("\0")[:-1]
    assert words[:3] == [str(here.folder), "1 2", str(folder.code)]
    assert words[3:] == ["--ntasks=1", "--export=ALL", sys.executable, *ZERO_SHOT[1:], *ODD]
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", folder.script], check=True)


def test_names_are_new_or_given_and_have_one_job(here):
    for name in ("eval.zero_shot-1", "eval.zero_shot-2"):
        assert f": {name}\n" in here("run", "--", *ZERO_SHOT)[1]
    assert ": echo-1\n" in here("run", "--", "/bin/echo", "-m")[1]
    for job in ("41", "42"):
        here.monkeypatch.setenv("JOB_ID", job)
        here("run", "--name", "mine", "--", "echo", job)
    folder = RunFolder(jobs(here) / "mine")
    assert read_record(folder).job_ids == ["41", "42"]
    assert read_record(folder).program == ["echo", "42"]
    here.queued("42", folder.script, "RUNNING")
    here.calls.unlink()
    err = here.fails("run", "--name", "mine", "--", "echo")
    assert "job 42 of this run is running" in err and f"cancel {folder.run}`" in err


def test_status_and_cancel_take_a_command(here):
    here("run", "--", "echo", "a b")
    run = jobs(here) / "echo-1"
    here.monkeypatch.setenv("JOB_SHOWN", "JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0")
    out = here("status", run, "--json", here.folder / "status.json")[1]
    shown = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    assert shown == {
        "run": str(run),
        "job": "41: failed (NonZeroExitCode), exit code 3",
        "nodes": "n[0-1]",
        "command": "echo 'a b'",
        "log": str(run / "slurm" / "job.log"),
    }
    found = json.loads((here.folder / "status.json").read_text())
    assert (found["command"], found["exit_code"]) == ("echo 'a b'", 3)
    row = here("status", run, run)[1].splitlines()[1]
    assert row.split()[:2] == ["41", "failed"] and row.endswith(str(run))
    here.queued("41", run / "slurm" / "job.sbatch")
    assert "cancelled job 41" in here("cancel", run)[1]
    here.calls.unlink()
    assert "submit it by `run` again" in here.fails("resume", run)


@pytest.mark.parametrize(
    ("shown", "code", "says"),
    [
        ("JobState=COMPLETED ExitCode=0:0", 0, ""),
        ("JobState=FAILED ExitCode=2:0", 2, "failed, exit code 2"),
        ("JobState=TIMEOUT ExitCode=0:15", 143, "timeout, exit code 143"),
        ("JobState=CANCELLED ExitCode=0:0", 1, "cancelled, exit code 1"),
        (None, 1, "SLURM has forgotten how it ended"),
    ],
)
def test_wait_leaves_with_the_jobs_code(here, monkeypatch, shown, code, says):
    """While the job is listed it goes on, also where SLURM does not answer for a while."""
    log = jobs(here) / "mine" / "slurm" / "job.log"
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            here.queued("41", log.with_name("job.sbatch"), "RUNNING")
            squeue.write_text("#!/bin/bash\necho Unable to contact slurm controller >&2; exit 1\n")
        elif len(pauses) == 2:
            squeue.write_text(works)
        else:
            here.queue.unlink()
            log.write_text("".join(f"line {number}\n" for number in range(30)))
            monkeypatch.setenv(*(("JOB_SHOWN", shown) if shown else ("JOB_IS_GONE", "1")))

    squeue = here.folder / "bin" / "squeue"
    works = squeue.read_text()
    monkeypatch.setattr(cluster, "time", SimpleNamespace(sleep=sleep))
    real = cluster.submit

    def submit(script: Path) -> str:
        here.queued("41", script)
        return real(script)

    monkeypatch.setattr(cluster, "submit", submit)
    found, _, err = here("run", "--name", "mine", "--wait", "--", "echo")
    assert found == code and pauses == [1, 2, 4]
    first, *rest = err.splitlines()
    assert "Unable to contact slurm controller" in first and "still waiting for job 41" in first
    assert (
        (says in rest[0] and rest[1:] == [f"line {n}" for n in range(10, 30)]) if code else not rest
    )


@pytest.mark.parametrize(
    ("options", "site", "lines"),
    [
        ("", "", []),
        ("--cpus-per-task 6", "", ["--cpus-per-task=6"]),
        ("--gpus-per-node 4", "", ["--gpus-per-node=4", "--cpus-per-task=32"]),
        (
            "--gpus-per-node 4",
            "cpus_per_task: 12\ngpu_request: gres",
            ["--gres=gpu:4", "--cpus-per-task=48"],
        ),
        (
            "--gpus-per-node 4",
            "sbatch: [--cpus-per-gpu=3]",
            ["--gpus-per-node=4", "--cpus-per-gpu=3"],
        ),
    ],
)
def test_one_task_has_the_gpus_and_their_cores(here, options, site, lines):
    path = here.folder / "site.yaml"
    path.write_text(f"{site}\n")
    code, out, err = here("run", "--site", path, *options.split(), "--print", "--", "echo")
    assert (code, err) == (0, "") and not jobs(here).exists()
    assert re.findall(r"^#SBATCH (--(?:gpus|gres|cpus).*)$", out, re.M) == lines
    assert "--nodes=1\n" in out and "--ntasks-per-node=1\n" in out


def test_site_brings_interpreter_container_and_programs(here):
    path, data = here.folder / "site.yaml", here.folder.parent / f"{here.folder.name} data"
    path.write_text("python: /env/bin/python\ncontainer: image\nsetup: [module load x]\n")
    data.mkdir()
    words = ("torchrun", "--nproc-per-node", 2, "train.py", f"data.path={data}")
    code, out, err = here("run", "--site", path, "--env", "A=1", "--print", "--", *words)
    assert (code, err) == (0, "")
    assert "command=(\n    /env/bin/python\n    -c\n" in out and torchrun.START in out
    run = jobs(here) / "torchrun-1"
    mounts = ",".join(f"{place}:{place}" for place in (run / "slurm", data, here.folder))
    assert f"    '--container-mounts={mounts}'\n" in out
    assert "--container-env=PYTHONPATH,PYTHONSAFEPATH,PYTHONUNBUFFERED,A'\n" in out
    assert here("run", "--site", path, "--print", "--", "of-the-module")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "run: give a command after --, such as `-- python -m eval.zero_shot MODEL`"),
        (["--name", "a", *ZERO_SHOT], "run: give a command after --"),
        (["--gpus-per-node", 8, "--"], "run: give a command after --"),
        (["--", "nope", "x"], "run: 'nope' is no program here; give a command after --"),
        (["--", "", "x"], "run: '' is no program here"),
        (["--name", "a/b", "--", "echo"], "--name: 'a/b' must be letters, digits"),
        (["--name", "..", "--", "echo"], "--name: '..' must be"),
        (["--wiat", "--", "echo"], "did you mean --wait?"),
        (["--time", "soon", "--", "echo"], "--time soon: must be minutes"),
        (["extra", "--", "echo"], "unrecognized arguments: extra"),
    ],
)
def test_bad_input_is_one_line(here, arguments, says):
    err = here.fails("run", *arguments)
    assert says in err and err.count("\n") == 1
    assert not jobs(here).exists()
