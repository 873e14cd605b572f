"""What preflight says of nodes: cores, sockets, limits, kernels, and networks that are too slow."""

from __future__ import annotations

import os
import resource
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cat_lm.training.preflight import bandwidth, facts, kernel_trial, node, rules
from cat_lm.training.preflight.facts import Facts
from cat_lm.training.preflight.node import NodeFacts
from tests.unit.test_preflight import config, problems, sound, warnings

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("cores", "says"),
    [
        (lambda rank: (rank,), "1 core for a GPU's rank"),
        (lambda rank: range(24), "3 cores for a GPU's rank"),  # not bound: 8 ranks share 24
        (lambda rank: range(4 * (rank % 8), 4 * (rank % 8) + 4), None),
        (lambda rank: range(32), None),
    ],
)
def test_few_cores_are_a_warning(cores, says):
    found = [replace(fact, node=NodeFacts(cores=tuple(cores(fact.rank)))) for fact in sound(16)]
    lines = warnings(found)
    assert len(lines) == (says is not None)
    for line in lines:
        assert line.startswith(f"preflight: warning: all ranks: {says}")
        assert "--cpus-per-task" in line
    on_cpu = [replace(fact, on_gpu=False) for fact in found]
    assert not [line for line in warnings(on_cpu) if "core" in line]


def test_a_kernel_that_does_not_run_ends_it():
    found = sound(16)
    found[9] = replace(found[9], kernel_problem="there is no C compiler")
    (line,) = problems(found)
    assert line.startswith("n001 rank 9: there is no C compiler (train.conv_backend=reference and")


@pytest.mark.parametrize(
    ("train", "device", "launched"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"conv_backend": "reference"}, "cuda", False),
        ({"conv_backend": "reference", "compile": True}, "cuda", True),
    ],
)
def test_a_kernel_is_launched_where_the_run_needs_some(train, device, launched, monkeypatch):
    monkeypatch.setattr(facts, "INSTALLED", True)
    monkeypatch.setattr(kernel_trial, "why_no_kernel", lambda where: f"tried on {where}")
    said = facts.kernel_problem(config(**train), torch.device(device))
    assert said == ("tried on cuda" if launched else None)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A node's temporary folder; nothing said of Triton's cache."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # restored afterwards
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


def test_triton_s_cache_of_a_slurm_job_is_on_the_node(temporary, monkeypatch):
    usual = temporary / f"cat_lm-triton-{os.getuid()}"
    node.keep_triton_cache_here()
    here = node.collect(CPU)
    assert os.environ["TRITON_CACHE_DIR"] == str(usual) == here.triton_cache
    assert usual.stat().st_mode & 0o777 == 0o700
    on_gpu = [replace(fact, node=here) for fact in sound(2)]
    assert f"preflight: Triton's cache: {usual}" in rules.judge(config(), on_gpu).lines()
    del os.environ["TRITON_CACHE_DIR"]
    node.keep_triton_cache_here()  # of an earlier job
    assert os.environ["TRITON_CACHE_DIR"] == str(usual)
    # Code is loaded from it: one that others may write to, or a link, is not taken.
    for spoil in (lambda: usual.chmod(0o777), lambda: (usual.rmdir(), usual.symlink_to("/tmp"))):
        spoil()
        del os.environ["TRITON_CACHE_DIR"]
        node.keep_triton_cache_here()
        other = Path(os.environ["TRITON_CACHE_DIR"])
        assert (
            other != usual and other.parent == temporary and other.stat().st_mode & 0o777 == 0o700
        )


@pytest.mark.parametrize(("job", "own", "expected"), [(None, None, None), ("7", "/mine", "/mine")])
def test_triton_s_cache_stays_where_it_is(temporary, job, own, expected, monkeypatch):
    for name, value in (("SLURM_JOB_ID", job), ("TRITON_CACHE_DIR", own)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    node.keep_triton_cache_here()
    assert os.environ.get("TRITON_CACHE_DIR") == expected and not list(temporary.iterdir())


def test_the_node_s_share_of_this_process(monkeypatch):
    assert 1 <= len(node.collect(CPU).cores) <= os.cpu_count()
    for limit, expected in ((2**23, 2**23), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert node.collect(CPU).locked_memory == expected


@pytest.mark.parametrize(
    ("device", "nodes", "per_node", "least"),
    [
        ("NVIDIA H100 80GB HBM3", 1, 8, 112.5),
        ("NVIDIA H100 80GB HBM3", 4, 8, 20),
        ("NVIDIA H100 80GB HBM3", 4, 1, 2.5),
        ("NVIDIA H100 PCIe", 1, 8, 16),
        ("NVIDIA A100-PCIE-40GB", 1, 8, 16),  # the table's A100 has NVLink
        ("NVIDIA L4", 2, 8, 8),  # its link is less than what the network gives
        ("Some GPU", 4, 8, 1),
        ("CPU", 1, 2, 0.01),
    ],
)
def test_what_a_fast_network_reaches(device, nodes, per_node, least):
    assert bandwidth.least_bandwidth(device, nodes, per_node) == pytest.approx(least * 1e9)


def test_tcp_in_place_of_the_fast_network_is_a_warning():
    """A few GB/s: more than any CPU's, and less than a tenth of what the nodes have."""
    verdict = rules.judge(config(), sound(32))
    for speed, warned in ((19, True), (21, False)):
        verdict.warnings.clear()
        verdict.add_transport(bandwidth.Transport(speed * 10**9, 2 * 31 / 32, 32))
        assert bool(verdict.warnings) == warned
    verdict = rules.judge(config(), sound(8))
    verdict.add_transport(bandwidth.Transport(40 * 10**9, 2 * 7 / 8, 8))
    assert "40 GB/s are very little, 112 or more are usual" in next(iter(verdict.warnings))


def with_node(found: list[Facts], **changes) -> list[Facts]:
    return [replace(fact, node=replace(fact.node, **changes)) for fact in found]


def test_memory_that_may_not_be_locked_is_a_warning():
    limited = {"locked_memory": 2**23, "has_rdma": True}
    (line,) = warnings(with_node(sound(16), **limited))
    assert "all ranks: only 8,192 KiB of memory may be locked (ulimit -l)" in line
    assert warnings(with_node(sound(8), **limited)) == [], "within a node it does not matter"
    assert warnings(with_node(sound(16), **limited | {"locked_memory": None})) == []
    assert warnings(with_node(sound(16), **limited | {"has_rdma": False})) == []


def test_tf32_is_a_warning_and_stands_in_the_log(monkeypatch):
    found = sound(8)
    found[1:] = [replace(f, versions=f.versions | {"fp32 products": "exact"}) for f in found[1:]]
    found[0] = replace(found[0], versions=found[0].versions | {"fp32 products": "TF32"})
    assert problems(found)[0].startswith("n000 rank 0: fp32 products is TF32, but exact on")
    (line,) = warnings(found)
    assert "rank 0: fp32 matrices are multiplied in TF32" in line
    assert "fp32 products TF32" in rules.judge(config(), found).notes[0]
    assert facts.fp32_products() == "exact"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert facts.fp32_products() == "TF32"


def test_sockets(tmp_path):
    """Ranks whose cores are far from their GPU, and those that may run anywhere."""
    gpu, pci = tmp_path / "gpus/0000:18:00.0", tmp_path / "pci/0000:18:00.0"
    for folder, name, text in (
        (gpu, "information", "Model: H100\nGPU UUID:\t GPU-1b2c-3d\n"),
        (pci, "local_cpulist", "0-3,8\n"),
    ):
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
    places = (tmp_path / "gpus", tmp_path / "pci")
    assert node.near_cores("1b2c-3d", *places) == (0, 1, 2, 3, 8)
    assert node.near_cores("other", *places) == () == node.near_cores("1b2c-3d", tmp_path / "no")
    (pci / "local_cpulist").write_text("\n")
    assert node.near_cores("1b2c-3d", *places) == ()
    found = with_node(sound(8), near_cores=tuple(range(32)))  # the first socket: ranks 0 to 3
    (line,) = warnings(found)
    assert line.startswith(
        "preflight: warning: n000 ranks 4–7: its cores are all on another socket"
    )
    assert "sockets: 4 of 8 ranks are not bound" in rules.judge(config(), found).notes[-1]
    free = with_node(sound(8), cores=tuple(range(64)), near_cores=tuple(range(32)))
    assert warnings(free) == [] and "8 of 8 ranks" in rules.judge(config(), free).notes[-1]
    assert not [n for n in rules.judge(config(), sound(8)).notes if "sockets" in n]
