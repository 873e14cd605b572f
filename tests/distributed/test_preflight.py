"""Preflight among real ranks: what it finds, and that its dry-run batch changes nothing."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.config.sections import TrainSection
from cat_lm.core.errors import UserError
from cat_lm.data import packing
from cat_lm.data.opening import open_corpus, open_data
from cat_lm.training import preflight
from cat_lm.training.building import build_model
from cat_lm.training.checkpoint.optimizer_state import full_precision_weights, stepped_tensors
from cat_lm.training.checkpoint.run import Checkpoints
from cat_lm.training.engine import Engine
from cat_lm.training.estimate import checkpoint_bytes, count_parameters
from cat_lm.training.preflight import data as preflight_data
from cat_lm.training.preflight.dry_run import absent_moments
from tests.checkpoints import STATE
from tests.conftest import generated_text
from tests.distributed.ranks import run_on_ranks
from tests.prepared_data import random_documents, write_prepared
from tests.runs import run_values
from tests.web_server import served

STEPS = 3


def saved_bytes(ranks, folder: str) -> tuple[int, int]:
    """(bytes of a checkpoint's weights and moments, the estimate)."""
    values = run_values("unused", f"{folder}/run", precision="bf16")
    values["model"] |= {"hidden_size": 128, "vocab_size": 2000}
    config = RunConfig.model_validate(values)
    engine = Engine(build_model(config, 0), config, ranks)
    vocab_size = engine.model.config.vocab_size
    batch = {
        name: np.random.default_rng(0).integers(0, vocab_size, (8 // ranks.world_size, 32))
        for name in ("input_ids", "labels")
    }
    engine.train_step(batch, 1e-3)
    checkpoints = Checkpoints(Path(folder) / "run", config, ranks)
    saved = checkpoints.save(engine, STATE, Path(folder) / "tokenizer")
    checkpoints.close()
    files = saved.rglob("*.safetensors")
    return sum(f.stat().st_size for f in files), checkpoint_bytes(count_parameters(engine.model))


def test_a_checkpoint_is_as_large_as_estimated(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    for size, estimate in run_on_ranks(saved_bytes, 2, str(tmp_path)):
        assert size == pytest.approx(estimate, rel=0.02)


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
            found, stepped = [], sum(t.numel() for t in stepped_tensors(engine))
            for step in range(STEPS):
                # Also between steps, as after a checkpoint: moments and counters are there then.
                if dry and step != 1:
                    reserved = sum(t.numel() for t in absent_moments(engine))
                    assert reserved == (0 if step else 2 * stepped), (stage, step)
                    line = preflight.dry_run_batch(engine, loader)
                    assert line.startswith("preflight: dry-run batch of 2 x 32 tokens in "), line
                result = engine.train_step(loader.batch(step, ranks.rank, ranks.world_size), 1e-2)
                assert not result.skipped
                found.append((result.loss, result.grad_norm))
            weights = {k: v.numpy() for k, v in full_precision_weights(engine).items()}
            results[stage, precision, dry] = found, weights, torch.get_rng_state().numpy()
    return results


def other_corpus(folder: Path, prepare) -> Path:
    (folder / "text.txt").write_text("\n\n".join(generated_text(200, seed=1)), encoding="utf-8")
    return prepare(
        folder / "prepared",
        *("--source", "files", "--path", folder / "text.txt", "--document-separator", r"\n\n"),
        *("--tokenizer", "bytes", "--validation-fraction", 0.1, "--workers", 1),
    )


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
        lines, error = preflight.check(RunConfig.model_validate(values), ranks), ""
    except UserError as raised:
        lines, error = [], str(raised)
    return error, lines


def test_two_hosts_that_agree(tiny_corpus, tmp_path):
    (tmp_path / "data").symlink_to(tiny_corpus)
    found = run_on_ranks(checked, 2, [tmp_path, tmp_path], {})
    assert found[0] == found[1]
    error, lines = found[0]
    assert error == "" and all(line.startswith("preflight: ") for line in lines), lines
    text = "\n".join(lines)
    assert "2 ranks on 2 hosts (n0, n1); python 3." in text
    assert "disk: " in text and "memory: about 0.0" in text and "read on each host" in text
    assert list((tmp_path / "run").iterdir()) == [], "the probe files are gone"


def test_everything_wrong_at_once(tiny_corpus, tmp_path, prepare):
    """Node-local folders, other data, another torch, another batch: one error, on both ranks."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "data").symlink_to(tiny_corpus)
    (folders[1] / "data").symlink_to(other_corpus(folders[1], prepare))
    found = run_on_ranks(checked, 2, folders, {"torch": "2.0.0", "seed": 3})
    assert found[0] == found[1], "both ranks must end alike"
    error, _ = found[0]
    lines = error.splitlines()
    assert lines[0] == "preflight:" and all(line.startswith("  n1 rank 1: ") for line in lines[1:])
    assert len(lines) == 5, error
    assert "train.output_dir=run: is not the folder that rank 0 writes to on n0" in lines[1]
    assert "torch is 2.0.0, but" in lines[2] and "on n0; install the same torch" in lines[2]
    assert "train.seed=3, but 0 on rank 0" in lines[3]
    assert "the fingerprint is" in lines[4] and "but on n0" in lines[4]
    assert not (folders[0] / "run").exists(), "a run that cannot start leaves no folder behind"


def test_data_and_memory_of_one_host_are_missing(tiny_corpus, tmp_path):
    """One line for what all ranks lack; a rank without data keeps none waiting."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "run").symlink_to(tmp_path / "shared_run")
    (tmp_path / "shared_run").mkdir()
    (folders[0] / "data").symlink_to(tiny_corpus)
    (error, _), other = run_on_ranks(checked, 2, folders, {"free_memory": 2**16})
    assert (error, []) == other
    lines = error.splitlines()
    assert len(lines) == 4, error
    assert lines[1].startswith("  n0 rank 0: the model of")
    assert lines[2].startswith("  all ranks: about 0.0") and "lower train.micro_batch" in lines[2]
    assert lines[3].startswith("  n1 rank 1: data: no such folder")


def test_what_fails_on_one_rank_alone_ends_all_of_them(tiny_corpus, tmp_path):
    (tmp_path / "data").symlink_to(tiny_corpus)
    absent = tmp_path / "absent.py"
    found = run_on_ranks(checked, 2, [tmp_path, tmp_path], {"sources": absent})
    assert found == [(f"{absent}: no such file or folder", [])] * 2


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_dry_run_batch_changes_nothing(world_size, tiny_corpus):
    """Losses, norms, weights and generators are equal bit for bit, in every stage."""
    cases = {
        1: [(0, "fp32"), (1, "bf16")],
        2: [(0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")],
    }[world_size]
    for results in run_on_ranks(losses_with_and_without, world_size, str(tiny_corpus), cases):
        for case in cases:
            (without, weights, state), (with_, same_weights, same_state) = (
                results[*case, dry] for dry in (False, True)
            )
            assert with_ == without, case
            np.testing.assert_array_equal(same_state, state)
            assert weights.keys() == same_weights.keys()
            for name, weight in weights.items():
                np.testing.assert_array_equal(same_weights[name], weight, err_msg=str((case, name)))


def read_data(config: RunConfig, ranks, progress) -> None:
    read = (lambda note: preflight_data.read_data(config, note)) if ranks.is_first else None
    opened = preflight_data.meanwhile(ranks, read, progress)
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


def copied(ranks, url: str, cache: str) -> tuple[int, list[bool]]:
    """(times that this rank told its watchdog, whether each shard is here)."""
    told: list[str] = []
    preflight_data.POLL_SECONDS = 0.01
    values = run_values(url, "unused")
    values["data"]["cache_dir"] = cache
    config = RunConfig.model_validate(values)
    read_data(config, ranks, told.append)
    splits = open_data(config, look=False)[:2]
    missing = [entry for split in splits for entry in split.missing(split.entries)]
    return len(told), [entry not in missing for split in splits for entry in split.entries]


def test_remote_data_are_copied_once_before_ranks_open_them(tmp_path):
    folder = write_prepared(tmp_path / "data", random_documents(150, 40), shard_tokens=500)
    with served(folder) as (server, url):
        here = open_corpus(url, "train", tmp_path / "cache").folder
        (here / ".train-00000.bin.killed.tmp").write_bytes(b"half, of a killed process")
        (here / "train-00001.bin").write_bytes(b"renamed, but not yet noted")
        (first, shards), (other, same) = run_on_ranks(copied, 2, url, str(tmp_path / "cache"))
        copies = [name for name, _ in server.requests if name.endswith(".idx")]
    assert first == other >= 1
    assert shards == same == [True] * 5 and len(copies) == len(set(copies)) == 5
    for path in here.glob("*.bin"):
        assert path.read_bytes() == (folder / path.name).read_bytes()
    assert not list(here.glob(".*.tmp"))


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
    ranks.barrier()
    return len(packed), message, os.listdir(folder) if os.path.isdir(folder) else []


def test_what_was_wrong_in_packing_is_said_and_not_tried_again(tmp_path):
    """The others would wait for it in a collective, and count as hung."""
    data = write_prepared(tmp_path / "data", random_documents(20, 40))
    found = run_on_ranks(packed_on_a_full_disk, 2, str(data), str(tmp_path / "run"))
    assert [times for times, *_ in found] == [1, 0]
    for _, message, left in found:
        assert "the disk is full" in message and not left
