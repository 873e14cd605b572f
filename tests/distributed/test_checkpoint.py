"""Saves that are cut off at each of their steps, and folders that hold another run."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import shutil
import stat
from pathlib import Path
from unittest import mock

import pytest

from cat_lm.config import RunConfig
from cat_lm.training.checkpoint import complete_checkpoints, find_checkpoint
from cat_lm.training.checkpoint.run import Checkpoints
from cat_lm.training.estimate import checkpoint_bytes, num_parameters
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import error_of, train
from tests.runs import losses, run_values

# Every action of a save and a prune that touches the disk; the first are tried in each run.
FEW = (
    "cat_lm.training.checkpoint.run.save_file",
    "cat_lm.training.checkpoint.files.write_marker",
    "os.rename",
    "cat_lm.training.checkpoint.files.prune",
)
ACTIONS = (
    *FEW,
    "cat_lm.training.checkpoint.run.make_empty_folder",
    "cat_lm.training.checkpoint.optimizer_state.full_precision_weights",
    "cat_lm.training.checkpoint.optimizer_state.write_state",
    "cat_lm.training.checkpoint.optimizer_state.save_file",
    "cat_lm.training.checkpoint.optimizer_state.save_random_states",
    "shutil.copytree",
    "cat_lm.training.checkpoint.optimizer_state.check_stored",
    "cat_lm.training.checkpoint.run.flush_and_hash",
    "cat_lm.training.checkpoint.run.checksum",
    "cat_lm.training.checkpoint.optimizer_state.read_index",
    "cat_lm.training.checkpoint.run.sync_directory",
    "cat_lm.training.checkpoint.run.remove_temporary",
    "cat_lm.training.checkpoint.run.write_text",
    "cat_lm.training.checkpoint.files.remove_temporary",
)


class Killed(BaseException):
    """Ends a run without any of its error handling, as SIGKILL does."""


def killing(action: str, late: bool, at_step: int):
    """Have a trainer's save of a step end before an action, or after it."""

    def prepare(trainer) -> None:
        save, original = trainer.save, pkgutil.resolve_name(action)

        def die(*given, **named):
            if late:
                original(*given, **named)
            raise Killed

        def killed_save():
            with mock.patch(action, die) if trainer.step == at_step else contextlib.nullcontext():
                save()

        trainer.save = killed_save

    return prepare


def killed_everywhere(ranks, data: str, folder: str, actions: tuple, late: bool) -> None:
    """Kill the third save, which also prunes, at each action; then go on."""
    train(ranks, run_values(data, Path(folder) / "whole", max_steps=4))
    for number, action in enumerate(actions):
        run = Path(folder) / str(number)
        values = run_values(data, run, max_steps=4, resume="auto")
        values["checkpoint"] = {"every_steps": 1, "keep_last": 2}
        values["validation"]["every_steps"] = 4
        with pytest.raises(Killed):
            train(ranks, values, prepare=killing(action, late, at_step=3))
        newest = find_checkpoint(run)
        assert newest.name in ("step-00000002", "step-00000003"), (action, newest)
        train(ranks, values)
        names = {path.name for path in (run / "checkpoints").iterdir()}
        assert names == {".lock", "latest", "step-00000003", "step-00000004"}, (action, names)
        whole = [row for row in losses(Path(folder) / "whole") if len(row) == 3]
        assert [row for row in losses(run) if len(row) == 3] == whole, action


@pytest.mark.parametrize(
    ("actions", "late"),
    [
        pytest.param(FEW, False, id="few"),
        pytest.param(ACTIONS, False, id="before each", marks=pytest.mark.nightly),
        pytest.param(ACTIONS, True, id="after each", marks=pytest.mark.nightly),
    ],
)
def test_save_killed_at_any_action_costs_nothing(actions, late, tiny_corpus, tmp_path):
    run_on_ranks(killed_everywhere, 1, str(tiny_corpus), str(tmp_path), actions, late)


def forked(ranks, data: str, folder: str) -> list[list[tuple]]:
    """What a fork has recorded when it is killed, started again, stopped and continued."""
    first, fork = Path(folder) / "first", Path(folder) / "fork"
    train(ranks, run_values(data, first, max_steps=4) | {"checkpoint": {"every_steps": 2}})
    recorded, start = [], first / "checkpoints/step-00000004"
    # Gathering weights is an action of all ranks: none waits for another.
    kill = killing(ACTIONS[5], False, at_step=6)
    for resume, steps, prepare in ((start, 6, kill), (start, 6, None), ("auto", 8, None)):
        values = run_values(data, fork, max_steps=steps, resume=str(resume))
        values["checkpoint"] = {"every_steps": 2}
        with contextlib.suppress(Killed):
            train(ranks, values, prepare=prepare)
        ranks.on_rank_zero(lambda: recorded.append(losses(fork)))
    return recorded


def test_fork_keeps_records_of_its_own(tiny_corpus, tmp_path):
    """Put aside what is of steps before its start; `auto` goes on from its own checkpoint."""
    (tmp_path / "fork").mkdir()
    strange = "".join(f'{{"step": {step}, "loss": 1.0, "grad_norm": 1.0}}\n' for step in (1, 2, 9))
    (tmp_path / "fork/metrics.jsonl").write_text(strange)
    found = run_on_ranks(forked, 2, str(tiny_corpus), str(tmp_path))[0]
    steps = [[row[0] for row in rows if len(row) == 3] for rows in found]
    assert steps == [[5, 6], [5, 6], [5, 6, 7, 8]]
    assert found[0] == found[1][: len(found[0])] and found[1] == found[2][: len(found[1])]
    assert (tmp_path / "fork/metrics.1.jsonl").read_text() == strange
    assert (tmp_path / "fork/metrics.2.jsonl").exists()
    assert not (tmp_path / "fork/metrics.3.jsonl").exists()


def odd_folders(ranks, data: str, folder: str) -> str:
    """Train with a strict umask, again without the checkpoints, and while another process does."""
    run = Path(folder) / "run"
    values = run_values(data, run, max_steps=1)
    before = os.umask(0o027)
    try:
        train(ranks, values)
    finally:
        os.umask(before)
    shutil.copytree(run / "checkpoints", Path(folder) / "kept")
    shutil.rmtree(run / "checkpoints")
    train(ranks, values)
    held = Checkpoints(run, RunConfig.model_validate(values), ranks)
    try:
        return error_of(ranks, values)
    finally:
        held.close()


def test_folder_of_a_run_has_usual_modes_and_one_writer(tiny_corpus, tmp_path):
    """A group can export checkpoints, whatever safetensors makes and the tokenizer's files have."""
    data = shutil.copytree(tiny_corpus, tmp_path / "data")
    for path in (data / "tokenizer", *(data / "tokenizer").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (line,) = run_on_ranks(odd_folders, 1, str(data), str(tmp_path))
    assert "another process trains in it" in line
    assert (tmp_path / "run/metrics.1.jsonl").exists(), "records without checkpoints are kept"
    (folder,) = complete_checkpoints(tmp_path / "kept")
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    config = RunConfig.model_validate(run_values(data, tmp_path))
    assert size == pytest.approx(checkpoint_bytes(config, num_parameters(config, 257)), rel=0.1)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {path.suffix for path in found} >= {".safetensors", ".pt", ".json", ".yaml", ""}
    wrong = {str(p): oct(m) for p, m in found.items() if m != (0o750 if p.is_dir() else 0o640)}
    assert not wrong
