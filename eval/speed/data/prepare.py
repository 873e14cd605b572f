"""Time `data_prep.prepare` as a whole, and how its speed grows with workers.

Each run is the command in a process of its own, as users run it: reading, encoding, writing,
checksums. A second, tiny run shows what starting costs whatever the text; the speed is that of the
text which the large run has more, in the time which it takes longer.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cat_lm.errors import UserError
from eval.speed.data.text import documents, write_files
from eval.speed.machine import without_home
from eval.speed.progress import say

FILES = 16  # the units of work: many enough that no worker waits long for the last
TINY_SHARE = 64


def prepare_speed(
    path: str | None, limit: int, spec: str, workers: Sequence[int], scratch: Path
) -> dict[str, Any]:
    """Prepares `limit` bytes of text with each number of workers."""
    texts = documents(path, limit)
    large = write_files(texts, limit, FILES, scratch / "large")
    tiny = write_files(texts, limit // TINY_SHARE, FILES, scratch / "tiny")
    runs: list[dict[str, Any]] = []
    for count in workers:
        say(f"prepare {large / 1e6:.0f} MB with {count} workers")
        start = _run(scratch / "tiny", spec, count, scratch)
        whole = _run(scratch / "large", spec, count, scratch)
        seconds = max(whole["seconds"] - start["seconds"], 1e-9)
        rate = (large - tiny) / seconds
        runs.append(
            {
                "workers": count,
                "bytes_per_second": rate,
                "bytes_per_second_and_worker": rate / count,
                "times_as_fast": rate / runs[0]["bytes_per_second"] if runs else 1.0,
                "cores_used": (whole["cpu_seconds"] - start["cpu_seconds"]) / seconds,
                "whole_run": whole,
                "tiny_run": start,
            }
        )
    return {
        "tokenizer": without_home(spec),
        "files": FILES,
        "bytes": large,
        "tiny_bytes": tiny,
        "one": workers[0],
        "runs": runs,
    }


def _run(source: Path, spec: str, workers: int, scratch: Path) -> dict[str, float]:
    """One preparation from nothing: wall and processor seconds."""
    out = scratch / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "data_prep.prepare", "--source", "files"]
    command += ["--path", str(source), "--tokenizer", spec, "--out", str(out)]
    command += ["--workers", str(workers)]
    # As from a shell: the settings of this process are for its own comparison.
    ours = ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"data_prep.prepare ended with {done.returncode}: {last}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu}
