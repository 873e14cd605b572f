"""The batch script of launch.slurm: its text, and what it decides, with SLURM's commands replaced.

tests/guards compares whole scripts with golden ones.
"""

from __future__ import annotations

import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.slurm.folder import RunFolder
from launch.slurm.options import Options, Site
from launch.slurm.script import container_arguments, render

FOLDER = RunFolder(Path("/scratch/runs/cat-370m"))
ON_GPUS = Options(
    nodes=4,
    gpus_per_node=8,
    constraint="a100&nvlink",
    container="/images/cat_lm.sqsh",
    container_mounts="/datasets:/data:ro",
    env={"NCCL_DEBUG": "WARN", "NOTE": "two words"},
)
SITE = Site(setup=["module load cuda/12.8"], env={"NCCL_SOCKET_IFNAME": "ib0"})


def values(path: str = "/data/slimpajama", cache: str = "/scratch/cache") -> dict:
    data = {"path": path, "mixture": None, "cache_dir": cache}
    return {"data": data, "train": {"init_from": "/models/a"}}


TEXTS = {
    "gpus": render(FOLDER, ON_GPUS.with_site(SITE), SITE, values()),
    "cpus": render(FOLDER, Options(nodes=2, tasks_per_node=2, time="10"), Site(), values()),
}


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
@pytest.mark.parametrize("name", TEXTS)
def test_script_passes_shellcheck(name, tmp_path):
    (tmp_path / "job.sbatch").write_text(TEXTS[name])
    done = subprocess.run(["shellcheck", tmp_path / "job.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "site", "lines"),
    [
        ({"gpus_per_node": 8}, {}, ["--cpus-per-task=8"]),
        ({"gpus_per_node": 8, "cpus_per_task": 6}, {}, ["--cpus-per-task=6"]),
        ({"gpus_per_node": 8}, {"cpus_per_task": 5}, ["--cpus-per-task=5"]),
        ({"gpus_per_node": 8}, {"sbatch": ["--cpus-per-gpu=4"]}, ["--cpus-per-gpu=4"]),
        ({"tasks_per_node": 8}, {}, []),
    ],
)
def test_gpu_rank_gets_cores(options, site, lines):
    """One core, SLURM's own default, would be shared by four threads and more."""
    site = Site(**site)
    text = render(FOLDER, Options(**options).with_site(site), site, values())
    assert re.findall(r"^#SBATCH (--cpus-per.*)$", text, re.M) == lines


def test_container_gets_missing_mounts_and_all_variables():
    """Pyxis lets the image's values come before those of variables that it is not told of."""
    asked = Options(container="i", container_mounts="/scratch:/scratch,/store:/data:ro")
    needed = ["/scratch/runs/cat-370m", "/data/slimpajama", "/models/a", "/models/a/b"]
    mounts = container_arguments(asked, needed, "/code", [])[1]
    assert mounts == "--container-mounts=/scratch:/scratch,/store:/data:ro,/models/a:/models/a"
    text = TEXTS["gpus"]
    told = re.search(r"--container-env=([\w,]+)", text)[1].split(",")
    exported = set(re.findall(r"\bexport (\w+)=", text)) - {"SRUN_CPUS_PER_TASK"}  # srun's own
    assert sorted(told) == sorted({*exported, "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NOTE"})
    assert {"MASTER_ADDR", "OMP_NUM_THREADS"} <= exported


def test_values_that_a_shell_would_read_stay_text(tmp_path):
    run = tmp_path / "it's a $(touch x) 100% run"
    options = Options(nodes=1, env={"A": "$HOME `x` 'y'"})
    text = render(RunFolder(run), options, Site(python="my python"), values())
    assert f'#SBATCH --output="{run}/slurm/job.log"'.replace("100%", "100%%") in text
    head = text.partition("# ---- Below")[0] + 'echo "$run|$python|${environment[0]}"'
    done = subprocess.run(["bash", "-c", head], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == f"{run}|my python|A=$HOME `x` 'y'\n"
    assert not (tmp_path / "x").exists()


# What the script does. Each stub notes its arguments; srun also prints and exits as it is told.
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >>"$STUBS/calls"
"""
STUBS = {
    "srun": STUB
    + """
env >"$STUBS/environment"
ulimit -S -l >"$STUBS/locked"
if [ -n "${SRUN_WAITS:-}" ]; then
    if [ "$SRUN_WAITS" = busy ]; then trap 'echo ignored >>"$STUBS/signals"' USR1
    else trap 'echo USR1 >>"$STUBS/signals"; code=75' USR1; fi
    trap 'echo TERM >>"$STUBS/signals"; exit 137' TERM
    touch "$STUBS/waits"
    until [ -n "${code:-}" ] || grep -q "scontrol requeue" "$STUBS/calls"; do sleep 0.02; done
    exit "${code:-137}"
fi
printf '%b' "${SRUN_SAYS:-}" >&2
seq "${SRUN_LINES:-0}" >&2
exit "${SRUN_CODE:-0}"
""",
    "squeue": STUB
    + """
case "$*" in
    *%L*) echo "${TIME_LEFT:-UNLIMITED}" ;;
    *) echo "${JOB_STATE-RUNNING None}" ;;
esac
""",
    "scontrol": STUB
    + """
case "$*" in
    "show hostnames "*) printf 'n7\\nn8\\n' ;;
    "show node n7") echo "NodeName=n7 Arch=x86_64"; echo "   NodeAddr=10.0.0.7 NodeHostName=n7" ;;
    "show job 20123") echo "   Requeue=1 Restarts=${RESTARTS:-${SLURM_RESTART_COUNT:-0}}" ;;
    requeue*) if [ -n "${NO_REQUEUE:-}" ]; then echo "Requeue disabled" >&2; exit 1; fi ;;
esac
""",
}


class Job:
    """A rendered script run by bash, with stubs instead of SLURM."""

    def __init__(self, place: Path, cache: str = "/cache", **options: object) -> None:
        self.folder, self.stubs = RunFolder(place / "a run"), place / "stubs"
        self.folder.code.mkdir(parents=True)
        self.stubs.mkdir()
        for name, text in STUBS.items():
            (self.stubs / name).write_text(text, encoding="utf-8")
            (self.stubs / name).chmod(0o755)
        options = Options(nodes=2, env={"OF_RUN": "1 2"}, **options)
        site = Site(python="python", srun=["--mpi=none"])
        text = render(self.folder, options, site, values(cache=cache))
        self.folder.script.write_text(text, encoding="utf-8")

    def start(self, **environment: object) -> subprocess.Popen:
        (self.stubs / "calls").unlink(missing_ok=True)
        job = {"SLURM_JOB_ID": "20123", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_NTASKS": "2"}
        job |= {"SLURM_JOB_NUM_NODES": "2", "STUBS": str(self.stubs)}
        job |= {"PATH": f"{self.stubs}:{os.environ['PATH']}", "RANK": "5", "WORLD_SIZE": "9"}
        job |= {name: str(value) for name, value in environment.items()}
        with open(self.folder.log, "a", encoding="utf-8") as log:
            return subprocess.Popen(["bash", self.folder.script], stdout=log, stderr=log, env=job)

    def run(self, **environment: object) -> int:
        return self.start(**environment).wait(timeout=30)

    def said(self, name: str) -> str:
        """What a stub noted: calls, environment, signals, locked."""
        return (self.stubs / name).read_text(encoding="utf-8")

    @property
    def log(self) -> str:
        return self.folder.log.read_text(encoding="utf-8")

    @property
    def was_requeued(self) -> bool:
        return "scontrol requeue 20123\n" in self.said("calls")

    def checkpoint(self, step: int, complete: bool = True) -> None:
        folder = self.folder.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "complete.json").write_text("{}", encoding="utf-8")


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


@pytest.mark.parametrize(("restarts", "port"), [(0, 12000 + 123), (1, 12000 + 8042)])
def test_ranks_start_with_their_meeting_point_and_cores(job, restarts, port):
    """At another port each time: one that is taken by others must not end every attempt."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # A low limit of the shell that submits, or of slurmd, would come with the job.
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**16, hard))
    try:
        assert job.run(SLURM_CPUS_PER_TASK=6, SLURM_RESTART_COUNT=restarts) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    started = next(line for line in job.said("calls").splitlines() if line.startswith("srun"))
    assert started == (
        "srun --mpi=none --export=ALL --kill-on-bad-exit=1 --wait=60 "
        f"python -u train.py {job.folder.config} train.resume=auto"
    )
    environment = job.said("environment").splitlines()
    assert {
        *("MASTER_ADDR=10.0.0.7", f"MASTER_PORT={port}", "SRUN_CPUS_PER_TASK=6"),
        *("OMP_NUM_THREADS=6", "OF_RUN=1 2", f"PWD={job.folder.code}"),
    } <= set(environment)
    assert not [line for line in environment if line.startswith(("RANK=", "WORLD_SIZE="))]
    unlimited = hard == resource.RLIM_INFINITY
    assert job.said("locked").strip() == ("unlimited" if unlimited else str(hard // 1024))


@pytest.mark.parametrize(
    ("mounted", "made"), [(None, True), ("/x:/y", True), ("/cache:/cache", False)]
)
def test_cache_of_a_container_is_made_on_each_node_first(tmp_path, mounted, made):
    """Or it could not be mounted; within a mount that was asked for, the run makes it."""
    job = Job(tmp_path, "/cache/a b", container="image", container_mounts=mounted)
    assert job.run() == 0
    *first, training = (line for line in job.said("calls").splitlines() if line.startswith("srun"))
    making = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --mpi=none mkdir -p -- /cache/a b"
    assert first == ([making] if made else [])
    assert (":/cache/a b " in training) == made


@pytest.mark.parametrize(
    ("code", "state", "requeued", "says"),
    [
        (0, "RUNNING None", False, "finished"),
        (2, "RUNNING None", False, "wrong input"),
        (130, "RUNNING None", False, "interrupted"),
        (75, "RUNNING None", True, "stopped by a signal"),
        (76, "RUNNING None", True, "hung"),
        (137, "RUNNING None", True, "failed (exit code 137)"),
        (1, "", True, "failed (exit code 1)"),  # the controller does not answer
        (2, "COMPLETING NodeFail", False, "SLURM ends the job (COMPLETING NodeFail)"),
    ],
)
def test_exit_code_decides_about_a_requeue(job, code, state, requeued, says):
    assert job.run(SRUN_CODE=code, JOB_STATE=state) == code
    assert job.was_requeued == requeued
    assert says in job.log and ("wrong input" in job.log) == (says == "wrong input")


@pytest.mark.parametrize(
    ("says", "code", "expected"),
    [
        ("n0: task 0: Exited with exit code 2\\nsrun: error: n1: task 1: Terminated", 143, 2),
        ("n1: tasks 1,3-4: Exited with exit code 2\\nsrun: error: n0: task 0: Killed", 137, 2),
        # The rank that died first is the reason, not what the others made of it.
        ("n1: task 1: Killed\\nsrun: error: n0: task 0: Exited with exit code 2", 2, 1),
        ("n1: task 1: Exited with exit code 76\\nsrun: error: n0: task 0: Killed", 137, 76),
        ("Unable to create step for job 5: Requested nodes are busy", 1, 1),
    ],
)
def test_first_rank_to_fail_decides(job, says, code, expected):
    # An earlier attempt's messages stand in the same log.
    job.folder.log.write_text("srun: error: n0: task 0: Exited with exit code 130\n")
    assert job.run(SRUN_CODE=code, SRUN_SAYS=f"bar 5%\\rsrun: error: {says}\\n") == expected
    assert job.was_requeued == (expected != 2)


def test_crash_loop_ends(job):
    """Three attempts from the same checkpoint, no fourth; progress and people reset the count."""
    job.checkpoint(100)
    job.checkpoint(150, complete=False)
    job.checkpoint(175)
    aside = job.folder.checkpoints / "step-00000175"
    aside.rename(aside.with_name("step-00000175.aside"))
    job.run(SRUN_CODE=1)
    job.folder.begin_attempt("local", 1)  # `local` writes the file that the script reads
    job.run(SRUN_CODE=1, SLURM_RESTART_COUNT=2)
    assert job.folder.attempts_without_progress() == 3
    assert job.run(SLURM_RESTART_COUNT=3) == 2
    assert "srun" not in job.said("calls") and not job.was_requeued
    assert "3 attempts in a row began at checkpoint step-00000100" in job.log
    job.checkpoint(200)
    assert job.folder.attempts_without_progress() == 0
    for _ in range(3):
        assert job.run(SRUN_CODE=1) == 1
    assert job.run() == 2
    job.folder.reset_attempts("resumed")
    assert job.run() == 0 and len(job.folder.attempt_lines()) == 7


def test_what_slurm_ends_is_no_crash_loop(job):
    for _ in range(4):
        assert job.run(SRUN_CODE=75, JOB_STATE="COMPLETING Preempted") == 75
    assert job.run() == 0 and len(job.folder.attempt_lines()) == 5


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "state", "requeued"),
    [
        (signal.SIGUSR1, "RUNNING None", True),
        (signal.SIGTERM, "RUNNING None", True),  # a site that warns the shell so
        (signal.SIGTERM, "COMPLETING None", False),  # scancel, or SLURM requeues it itself
        (signal.SIGTERM, "", False),
    ],
)
def test_signals_reach_the_ranks_and_the_shell_lives_on(job, number, state, requeued):
    process = job.start(SRUN_WAITS="1", JOB_STATE=state)
    wait_for(job.stubs / "waits")
    process.send_signal(number)
    assert process.wait(timeout=30) == 75
    # srun would kill the ranks on TERM.
    assert set(job.said("signals").split()) == {"USR1"}
    assert job.was_requeued == requeued
    assert ("not requeued from here" in job.log) == (not requeued)


def test_busy_ranks_are_not_waited_for_at_the_time_limit(job):
    """SLURM kills the shell, too, some seconds after the limit: it must have requeued by then."""
    process = job.start(SRUN_WAITS="busy", JOB_STATE="COMPLETING TimeLimit")
    wait_for(job.stubs / "waits")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 137
    assert job.said("calls").count("scontrol requeue 20123\n") == 1
    assert "ignored" in job.said("signals")


@pytest.mark.parametrize(
    ("left", "starts"),
    [("6:40", True), ("6:39", False), ("2:00:00", True), ("1-00:00:00", True), ("08", False)],
)
def test_limit_that_the_lead_fills_starts_nothing(job, left, starts):
    """Or each start would end after one step, and the job would be requeued for ever."""
    assert job.run(TIME_LEFT=left) == (0 if starts else 2)
    assert ("srun " in job.said("calls")) == starts and not job.was_requeued
    assert starts or "told to stop 300 s before it: not started" in job.log


@pytest.mark.parametrize(("holder", "code"), [("20999", 2), ("20123", 0)])
def test_one_job_at_a_time(job, holder, code):
    """But for an earlier start of the same job, on a node that was lost."""
    with open(job.folder.slurm / ".lock", "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(f"{holder}\n")
        stream.flush()
        assert job.run() == code
    assert (job.stubs / "calls").exists() == job.folder.attempts.exists() == (code == 0)
    assert ("at work on this run: not started" in job.log) == (code == 2)
    assert job.run() == 0


@pytest.mark.parametrize("lines", [0, 300_000])  # more than a pipe holds
def test_run_held_by_an_earlier_start_is_tried_again(job, lines):
    held = "error: train.output_dir=/r: another process trains in it\n"
    found = {"SRUN_CODE": 2, "SRUN_SAYS": held, "SRUN_LINES": lines}
    assert job.run(**found, SLURM_RESTART_COUNT=1) == 1
    assert job.was_requeued
    assert job.run(**found) == 2
    assert not job.was_requeued


def test_old_start_does_not_requeue_a_new_one(job):
    """On a lost node a script lives on; SLURM has started the job on others meanwhile."""
    assert job.run(SRUN_CODE=1, SLURM_RESTART_COUNT=2, RESTARTS=3) == 1
    assert not job.was_requeued and "started the job again meanwhile" in job.log
    assert job.run(SRUN_CODE=1, SLURM_RESTART_COUNT=3, RESTARTS=3) == 1
    assert job.was_requeued


def test_job_that_cannot_go_on_says_how(job):
    assert job.run(SRUN_CODE=75, NO_REQUEUE=1) == 75
    assert "Requeue disabled" in job.log and f"resume '{job.folder.run}'" in job.log
    shutil.rmtree(job.folder.code)
    assert job.run() == 2
    assert not (job.stubs / "calls").exists()
