"""Data preparation by jobs on both nodes: the bytes that one machine writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, generated_text, write_jsonl
from tests.prepared_data import digests
from tests.slurm.cluster import Cluster, wait_for

pytestmark = pytest.mark.slurm


def test_array_of_tasks(cluster: Cluster, prepare: Callable[..., Path], tmp_path: Path):
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
