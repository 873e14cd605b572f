"""What of its nodes slows a run or breaks its network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cat_lm.training.preflight.facts import Facts
from cat_lm.training.preflight.report import PreflightReport

# A GPU's rank computes in two threads, reads ahead in a third, and NCCL has its own.
FEWEST_CORES = 4


def judge_nodes(verdict: PreflightReport) -> None:
    """Warn of what GPUs' ranks lack; ranks on CPUs take what there is."""
    first = verdict.facts[0]
    if first.on_gpu:
        verdict.notes.append(f"Triton's cache: {first.node.triton_cache}")
        _cores(verdict)
        _sockets(verdict)
        _locked_memory(verdict)


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


def _sockets(verdict: PreflightReport) -> None:
    """Memory of the other socket is reached through a link between them: some percent of a step."""
    anywhere = 0
    for fact in verdict.facts:
        cores, near = set(fact.node.cores), set(fact.node.near_cores)
        if near and not cores & near:
            verdict.warnings[
                "its cores are all on another socket than its GPU, which slows copies and launches;"
                " bind ranks to the cores beside their GPUs (srun --cpu-bind, --gpu-bind=closest)"
            ].append(fact.rank)
        anywhere += bool(near and not cores <= near)
    if anywhere:
        verdict.notes.append(
            f"sockets: {anywhere} of {len(verdict.facts)} ranks are not bound to the cores beside "
            "their GPU (srun --cpu-bind binds)"
        )


def _locked_memory(verdict: PreflightReport) -> None:
    """InfiniBand and its like send from and receive into memory that is locked for them."""
    if len({fact.host for fact in verdict.facts}) == 1:
        return
    for fact in verdict.facts:
        limit = fact.node.locked_memory
        if fact.node.has_rdma and limit is not None:
            verdict.warnings[
                f"only {limit // 1024:,} KiB of memory may be locked (ulimit -l), which NCCL needs "
                "to use the network between the nodes: it fails in ibv_reg_mr, or takes a slow "
                "path; ask for no limit (slurmd's LimitMEMLOCK=infinity)"
            ].append(fact.rank)


def _by_host(facts: Sequence[Facts]) -> list[list[Facts]]:
    found = defaultdict(list)
    for fact in facts:
        found[fact.host].append(fact)
    return list(found.values())
