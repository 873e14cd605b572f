"""What preflight judges from the facts of many ranks, and the facts of this one."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError, is_temporary
from cat_lm.core.host import GIB
from cat_lm.training import preflight
from cat_lm.training.distributed import Ranks
from cat_lm.training.estimate import (
    TIGHT,
    check_disk,
    checkpoint_bytes,
    memory_per_rank,
    num_parameters,
)
from cat_lm.training.preflight import check, dry_run, facts
from cat_lm.training.preflight.data import OpenedData
from cat_lm.training.preflight.facts import Facts, Probe, Problem
from tests.runs import run_values


def config(**train) -> RunConfig:
    return RunConfig.model_validate(run_values("data", "run", global_batch_size=128, **train))


def sound(ranks: int = 32, per_host: int = 8, **changes) -> list[Facts]:
    """The facts of ranks on hosts n000, n001, … that agree in everything."""
    found = []
    for rank in range(ranks):
        leads = rank % per_host == 0
        fact = Facts(
            rank=rank,
            config=config().model_dump(mode="json"),
            versions={"python": "3.11.7", "torch": "2.13.0"},
            on_gpu=True,
            free_memory=80 * GIB,
            gpu_memory=80 * GIB,
            host_memory=500 * GIB,
            data=OpenedData("f" * 64, 257) if leads else None,
            free_disk=100 * GIB if leads else None,
        )
        found.append(replace(fact, **changes))
    return found


def judged(run: RunConfig, found: list[Facts], per_host: int = 8) -> preflight.Report:
    """What is said where ranks on hosts n000, n001, … have these facts."""
    hosts = [f"n{fact.rank // per_host:03}" for fact in found]
    return preflight.Report(
        hosts, [preflight.find_problems(run, fact, found[0], hosts) for fact in found]
    )


def problems(found: list[Facts], **train) -> list[str]:
    lines = str(judged(config(**train), found).error()).removeprefix("preflight:").splitlines()
    return [line.strip() for line in lines if line.strip()]


def test_ranks_that_agree_have_no_problems():
    verdict = judged(config(), sound())
    assert not verdict.problems and not verdict.warnings
    lines = verdict.lines()
    assert lines[0] == (
        "preflight: 32 ranks on 4 hosts (n000, n001, n002, n003); python 3.11.7, torch 2.13.0"
    )
    (line,) = [line for line in lines if line.startswith("preflight: memory: about ")]
    assert "80.00 GiB free" in line


def test_everything_wrong_is_told_with_its_ranks():
    found = sound()
    for rank in (3, *range(24, 32)):
        found[rank] = replace(found[rank], versions=found[0].versions | {"torch": "2.12.0"})
    found[8] = replace(found[8], data=OpenedData("e" * 64, 257))
    found[24] = replace(found[24], problems=[Problem("train.output_dir=run: is not", False)])
    found[9] = replace(found[9], free_memory=2**20)
    found[5] = replace(found[5], config=config(seed=7).model_dump(mode="json"))
    lines = problems(found, micro_batch_size=8)
    for line, who, said in zip(
        lines,
        (
            *("all ranks", "n000 rank 3, n003 ranks 24–31", "n000 rank 5"),
            *("n001 rank 8", "n001 rank 9", "n003 rank 24"),
        ),
        (
            "= 8 x 32 = 256; right would be train.micro_batch_size=4 or 16 ranks",
            "torch is 2.12.0, but 2.13.0 on n000; install the same torch on every host",
            "train.seed=7, but 0 on rank 0",
            "fingerprint is eeeeeeeeeeee, but on n000 ffffffffffff",
            "of GPU memory are free for each; lower train.micro_batch_size=8",
            "train.output_dir=run: is not",
        ),
        strict=True,
    ):
        assert line.startswith(f"{who}: ") and said in line
    many = sound(128, problems=[Problem("data: no such folder", False)])
    many[0] = replace(many[0], problems=[])
    (line,) = problems(many, micro_batch_size=1)
    assert line.startswith("n000 ranks 1–7, n001 ranks 8–15,") and "and 8 more hosts: data" in line


@pytest.mark.parametrize(
    ("keep_last", "steps", "saved", "needed"),
    [
        (1, 8, 0, 2),  # the next one is there before the old one goes
        (2, 8, 1, 2),
        (5, 8, 0, 4),  # no more than a run of 8 steps makes
        (9, 8, 4, 1),
    ],
)
def test_disk_holds_all_checkpoints_that_are_there_at_once(keep_last, steps, saved, needed):
    parameters = num_parameters(config(), 257)
    rule = {"checkpoint": {"every_steps": 2, "keep_last": keep_last}}
    run = RunConfig.model_validate(run_values("data", "run", max_steps=steps) | rule)
    room = needed * checkpoint_bytes(run, parameters)
    assert check_disk(run, parameters, room, saved)[0] is None
    assert "are free, but checkpoints" in check_disk(run, parameters, room - 1, saved)[0]
    first, other = sound(2, 2)
    (line,) = problems([replace(first, free_disk=0), other])
    assert line.startswith("n000 rank 0: train.output_dir=run: 0.0 KiB are free")


def test_ranks_of_a_host_share_its_memory():
    parameters = num_parameters(config(), 257)
    need = preflight.memory_per_rank(config(), parameters, 4, 257, on_gpu=False).total
    assert problems(sound(4, 4, on_gpu=False, free_memory=int(5 * need))) == []
    (line,) = problems(sound(4, 4, on_gpu=False, free_memory=int(2 * need)))
    assert line.startswith("all ranks: about 0.0")
    # A little short is no proof: the estimate is not that close.
    verdict = judged(config(), sound(4, 4, on_gpu=False, free_memory=int(3.7 * need)))
    assert not verdict.problems and len(verdict.warnings) == 1
    assert problems(sound(4, 4, on_gpu=True, free_memory=2 * 10**9)) == []


def test_first_rank_builds_the_model_on_its_host():
    """Also where a GPU or ZeRO-3 holds only a part of it; the other ranks have no copy."""
    need = 4 * num_parameters(config(), 257)
    first, *others = sound(4, 4, host_memory=0)
    assert problems([replace(first, host_memory=need), *others], zero_stage=3) == []
    (line,) = problems([replace(first, host_memory=need - 1), *others], zero_stage=3)
    assert line.startswith("n000 rank 0: the model of ") and "--mem=0" in line


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "advice"),
    [
        (128, 8, 32, "train.micro_batch_size=4 or 16 ranks"),
        (128, 2, 48, "32 or 64 ranks"),
        (12, 2, 4, "train.micro_batch_size=1 or 3 or 6 ranks"),
        (8, 8, 16, "1 rank"),
    ],
)
def test_batch_advice(batch, micro, ranks, advice):
    asked = RunConfig.model_validate(
        run_values("data", "run", global_batch_size=batch, micro_batch_size=micro)
    )
    with pytest.raises(UserError):
        asked.accumulation_steps(ranks)
    assert preflight.batch_advice(asked, ranks) == f"right would be {advice}"


@pytest.mark.parametrize(
    ("train", "device", "launched"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"conv_backend": "reference"}, "cuda", False),
        ({"conv_backend": "reference", "compile": True}, "cuda", True),
    ],
)
def test_kernel_is_launched_where_the_run_needs_some(train, device, launched, monkeypatch):
    monkeypatch.setattr(facts, "INSTALLED", True)
    monkeypatch.setattr(facts, "why_no_kernel", lambda where: f"tried on {where}")
    said = facts.kernel_problem(config(**train), torch.device(device))
    assert (said or "").startswith("tried on cuda (train.conv_backend=reference and") == launched


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
    with monkeypatch.context() as patch:
        patch.delenv("SLURM_JOB_ID")
        facts.use_local_triton_cache()
    assert "TRITON_CACHE_DIR" not in os.environ and not list(temporary.iterdir())
    facts.use_local_triton_cache()
    assert os.environ["TRITON_CACHE_DIR"] == str(usual)
    assert usual.stat().st_mode & 0o777 == 0o700
    del os.environ["TRITON_CACHE_DIR"]
    facts.use_local_triton_cache()  # of an earlier job
    assert os.environ["TRITON_CACHE_DIR"] == str(usual)
    # Code is loaded from it: one that others may write to, or a link, is not taken.
    for spoil in (lambda: usual.chmod(0o777), lambda: (usual.rmdir(), usual.symlink_to("/tmp"))):
        spoil()
        del os.environ["TRITON_CACHE_DIR"]
        facts.use_local_triton_cache()
        other = Path(os.environ["TRITON_CACHE_DIR"])
        assert (
            other != usual and other.parent == temporary and other.stat().st_mode & 0o777 == 0o700
        )


# The facts of this machine


def test_one_rank_checks_itself(tiny_corpus, tmp_path):
    values = run_values(tiny_corpus, tmp_path / "run")
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    _, lines = check(RunConfig.model_validate(values), alone)
    assert "1 rank on 1 host (" in lines[0] and f"torch {torch.__version__}" in lines[0]
    assert not any("warning" in line for line in lines)
    assert list((tmp_path / "run").iterdir()) == []
    values["train"] |= {"output_dir": str(tmp_path / "file" / "run"), "micro_batch_size": 8}
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^preflight: .* rank 0: train.output_dir=.*written to"):
        check(RunConfig.model_validate(values), alone)


def test_auto_micro_batch_is_the_largest_divisor_that_fits_and_is_kept(
    tiny_corpus, tmp_path, monkeypatch
):
    values = run_values(tiny_corpus, tmp_path / "run")
    values["train"] |= {"micro_batch_size": "auto", "global_batch_size": 24, "resume": "auto"}
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    auto = RunConfig.model_validate(values)

    def chosen(config: RunConfig = auto) -> int:
        return check(config, alone)[0].train.micro_batch_size

    assert chosen() == 8  # the most on a CPU, of 24
    parameters = num_parameters(auto, 257)

    def needed(size: int) -> float:
        memory = memory_per_rank(auto.with_micro_batch(size), parameters, 1, 257, False)
        return memory.total / TIGHT

    for free, size in ((needed(6), 6), (needed(6) - 1, 4), (needed(2), 2)):
        monkeypatch.setattr(facts, "free_memory", lambda device, free=free: free)
        assert chosen() == size
    monkeypatch.undo()
    check(auto, alone)[0].with_micro_batch(3).save(tmp_path / "run" / "config.yaml")
    assert chosen() == 3
    for changes, size in (({"global_batch_size": 16}, 8), ({"resume": "never"}, 8)):
        again = auto.model_copy(update={"train": auto.train.model_copy(update=changes)})
        assert chosen(again) == size, changes


def test_damaged_shards_end_it_and_whole_ones_are_read_once(tiny_corpus, tmp_path):
    data = shutil.copytree(tiny_corpus, tmp_path / "data")
    config, read = RunConfig.model_validate(run_values(data, tmp_path / "run")), []
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    assert check(config, alone, read.append)[1][-1].startswith("data: verified 4 files in ")
    assert any(what.startswith(f"the SHA-256 of {data}/") for what in read)
    assert "verified" not in check(config, alone)[1][-1]
    (tmp_path / "run").rmdir()
    shard = data / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match=r"train-00000\.bin: its SHA-256 is not the manifest") as e:
        check(config, alone)
    assert "\n" not in str(e.value) and not (tmp_path / "run").exists()


def test_folder_without_write_permission_or_for_a_moment(tmp_path, monkeypatch):
    probe = Probe(tmp_path, "t", "n000")
    probe.write()
    assert probe.look(0) > 0
    for error in (PermissionError(13, "Permission denied"), OSError(errno.ESTALE, "Stale")):
        monkeypatch.setattr(Path, "write_text", mock.Mock(side_effect=error))
        with pytest.raises(UserError, match="cannot be written to: ") as raised:
            probe.look(0)
        assert is_temporary(raised.value) == (error.errno == errno.ESTALE)
    probe.remove()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_a_node_sees_late_is_waited_for(tmp_path, monkeypatch):
    probe, waited = Probe(tmp_path / "run", "t", "n000"), []

    def made(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            probe.write()

    monkeypatch.setattr("time.sleep", made)
    assert probe.look(facts.PATIENCE_SECONDS) > 0 and len(waited) == 3
    probe.remove()
    with pytest.raises(UserError, match="is not the folder that rank 0 writes to on n000"):
        probe.look(0)


def test_what_may_pass_is_told_from_what_must_be_mended():
    def is_temporary_with(**changes) -> bool:
        found = sound(4, 2)
        found[2] = replace(found[2], **changes)
        return is_temporary(judged(config(), found).error())

    for passes in (True, False):
        stale = Problem("data.path=x: Stale file handle", passes)
        assert is_temporary_with(problems=[stale]) == passes
    held = {"free_memory": 2**20}  # by processes of an earlier start
    assert is_temporary_with(**held) and not is_temporary_with(**held, gpu_memory=2**20)
    assert not is_temporary_with(**held, versions={"python": "3.10"})


def test_what_counts_as_out_of_memory():
    texts = ("CUDA out of memory. Tried to allocate", "DefaultCPUAllocator: can't allocate memory")
    errors = (*map(RuntimeError, texts), MemoryError(), RuntimeError("shapes cannot be multiplied"))
    assert [dry_run._is_out_of_memory(error) for error in errors] == [True, True, True, False]
