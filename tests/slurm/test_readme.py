"""The section on a cluster of launch/README.md, word by word, on the cluster of two nodes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cat_lm.training.checkpoint import complete_checkpoints
from tests.conftest import REPOSITORY
from tests.readme import blocks, user_checkout
from tests.runs import records
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job

pytestmark = pytest.mark.slurm


@pytest.mark.long
def test_commands_of_the_readme(cluster: Cluster, served: str, tmp_path: Path) -> None:
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
