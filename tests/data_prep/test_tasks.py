"""The preparation by an array of tasks, in folders that they share; its estimate."""

import shutil
import subprocess

import pytest

from cat_lm.core.errors import TemporaryError, UserError
from data_prep.assemble.output_folder import OutputFolder
from tests.conftest import REPOSITORY
from tests.data_prep.helpers import WISHES, command, made, run, set_flags
from tests.prepared_data import digests


@pytest.mark.long
def test_an_array_of_tasks_makes_what_one_process_makes(tmp_path, sets, expected):
    """Three tasks at once, one of them submitted twice, one never run, on a scratch folder."""
    arguments = (*set_flags(sets, *WISHES), "--out", tmp_path / "out", "--scratch", tmp_path / "s")
    tasks = [
        subprocess.Popen(
            command(*arguments, "--stage", "encode", "--task", f"{task}/3"),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in (0, 1, 1)
    ]
    for process in tasks:
        printed, _ = process.communicate()
        assert process.returncode == 0
        assert "are encoded; continue with --stage assemble" in printed
    done = run(*arguments, "--stage", "assemble", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert made(tmp_path / "out") == expected
    assert not list((tmp_path / "s").iterdir())


def test_a_scratch_folder_that_another_machine_does_not_have_is_an_error(tmp_path, sets, prepare):
    arguments = set_flags(sets, "--scratch", tmp_path / "s", "--stage")
    prepare(tmp_path / "out", *arguments, "encode", "--task", "0/2")
    shutil.move(tmp_path / "s", tmp_path / "of another machine")
    before = digests(tmp_path / "out" / "tokenizer")
    for rest in (("encode", "--task", "1/2"), ("assemble",)):
        with pytest.raises(UserError, match=r"--scratch .* need one that they share"):
            prepare(tmp_path / "out", *arguments, *rest)
    assert digests(tmp_path / "out" / "tokenizer") == before
    shutil.move(tmp_path / "of another machine", tmp_path / "s")
    prepare(tmp_path / "out", *arguments, "assemble")


def test_array_tasks_share_the_folder_and_keep_others_out(tmp_path, sets, prepare):
    encode = (*set_flags(sets), "--stage", "encode", "--task", "0/2")
    with OutputFolder(tmp_path / "out", None).locked(shared=True):
        prepare(tmp_path / "out", *encode)
        with pytest.raises(UserError, match="another preparation is writing to it"):
            prepare(tmp_path / "out", *set_flags(sets, "--stage", "assemble"))
    with (
        OutputFolder(tmp_path / "out", None).locked(),
        pytest.raises(UserError, match="another preparation"),
    ):
        prepare(tmp_path / "out", *encode)


@pytest.mark.parametrize("kind", [TemporaryError, UserError])
def test_a_task_that_cannot_begin_leaves_the_others_their_work(
    tmp_path, sets, prepare, monkeypatch, kind
):
    """Where none had finished a part yet, it removed the folder in which they were encoding."""
    out, encode = tmp_path / "out", (*set_flags(sets), "--stage", "encode", "--task")

    def failing(*_):
        raise kind("failed")

    def encoding(*_):
        before = {path.name for path in (*out.iterdir(), *(out / "unfinished/parts").iterdir())}
        with monkeypatch.context() as patched:
            patched.setattr("data_prep.assemble.pipeline.held_out_fraction", failing)
            with pytest.raises(kind, match="failed"):
                prepare(out, *encode, "1/2")
        assert {
            path.name for path in (*out.iterdir(), *(out / "unfinished/parts").iterdir())
        } == before

    with monkeypatch.context() as patched:
        patched.setattr("data_prep.encode.job.Job.encode", encoding)
        prepare(out, *encode, "0/2")
    prepare(out, *set_flags(sets))


def test_what_may_pass_leaves_what_was_begun(tmp_path, sets, prepare, monkeypatch):
    out, kind = tmp_path / "out", TemporaryError

    def failing(*_):
        raise kind("failed")

    monkeypatch.setattr("data_prep.encode.job.Job.encode", failing)
    with pytest.raises(TemporaryError):
        prepare(out, *set_flags(sets))
    assert (out / "unfinished/parts/plan.json").is_file()


def test_without_file_locks_the_work_is_done_and_a_note_says_so(
    tmp_path, sets, expected, prepare, monkeypatch, capsys
):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    prepare(tmp_path / "out", *set_flags(sets, *WISHES))
    assert "no file locks here (Operation not supported)" in capsys.readouterr().err
    assert made(tmp_path / "out") == expected


def test_the_parts_stay_where_they_are(tmp_path, sets, prepare):
    prepare(tmp_path / "out", *set_flags(sets, "--stage", "encode"))
    with pytest.raises(
        UserError, match=r"its parts in .*/out/unfinished/parts; give the same --scratch"
    ):
        prepare(tmp_path / "out", *set_flags(sets, "--scratch", tmp_path / "s"))


@pytest.mark.parametrize("limit", [("--max-documents", 150), ("--max-bytes", 20_000)])
def test_tasks_with_a_limit_keep_each_others_parts(tmp_path, sets, prepare, limit):
    """Each task's start took the preparation for another one, and removed what there was."""
    arguments = set_flags(sets, *limit)
    whole = digests(prepare(tmp_path / "whole", *arguments))
    parts: dict[str, int] = {}
    for task in range(2):
        out = prepare(tmp_path / "out", *arguments, "--stage", "encode", "--task", f"{task}/2")
        there = {
            path.name: path.stat().st_ino for path in (out / "unfinished/parts").glob("part-*.json")
        }
        assert parts.items() < there.items()
        parts = there
    assert digests(prepare(out, *arguments, "--stage", "assemble")) == whole
