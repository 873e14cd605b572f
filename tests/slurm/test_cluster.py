"""The test cluster leaves nothing behind, and is usable by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.slurm.cluster import NODES, Cluster, environments, wait_for

pytestmark = pytest.mark.slurm


def processes_of(configuration: str) -> list[int]:
    return [
        process
        for process, environment in environments()
        if environment.get("SLURM_CONF") == configuration and process != os.getpid()
    ]


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


def test_down_after_an_error(cluster: Cluster):
    with pytest.raises(RuntimeError, match="of a test"), Cluster() as other:
        configuration = other.environment["SLURM_CONF"]
        raise RuntimeError("of a test")
    assert processes_of(configuration) == [] and not other.folder.exists()
