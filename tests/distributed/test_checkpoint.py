"""Saves that are cut off or fail at each of their steps, and folders that hold another run."""

from __future__ import annotations

import contextlib
import errno
import os
import pkgutil
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from cat_lm.config import RunConfig
from cat_lm.core.errors import UserError
from cat_lm.training.checkpoint import complete_checkpoints, find_checkpoint
from tests.distributed.ranks import run_on_ranks
from tests.distributed.trainers import opened
from tests.runs import losses, run_values

# Every action of a save and a prune that touches the disk.
ACTIONS = (
    "cat_lm.training.checkpoint.run.prepare",
    "cat_lm.training.checkpoint.optimizer_state.full_precision_weights",
    "cat_lm.training.checkpoint.optimizer_state.write_state",
    "cat_lm.training.checkpoint.optimizer_state.save_file",
    "cat_lm.training.checkpoint.optimizer_state.save_random_states",
    "cat_lm.training.checkpoint.run.save_file",
    "shutil.copytree",
    "cat_lm.training.checkpoint.optimizer_state.check_stored",
    "cat_lm.training.checkpoint.run.flush",
    "cat_lm.training.checkpoint.run.checksum",
    "cat_lm.training.checkpoint.optimizer_state.read_index",
    "cat_lm.training.checkpoint.run.sync_directory",
    "cat_lm.training.checkpoint.files.write_marker",
    "os.rename",
    "cat_lm.training.checkpoint.run.remove_temporary",
    "cat_lm.training.checkpoint.run.write_text",
    "cat_lm.training.checkpoint.files.prune",
    "cat_lm.training.checkpoint.files.remove_temporary",
)


class Killed(BaseException):
    """Ends a run without any of its error handling, as SIGKILL does."""


@contextmanager
def failing(action: str, after: bool, error: BaseException):
    """`action` raises `error` instead of its work, or after it."""
    original = pkgutil.resolve_name(action)

    def fail(*arguments, **options):
        if after:
            original(*arguments, **options)
        raise error

    with mock.patch(action, fail):
        yield


def train(ranks, values: dict, saving=None, at_step: int = 0) -> None:
    """Runs train.py's Trainer; the save of `at_step` happens inside the context `saving()`."""
    from train import Trainer

    class Watched(Trainer):
        def save(self):
            if saving is None or self.step != at_step:
                return super().save()
            with saving():
                return super().save()

    with opened(Watched, ranks, values) as trainer:
        trainer.run()


def killed_everywhere(ranks, data: str, folder: str, after: bool) -> list[str]:
    """Kills the third save, which also prunes, before or after each action; then goes on."""
    done = []
    for number, action in enumerate(ACTIONS):
        run = Path(folder) / str(number)
        values = run_values(data, run, max_steps=4, resume="auto")
        values["checkpoint"] = {"every_steps": 1, "keep_last": 2}
        values["validation"]["every_steps"] = 4
        try:
            train(ranks, values, lambda a=action: failing(a, after, Killed()), at_step=3)
        except Killed:
            done.append(run.name)
        newest = find_checkpoint(run)
        assert newest.name in ("step-00000002", "step-00000003"), (action, newest)
        train(ranks, values)
        names = {path.name for path in (run / "checkpoints").iterdir()}
        assert names == {".lock", "latest", "step-00000003", "step-00000004"}, (action, names)
    return done


# After one action is nearly before the next.
@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_save_killed_at_any_action_costs_nothing(after, tiny_corpus, tmp_path):
    run_on_ranks(train, 1, reference := run_values(tiny_corpus, tmp_path / "whole", max_steps=4))
    assert reference["validation"]["every_steps"] == 6
    runs = run_on_ranks(killed_everywhere, 1, str(tiny_corpus), str(tmp_path), after)[0]
    assert len(runs) == len(ACTIONS)
    steps = [row for row in losses(tmp_path / "whole") if len(row) == 3]
    for run in runs:
        assert [row for row in losses(tmp_path / run) if len(row) == 3] == steps, run


FAILING_ON_ONE_RANK = (
    "torch.save",
    "cat_lm.training.checkpoint.run.os.fsync",
    "cat_lm.training.checkpoint.optimizer_state.save_file",
)


def failed_on_last_rank(ranks, data: str, folder: str) -> list[str]:
    """The messages of runs in which one action of a save fails on the last rank alone."""
    messages = []
    for number, action in enumerate(FAILING_ON_ONE_RANK):
        values = run_values(data, Path(folder) / str(number), max_steps=4)
        values["checkpoint"] = {"every_steps": 2, "keep_last": 2}
        full = OSError(28, "No space left on device")
        is_last = ranks.rank == ranks.world_size - 1

        @contextmanager
        def saving(action=action, full=full, is_last=is_last):
            original = pkgutil.resolve_name(action)

            def fail(*arguments, **options):
                if is_last:
                    raise full
                return original(*arguments, **options)

            with mock.patch(action, fail):
                yield

        try:
            train(ranks, values, saving, at_step=4)
            messages.append("")
        except UserError as error:
            messages.append(str(error))
        left = [path.name for path in complete_checkpoints(Path(folder) / f"{number}/checkpoints")]
        assert left == ["step-00000002"], left
    return messages


def test_a_save_that_fails_on_one_rank_ends_all_of_them(tiny_corpus, tmp_path):
    for messages in run_on_ranks(failed_on_last_rank, 2, str(tiny_corpus), str(tmp_path)):
        for message in messages:
            # The system's words, or ours where the file is known.
            assert "could not be written" in message
            assert "No space left" in message or ": the disk is full" in message
            assert "newest complete one: step-00000002" in message


def paths(ranks, data: str, folder: str) -> list[str]:
    """What starting from a named checkpoint answers, in its own folder and in others."""
    first, other = Path(folder) / "first", Path(folder) / "other"
    values = run_values(data, first, max_steps=6)
    values["checkpoint"] = {"every_steps": 2, "keep_last": 3}
    train(ranks, values)
    start = first / "checkpoints/step-00000002"
    answers = []
    for output_dir, changes in ((first, {}), (other, {"optimizer": {"lr": 1e-4}}), (other, {})):
        again = run_values(data, output_dir, max_steps=6, resume=str(start))
        again["checkpoint"] = values["checkpoint"]
        for section, content in changes.items():
            again[section] |= content
        try:
            train(ranks, again)
            answers.append("trained")
        except UserError as error:
            answers.append(str(error))
    return answers


def test_a_named_checkpoint_starts_a_run_of_its_own(tiny_corpus, tmp_path):
    own, branched, again = run_on_ranks(paths, 1, str(tiny_corpus), str(tmp_path))[0]
    assert "already holds step-00000006; train.resume=auto goes on from the newest" in own
    assert branched == "trained" and "already holds step-00000006" in again
    log = (tmp_path / "other/train.log").read_text()
    assert "optimizer.lr: was 0.003, is 0.0001" in log
    first, other = losses(tmp_path / "first"), losses(tmp_path / "other")
    assert [row[0] for row in other if len(row) == 3] == [3, 4, 5, 6]
    assert other[0] == first[2] and other[1] != first[3]  # step 3 reads the same weights
    # The checkpoint it began with may be gone: the run's own records still load.
    shutil.rmtree(tmp_path / "first")
    from cat_lm.config import load_config

    assert load_config(tmp_path / "other/config.yaml").train.resume.endswith("step-00000002")


def forked(ranks, data: str, folder: str) -> list[list[tuple]]:
    """What a fork has recorded when it is killed, started again, stopped and continued."""
    first, fork = Path(folder) / "first", Path(folder) / "fork"
    train(ranks, run_values(data, first, max_steps=4) | {"checkpoint": {"every_steps": 2}})
    recorded = []

    def go_on(resume: Path | str, steps: int, killed: bool = False) -> None:
        values = run_values(data, fork, max_steps=steps, resume=str(resume))
        values["checkpoint"] = {"every_steps": 2}
        # Of an action of all ranks: none waits for another.
        saving = (lambda: failing(ACTIONS[1], False, Killed())) if killed else None
        with contextlib.suppress(Killed):
            train(ranks, values, saving, at_step=6)
        ranks.on_rank_zero(lambda: recorded.append(losses(fork)))

    go_on(start := first / "checkpoints/step-00000004", 6, killed=True)
    go_on(start, 6)
    go_on("auto", 8)
    return recorded


def test_a_fork_s_records_are_its_own(tiny_corpus, tmp_path):
    """Others' of steps before its start, and those of a start without a checkpoint, are put aside.

    Once it has a checkpoint of its own, `auto` goes on from that and keeps its records.
    """
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


def two_at_once(ranks, data: str, folder: str) -> str:
    from cat_lm.training.checkpoint.run import Checkpoints

    values = run_values(data, Path(folder) / "run")
    held = Checkpoints(Path(folder) / "run", RunConfig.model_validate(values), ranks)
    try:
        train(ranks, values)
    except UserError as error:
        return str(error)
    finally:
        held.close()
    return ""


def test_two_processes_do_not_train_in_one_folder(tiny_corpus, tmp_path):
    message = run_on_ranks(two_at_once, 1, str(tiny_corpus), str(tmp_path))[0]
    assert "another process trains in it" in message


def test_a_file_system_without_locks_is_no_reason_not_to_train(tmp_path):
    from cat_lm.training.checkpoint.run import Checkpoints
    from cat_lm.training.distributed import Ranks

    config = RunConfig.model_validate(run_values(tmp_path, tmp_path / "run"))
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "not implemented")):
        Checkpoints(tmp_path / "run", config, Ranks(0, 0, 1, torch.device("cpu"))).close()
    assert (tmp_path / "run/checkpoints").is_dir()


def test_records_of_a_run_without_checkpoints_are_put_aside(tiny_corpus, tmp_path):
    values = run_values(tiny_corpus, tmp_path / "run", max_steps=3)
    run_on_ranks(train, 1, values)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "run/checkpoints")
    run_on_ranks(train, 1, values)
    assert (tmp_path / "run/metrics.1.jsonl").read_text() == before


def with_umask(ranks, values: dict, mask: int) -> None:
    before = os.umask(mask)
    try:
        train(ranks, values)
    finally:
        os.umask(before)


def test_a_checkpoint_has_the_modes_of_new_files(tiny_corpus, tmp_path):
    """Whatever safetensors makes and the tokenizer's own files have: a group can export it."""
    data = shutil.copytree(tiny_corpus, tmp_path / "data")
    for path in (data / "tokenizer").rglob("*"):
        path.chmod(0o600)
    (data / "tokenizer").chmod(0o700)
    run_on_ranks(with_umask, 1, run_values(data, tmp_path / "run", max_steps=1), 0o027)
    (folder,) = complete_checkpoints(tmp_path / "run/checkpoints")
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert {path.suffix for path in found} >= {".safetensors", ".pt", ".json", ".yaml", ""}
    wrong = {str(p): oct(m) for p, m in found.items() if m != (0o750 if p.is_dir() else 0o640)}
    assert not wrong


@pytest.mark.parametrize("content", ["[]", '{"files": 3}', "{", '{"files": {"gone": 1}}'])
def test_markers_that_mean_nothing(tmp_path, content):
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "complete.json").write_text(content)
    assert complete_checkpoints(tmp_path) == []
