"""The preparation by an array of tasks, in folders that they share; its estimate."""

import json
import re
import shutil
import subprocess

import pytest

from cat_lm.core.errors import TemporaryError, UserError
from cat_lm.core.folders import Busy, hold
from data_prep.assemble import output_folder
from data_prep.assemble.output_folder import OutputFolder
from data_prep.encode.job import Job
from data_prep.sources.base import task_units, units_of
from data_prep.sources.documents import Reading
from data_prep.sources.open import open_source
from tests.conftest import REPOSITORY, write_jsonl
from tests.prepared_data import digests
from tests.unit.data_stages.wishes import WISHES
from tests.unit.test_data_prepare import command, run
from tests.unit.test_data_selection import flags as set_flags


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
        assert "are encoded; go on with --stage assemble" in printed
    done = run(*arguments, "--stage", "assemble", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "out") == expected
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


def test_a_task_that_fails_tidies_under_the_lock_it_began_under(
    tmp_path, sets, prepare, monkeypatch
):
    real = OutputFolder.tidy

    def tidy(folder):
        with pytest.raises(Busy):
            hold(folder.out / output_folder.SETUP_LOCK, wait=False)
        real(folder)

    def failing(*_):
        raise UserError("failed")

    monkeypatch.setattr(OutputFolder, "tidy", tidy)
    monkeypatch.setattr("data_prep.assemble.pipeline.held_out_fraction", failing)
    with pytest.raises(UserError, match="failed"):
        prepare(tmp_path / "out", *set_flags(sets, "--stage", "encode"))
    assert not (tmp_path / "out/unfinished").exists()


def test_a_second_call_leaves_a_running_one_its_work(tmp_path, sets, prepare, monkeypatch):
    out, real = prepare(tmp_path / "out", *set_flags(sets)), Job.encode
    before = digests(out)

    def encode(job, units):
        prepare(out, *set_flags(sets))
        real(job, units)

    monkeypatch.setattr(Job, "encode", encode)
    prepare(out, *set_flags(sets, "--overwrite"))
    assert digests(out) == before


def test_what_may_pass_leaves_what_was_begun(tmp_path, sets, prepare, monkeypatch):
    out, kind = tmp_path / "out", TemporaryError

    def failing(*_):
        raise kind("failed")

    monkeypatch.setattr("data_prep.encode.job.Job.encode", failing)
    with pytest.raises(TemporaryError):
        prepare(out, *set_flags(sets))
    assert (out / "unfinished/parts/plan.json").is_file()
    kind = UserError
    with pytest.raises(UserError):
        prepare(out, *set_flags(sets))
    assert not list(out.iterdir())


def test_without_file_locks_the_work_is_done_and_a_note_says_so(
    tmp_path, sets, expected, prepare, monkeypatch, capsys
):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    output_folder._note_missing_locks.cache_clear()
    prepare(tmp_path / "out", *set_flags(sets, *WISHES))
    assert "no file locks here (Operation not supported)" in capsys.readouterr().err
    assert digests(tmp_path / "out") == expected


def test_units_are_groups_of_files_of_one_split_and_follow_from_the_listing(tmp_path):
    for split, count in (("train", 300), ("validation", 3)):
        (tmp_path / split).mkdir()
        for number in range(count):
            write_jsonl(tmp_path / split / f"{number}.jsonl", ["x" * (20 + number % 7)])
    write_jsonl(tmp_path / "train" / "5.jsonl", ["large"] * 1000)
    source = open_source("slimpajama", str(tmp_path), Reading())
    units = units_of(source)
    assert [part for unit in units for part in unit.parts] == source.parts
    assert all(len({part.split for part in unit.parts}) == 1 for unit in units)
    assert 20 < len(units) < 80
    (large,) = [unit for unit in units if any(part.name == "train/5.jsonl" for part in unit.parts)]
    assert len(large.parts) == 1
    shares = [task_units(units, (task, 3)) for task in range(3)]
    assert sorted((u for share in shares for u in share), key=lambda u: u.number) == units


def test_the_parts_stay_where_they_are(tmp_path, sets, prepare):
    prepare(tmp_path / "out", *set_flags(sets, "--stage", "encode"))
    with pytest.raises(
        UserError, match=r"its parts in .*/out/unfinished/parts; give the same --scratch"
    ):
        prepare(tmp_path / "out", *set_flags(sets, "--scratch", tmp_path / "s"))


def test_the_estimate_writes_nothing(tmp_path, sets, prepare, capsys):
    prepare(tmp_path / "out", *set_flags(sets, "--estimate", "--tokens", "20K"))
    printed = capsys.readouterr().out
    assert "7 units" in printed and "about 20,000 training tokens and " in printed
    assert "disk: about" in printed and "time: about" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own_validation", [True, False])
def test_the_estimate_counts_what_is_held_out(tmp_path, sets, prepare, capsys, own_validation):
    """A budget leaves the held-out documents be; so they may be most of the result."""
    given = set_flags(sets, "--tokens", "2K")
    if not own_validation:
        given = ("--source", "files", "--path", sets, "--tokenizer", "bytes", "--tokens", "2K")
        given += ("--validation-fraction", "0.3")
    out = prepare(tmp_path / "out", *given, "--workers", 1)
    splits = json.loads((out / "manifest.json").read_text())["splits"]
    printed = capsys.readouterr().out
    told = int(re.search(r"([0-9,]+) held-out ones come out", printed)[1].replace(",", ""))
    assert 0.5 < told / splits["validation"]["tokens"] < (6 if own_validation else 1.5)
    size = sum(file.stat().st_size for split in splits for file in out.glob(f"{split}-*"))
    told = float(re.search(r"disk: about ([0-9.]+) kB in", printed)[1]) * 1000
    assert 0.6 < told / size < 1.5


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
