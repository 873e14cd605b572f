"""Preflight among real ranks: what it finds, and that its dry-run batch changes nothing."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import torch

from cat_lm.config import RunConfig
from cat_lm.config.sections import TrainSection
from cat_lm.core.errors import UserError
from cat_lm.data import packing
from cat_lm.data.opening import open_data
from cat_lm.training import preflight
from cat_lm.training.building import build_model
from cat_lm.training.checkpoint.optimizer_state import full_precision_weights, stepped_tensors
from cat_lm.training.engine import Engine
from cat_lm.training.estimate import TIGHT, memory_per_rank, num_parameters
from cat_lm.training.preflight import data as preflight_data
from cat_lm.training.preflight.dry_run import allocate_moments
from tests.distributed.ranks import run_on_ranks
from tests.prepared_data import random_documents, write_prepared
from tests.runs import run_values

STEPS = 3


def losses_with_and_without(ranks, data, cases):
    """Losses, gradient norms and weights of each case, without and with a dry-run batch before."""
    results = {}
    for stage, precision in cases:
        for dry in (False, True):
            values = run_values(data, "unused", precision=precision, zero_stage=stage)
            values["train"]["micro_batch_size"] = 2
            config = RunConfig.model_validate(values)
            _, _, loader = open_data(config)
            engine = Engine(build_model(config, 257), config, ranks)
            found, stepped = [], sum(t.numel() for t, _ in stepped_tensors(engine))
            for step in range(STEPS):
                # Also between steps, as after a checkpoint: moments and counters are there then.
                if dry and step != 1:
                    reserved = sum(t.numel() for t in allocate_moments(engine))
                    assert reserved == (0 if step else 2 * stepped), (stage, step)
                    line = preflight.dry_run_batch(engine, loader)
                    assert line.startswith("preflight: dry-run batch of 2 x 32 tokens in "), line
                result = engine.train_step(loader.batch(step, ranks.rank, ranks.world_size), 1e-2)
                assert not result.skipped
                found.append((result.loss, result.grad_norm))
            weights = {k: v.numpy() for k, v in full_precision_weights(engine).items()}
            results[stage, precision, dry] = found, weights, torch.get_rng_state().numpy()
    return results


def checked(ranks, folders: list[Path], changes: dict[str, object]) -> tuple[str, list[str]]:
    """What preflight says where every rank is a host with a current folder of its own.

    `changes` are made on the last rank only: a value of the configuration, or of its versions.
    """
    from cat_lm.training.preflight import facts

    facts.PATIENCE_SECONDS = 0.3
    os.environ["SLURMD_NODENAME"] = f"n{ranks.rank}"
    os.chdir(folders[ranks.rank])
    is_last = ranks.rank == ranks.world_size - 1
    train = {k: v for k, v in changes.items() if k in TrainSection.model_fields}
    values = run_values(Path("data"), Path("run"), **(train if is_last else {}))
    if is_last and "torch" in changes:
        real = facts.versions
        facts.versions = lambda on_gpu: real(on_gpu) | {"torch": changes["torch"]}
    if is_last and "sources" in changes:
        facts.code_hash = lambda: changes["sources"].read_bytes()
    if "free_memory" in changes:
        facts.free_memory = lambda device: changes["free_memory"]
    try:
        lines, error = preflight.check(RunConfig.model_validate(values), ranks)[1], ""
    except UserError as raised:
        lines, error = [], str(raised)
    return error, lines


def chosen(ranks, data: Path, run: Path, cases: list[list[float]]) -> list[int]:
    """What train.micro_batch_size=auto is on two hosts with so many free bytes, in each case."""
    from cat_lm.training.preflight import facts

    os.environ["SLURMD_NODENAME"] = f"n{ranks.rank}"
    auto = run_values(data, run, micro_batch_size="auto", global_batch_size=16)
    found = []
    for free in cases:
        facts.free_memory = lambda device, free=free: free[ranks.rank]
        config = preflight.check(RunConfig.model_validate(auto), ranks)[0]
        found.append(config.train.micro_batch_size)
    return found


def test_auto_micro_batch_is_that_of_the_rank_with_the_least_memory(tiny_corpus, tmp_path):
    config = RunConfig.model_validate(run_values(tiny_corpus, tmp_path, global_batch_size=16))
    parameters = num_parameters(config, 257)

    def needed(size: int) -> float:
        given = config.with_micro_batch(size), parameters, 2, 257, False
        return memory_per_rank(*given).total / TIGHT

    cases = [[needed(8), needed(4)], [needed(2), needed(8)]]
    found = run_on_ranks(chosen, 2, tiny_corpus, tmp_path / "run", cases)
    assert found == [[4, 2], [4, 2]]


def test_hosts_that_agree_say_what_they_have(tiny_corpus, tmp_path):
    (tmp_path / "data").symlink_to(tiny_corpus)
    found = run_on_ranks(checked, 2, [tmp_path, tmp_path], {})
    assert found[0] == found[1]
    error, lines = found[0]
    assert error == "" and all(line.startswith("preflight: ") for line in lines), lines
    text = "\n".join(lines)
    assert "2 ranks on 2 hosts (n0, n1); python 3." in text
    assert "disk: " in text and "memory: about 0.0" in text and "read on each host" in text
    assert list((tmp_path / "run").iterdir()) == [], "the probe files are gone"


def test_everything_wrong_is_one_error_on_all_ranks(tiny_corpus, tmp_path):
    """Node-local folders, other data, another torch and seed, and too little memory."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "data").symlink_to(tiny_corpus)
    texts = random_documents(60, 40)
    write_prepared(folders[1] / "data", texts, texts)
    changes = {"torch": "2.0.0", "seed": 3, "free_memory": 2**16}
    found = run_on_ranks(checked, 2, folders, changes)
    assert found[0] == found[1], "both ranks must end alike"
    lines = found[0][0].splitlines()
    wanted = {
        "train.output_dir=run: is not the folder that rank 0 writes to on n0": "n1 rank 1",
        "torch is 2.0.0, but": "n1 rank 1",
        "train.seed=3, but 0 on rank 0": "n1 rank 1",
        "the fingerprint is": "n1 rank 1",
        "the model of": "n0 rank 0",
        "about 0.0": "all ranks",
    }
    assert lines[0] == "preflight:" and len(lines) == 1 + len(wanted), lines
    for said, who in wanted.items():
        (line,) = [line for line in lines if said in line]
        assert line.startswith(f"  {who}: "), line
    assert not (folders[0] / "run").exists(), "a run that cannot start leaves no folder behind"


def test_error_of_one_rank_ends_all_of_them(tiny_corpus, tmp_path):
    """A rank without data, or whose code cannot be read, keeps none waiting."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "run").symlink_to(tmp_path)
    (folders[0] / "data").symlink_to(tiny_corpus)
    (error, _), other = run_on_ranks(checked, 2, folders, {})
    assert (error, []) == other and "n1 rank 1: data: no such folder" in error
    absent = tmp_path / "absent.py"
    found = run_on_ranks(checked, 2, [folders[0]] * 2, {"sources": absent})
    assert found == [(f"{absent}: no such file or folder", [])] * 2


def test_dry_run_batch_changes_nothing(tiny_corpus):
    """Losses, norms, weights and generators are equal bit for bit, in every stage."""
    cases = [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16")]
    for results in run_on_ranks(losses_with_and_without, 2, str(tiny_corpus), cases):
        for case in cases:
            without, with_ = (results[*case, dry] for dry in (False, True))
            assert with_[0] == without[0], case
            np.testing.assert_array_equal(with_[2], without[2])
            assert with_[1].keys() == without[1].keys()
            for name, weight in without[1].items():
                np.testing.assert_array_equal(with_[1][name], weight, err_msg=str((case, name)))


def read_data(config: RunConfig, ranks, progress) -> None:
    read = (lambda note: preflight_data.read_data(config, note)) if ranks.is_first else None
    opened = preflight_data.run_with_progress(ranks, read, progress)
    assert opened is None or opened.result().vocab_size > 0


def planned(ranks, data: str) -> tuple[int, int]:
    """(times that this rank told its watchdog, windows); a group is packed only after it did."""
    told, packed, told_enough = [], 0, threading.Condition()
    preflight_data.POLL_SECONDS = 0.01
    packing.GROUP = 2
    real = packing.pack

    def patient(*arguments):
        nonlocal packed
        packed += 1
        with told_enough:
            assert told_enough.wait_for(lambda: len(told) >= packed, timeout=60)
        return real(*arguments)

    def tell(what: str) -> None:
        with told_enough:
            told.append(what)
            told_enough.notify_all()

    packing.pack = patient
    values = run_values(data, "unused")
    values["data"]["packing"] = "best_fit"
    config = RunConfig.model_validate(values)
    read_data(config, ranks, tell)
    packing.pack = None  # what follows finds the plan
    return len(told), open_data(config)[2].samples_per_epoch


def test_ranks_that_wait_for_a_packing_plan_do_not_seem_to_hang(tmp_path):
    folder = write_prepared(tmp_path / "data", random_documents(20, 40))
    (first, windows), (other, same) = run_on_ranks(planned, 2, str(folder))
    assert first == other >= 10, "a time for each of ten groups"
    assert windows == same > 0


def packed_on_a_full_disk(ranks, data: str, folder: str) -> tuple[int, str, list[str]]:
    """(times that was packed, the error, what is left in the run's folder)."""
    packed = []

    def full(*arguments):
        packed.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device", "pieces.bin")

    packing.pack = full
    values = run_values(data, folder)
    values["data"]["packing"] = "best_fit"
    message = ""
    try:
        preflight.check(RunConfig.model_validate(values), ranks)
    except UserError as error:
        message = str(error)
    ranks.gather(None)
    return len(packed), message, os.listdir(folder) if os.path.isdir(folder) else []


def test_what_was_wrong_in_packing_is_said_and_not_tried_again(tmp_path):
    """The others would wait for it in a collective, and count as hung."""
    data = write_prepared(tmp_path / "data", random_documents(20, 40))
    found = run_on_ranks(packed_on_a_full_disk, 2, str(data), str(tmp_path / "run"))
    assert [times for times, *_ in found] == [1, 0]
    for _, message, left in found:
        assert "the disk is full" in message and not left
