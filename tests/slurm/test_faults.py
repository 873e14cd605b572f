"""What clusters do to a run of two nodes; each time it ends with the losses of a straight run.

Ranks are interpreters where they are stopped, killed with what is above them, or hear SLURM's own
signals; else, and at later starts of such jobs, forked (tests/served.py): imports are nearly all
that a start takes.

Continuous integration tries six of these, and nightly runs all of them.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import losses, run_values, write_config
from tests.slurm.cluster import Cluster, kill, wait_for
from tests.slurm.jobs import Job

pytestmark = pytest.mark.slurm

STEPS = 120
FAULT = 25  # the step after which a fault comes: two checkpoints lie before it


def values(data: Path, run: Path, **train: object) -> dict:
    """Some seconds of training, long enough for a fault to come before its end."""
    result = run_values(data, run, max_steps=STEPS, **train)
    result["validation"] = {"every_steps": STEPS // 2, "max_tokens": 512}
    result["checkpoint"] = {"every_steps": 10, "keep_last": 2}
    return result


def train(ranks, run: dict) -> int:
    from train import Trainer

    with opened(Trainer, ranks, run) as trainer:
        return trainer.run()


@pytest.fixture(scope="module")
def straight(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple]:
    """The losses of the same configuration on two ranks without SLURM."""
    run = tmp_path_factory.mktemp("straight") / "run"
    assert run_on_ranks(train, 2, values(tiny_corpus, run)) == [0, 0]
    assert len(losses(run)) == STEPS + 2
    return losses(run)


@pytest.fixture(scope="module")
def first_real(served: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A `python` for ranks that are interpreters at a job's first start, and forked later."""
    python = tmp_path_factory.mktemp("first-real") / "python"
    python.write_text(f"""#!/bin/sh
if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then exec {sys.executable} "$@"; fi
exec {served} "$@"
""")
    python.chmod(0o755)
    return str(python)


@pytest.fixture(scope="module")
def submit(
    cluster: Cluster, served: str, tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Job]]:
    """Submits a run of two nodes: submit(option, …, key of train=value, …) -> Job."""
    jobs = []

    def run(
        *arguments: object, python: object = served, data: Path | None = None, **train: object
    ) -> Job:
        folder = tmp_path_factory.mktemp("job")
        job = Job(cluster, folder / "run", folder / "site.yaml")
        write_site(job, python)
        config = write_config(folder, values(data or tiny_corpus, job.run, **train))
        said = job.launch("submit", config, "--nodes", 2, *arguments)
        jobs.append(job)
        assert job.id in said and str(job.run / "slurm/job.log") in said
        return job

    yield run
    for job in jobs:
        cluster.run("scancel", "--quiet", job.id)


def write_site(job: Job, python: object) -> None:
    values = {"time": "10", "env": {"GLOO_SOCKET_IFNAME": "lo"}, "python": str(python)}
    job.site.write_text(yaml.safe_dump(values), encoding="utf-8")


def check_finished(job: Job, straight: list[tuple], restarts: int, attempts: int = 0) -> None:
    """The job ends well after so many restarts, with nothing lost and nothing done twice."""
    job.wait_until_over()
    shown = job.shown()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    assert shown["Restarts"] == str(restarts), job.log
    assert len(job.attempts) == (attempts or restarts + 1)
    # Appended, never truncated: every start is in the log.
    for restart in range(restarts + 1):
        assert f"job {job.id}: restart {restart} " in job.log
    assert f"finished: {STEPS} steps" in job.log
    assert job.losses == straight


def check_not_requeued(job: Job, state: str) -> None:
    job.wait_until_over()
    assert job.state == state, job.log
    assert job.shown()["Restarts"] == "0" and len(job.attempts) == 1


# Jobs in which something waits for long. Other tests run meanwhile; see `waiting`.


@pytest.fixture(scope="module")
def limited(submit, first_real) -> Job:
    """A job whose ranks stand still until, near the time limit, SLURM's signal wakes them.

    It comes 90 to 120 s after the start: SLURM looks at limits every 30 s, and is never late.
    """
    job = submit("--lead-seconds", 180, python=first_real)
    job.wait_for_step(FAULT)
    job.signal_ranks(signal.SIGSTOP)
    job.scontrol("update", f"JobId={job.id}", "TimeLimit=5")
    return job


@pytest.fixture(scope="module")
def hung(submit, first_real) -> Job:
    """A job of which one rank stands still."""
    job = submit("--max-restarts", 9, python=first_real, hang_minutes=1)
    job.wait_for_step(FAULT)
    job.signal_ranks(signal.SIGSTOP, 1)
    return job


@pytest.fixture(scope="module")
def orphaned(submit, first_real) -> Job:
    """A job of which one rank ended by itself: SLURM's daemon above it was killed."""
    job = submit(python=first_real)
    job.wait_for_step(FAULT)
    rank = job.ranks()[1]
    daemon = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"slurmstepd" in Path(f"/proc/{daemon}/cmdline").read_bytes()
    kill(daemon, signal.SIGKILL)
    wait_for(lambda: rank not in job.ranks().values(), "end of the orphaned rank")
    return job


@pytest.fixture(scope="module")
def busy(submit, served, tmp_path_factory) -> Job:
    """A job whose ranks, at its first start, do nothing and hear no signal but KILL.

    At the second they have the time that training takes.
    """
    python = tmp_path_factory.mktemp("busy") / "python"
    python.write_text(f"""#!/bin/sh
if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then
    trap '' USR1 TERM
    exec sleep 1000
fi
scontrol update JobId="$SLURM_JOB_ID" TimeLimit=10
exec {served} "$@"
""")
    python.chmod(0o755)
    return submit("--time", 1, "--lead-seconds", 20, python=python)


@pytest.fixture(scope="module", autouse=True)
def waiting(request) -> None:
    """Start those of these jobs that the chosen tests look at."""
    chosen = [item for item in request.session.items if item.path == request.path]
    asked = {name for item in chosen for name in item.fixturenames}
    for name in ("limited", "hung", "busy", "orphaned"):
        if name in asked:
            request.getfixturevalue(name)


@pytest.mark.nightly
def test_uninterrupted(submit, straight):
    check_finished(submit(python=sys.executable), straight, restarts=0)


@pytest.mark.parametrize(
    ("faults", "python"),
    [
        ([(signal.SIGUSR1, 1), (signal.SIGKILL, 0)], "served"),
        pytest.param(
            *([(signal.SIGKILL, 1), (signal.SIGTERM, 0)], "first_real"), marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rank_is_signalled_or_killed(faults, python, submit, straight, request):
    """All ranks stop after the same step, or end; the job requeues itself, each time."""
    job = submit(python=request.getfixturevalue(python))
    for restart, (number, rank) in enumerate(faults):
        job.wait_for_log(f" restart {restart} ")
        job.wait_for_step(FAULT * (1 + restart))
        job.signal_ranks(number, rank)
        job.wait_for_log(f" restart {restart + 1} ")
    stops = [int(step) for step in re.findall(r"stopped by a signal after step (\d+)", job.log)]
    starts = [int(line.rpartition("-")[2]) for line in job.attempts[1:]]
    caught = next(i for i, (number, _) in enumerate(faults) if number != signal.SIGKILL)
    assert len(starts) == 2 and stops == [starts[caught]]
    assert "Exited with exit code 75" in job.log
    check_finished(job, straight, restarts=2)


@pytest.mark.long
def test_scancel_and_resume(submit, served, straight):
    job = submit(python=sys.executable)
    job.wait_for_step(FAULT)
    job.launch("cancel", job.run)
    check_not_requeued(job, "CANCELLED")
    cancelled = job.id
    write_site(job, served)
    said = job.launch("resume", job.run)
    assert job.id != cancelled and job.id in said
    check_finished(job, straight, restarts=0, attempts=2)
    assert f"job {cancelled}: restart 0 " in job.log


@pytest.mark.nightly
def test_scontrol_requeue(submit, straight):
    job = submit()
    job.wait_for_step(FAULT)
    job.scontrol("requeue", job.id)
    check_finished(job, straight, restarts=1)


@pytest.mark.long
def test_crash_loop(submit, served, straight, tmp_path):
    """A run that dies at each start is given up; mended and resumed, it goes on."""
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\necho cannot work >&2\nexit 1\n")
    crash.chmod(0o755)
    job = submit("--max-restarts", 2, python=crash)
    job.wait_until_over()
    shown = job.shown()
    assert (shown["JobState"], shown["ExitCode"], shown["Restarts"]) == ("FAILED", "2:0", "2")
    assert len(job.attempts) == 2 and job.log.count("cannot work") >= 2  # the first kills the other
    assert "no progress: 2 attempts in a row began at checkpoint none" in job.log
    write_site(job, served)
    job.launch("resume", job.run)
    check_finished(job, straight, restarts=0, attempts=3)


def test_bad_input(submit, tmp_path):
    job = submit(data=tmp_path)
    check_not_requeued(job, "FAILED")
    assert job.shown()["ExitCode"] == "2:0"
    assert "error: " in job.log and str(tmp_path) in job.log and "not requeued" in job.log


@pytest.mark.long
def test_time_limit(limited, straight):
    """SLURM's own signal before the limit reaches the ranks; the job requeues itself."""
    limited.wait_for_log("stopped by a signal after step")
    check_finished(limited, straight, restarts=1)


@pytest.mark.nightly
def test_time_limit_of_busy_ranks(busy, straight):
    """They are in the middle of something long; the job goes on all the same."""
    busy.wait_for_log("the time limit: requeued")
    check_finished(busy, straight, restarts=1)


@pytest.mark.nightly
def test_hung_rank(hung, straight):
    """The rank that waits for it ends the job with code 76 and says where it waits."""
    hung.wait_for_log("Exited with exit code 76")
    assert re.search(r"rank 0 on \S+: no progress for 1\.\d minutes after step", hung.log)
    check_finished(hung, straight, restarts=1)
    assert "hung (exit code 76" in hung.log


@pytest.mark.nightly
def test_step_daemon_killed(orphaned, straight):
    """Its rank, whose output ended there, saves and ends; srun gives it up a minute later."""
    assert "stopped by a signal after step" in orphaned.log
    check_finished(orphaned, straight, restarts=1)


# Last: what happens to a node happens to all jobs on it.


@pytest.mark.nightly
def test_node_set_down(submit, straight, cluster):
    job = submit()
    job.wait_for_step(FAULT)
    cluster.run("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test")
    job.wait_for_state("PENDING")
    cluster.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    check_finished(job, straight, restarts=1)


@pytest.mark.parametrize(
    "node",
    [pytest.param("n0", marks=pytest.mark.long), pytest.param("n1", marks=pytest.mark.nightly)],
)
def test_node_daemon_killed(node, submit, first_real, straight, cluster):
    """The node is lost; its rank lives on, and is in nobody's way when the node is back.

    On the first node so do the batch script, and the lock on the run's folder.
    """
    job = submit(python=first_real)
    job.wait_for_step(FAULT)
    job.signal_ranks(signal.SIGSTOP)
    cluster.kill_node(node)
    job.wait_for_state("PENDING")
    cluster.start_node(node)
    check_finished(job, straight, restarts=1)
    assert not job.ranks()
