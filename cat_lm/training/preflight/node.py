"""What a node gives a rank beside its device, and what of it slows a run or breaks its network.

As in `facts` and `rules`: a rank says what it sees, and all ranks judge all of it, alike.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cat_lm.training.preflight.facts import Facts
    from cat_lm.training.preflight.rules import PreflightReport

# A GPU's rank computes in two threads, reads ahead in a third, and NCCL has its own.
FEWEST_CORES = 4


@dataclass(frozen=True)
class NodeFacts:
    """What a node gives one rank.

    Attributes:
        cores: the numbers of those that it may run on; ranks that are not bound share them.
        triton_cache: the folder that Triton keeps compiled kernels in.
    """

    cores: tuple[int, ...]
    triton_cache: str = ""


def collect() -> NodeFacts:
    """Look at this process's share of its node."""
    return NodeFacts(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        triton_cache=os.environ.get("TRITON_CACHE_DIR", "~/.triton/cache"),
    )


def keep_triton_cache_here() -> None:
    """Has Triton keep compiled kernels on the node's own disk, in a SLURM job that does not say.

    Its default is the home folder, mostly one for all nodes, into which all ranks would compile at
    once. What lies in the folder is loaded as code, so it must be this user's.
    """
    if "SLURM_JOB_ID" not in os.environ or "TRITON_CACHE_DIR" in os.environ:
        return
    folder = Path(tempfile.gettempdir()) / f"cat_lm-triton-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    os.environ["TRITON_CACHE_DIR"] = str(folder)


def judge(verdict: PreflightReport) -> None:
    """Warn of what GPUs' ranks lack; ranks on CPUs take what there is."""
    first = verdict.facts[0]
    if first.on_gpu:
        verdict.notes.append(f"Triton's cache: {first.node.triton_cache}")
        _cores(verdict)


def _cores(verdict: PreflightReport) -> None:
    for ranks in _by_host(verdict.facts):
        together = len(set().union(*(fact.node.cores for fact in ranks)))
        for fact in ranks:
            own = min(len(fact.node.cores), together / len(ranks))
            if own < FEWEST_CORES:
                verdict.warnings[
                    f"{own:.3g} core{'s' if own > 1 else ''} for a GPU's rank, whose threads need "
                    f"{FEWEST_CORES} or more, or the GPU waits for them; ask for more: "
                    "--cpus-per-task of launch.slurm, srun and sbatch"
                ].append(fact.rank)


def _by_host(facts: Sequence[Facts]) -> list[list[Facts]]:
    found = defaultdict(list)
    for fact in facts:
        found[fact.host].append(fact)
    return list(found.values())
