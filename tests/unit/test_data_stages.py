"""Parts and shards: kills at every step, arrays of tasks, damage, doubled work, malformed lines."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cat_lm.data import TokenCorpus
from cat_lm.errors import UserError
from data_prep import output, parts
from data_prep.documents import Reading
from data_prep.sources import open_source
from data_prep.units import task_units, units_of
from tests.conftest import REPOSITORY, write_jsonl
from tests.unit.test_data_prepare import command, digests, flags, run, texts_of
from tests.unit.test_data_selection import flags as set_flags
from tests.unit.test_data_selection import write_sets

# Several shards, a set that is gone through twice, and a second round of encoding.
WISHES = ("--tokens", "60K", "--mixture", "Large=2,Middle=1,Small=1", "--shard-tokens", "9K")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory, sets, prepare):
    out = prepare(tmp_path_factory.mktemp("whole") / "out", *set_flags(sets, *WISHES))
    found = digests(out)
    assert len(found) > 2 * 6
    return found


def dying(out, arguments, renames):
    """Prepares in a process that dies at a rename, half of the time just before it."""
    from data_prep import planning
    from data_prep.pipeline import prepare
    from data_prep.prepare import parse_arguments

    planning.MARGIN /= 5  # the estimate comes out too low
    real, left = os.replace, [renames]

    def replace(*given):
        left[0] -= 1
        if left[0] == 0 and renames % 2:
            os._exit(9)
        real(*given)
        if left[0] == 0:
            os._exit(9)

    os.replace = replace
    prepare(parse_arguments(["--out", str(out), *map(str, arguments)]))
    os._exit(0)


def die_at(out, arguments, renames):
    process = multiprocessing.get_context("fork").Process(
        target=dying, args=(out, arguments, renames)
    )
    process.start()
    process.join()
    assert process.exitcode in (0, 9)
    return process.exitcode == 0


def test_killed_at_one_rename_after_the_other(tmp_path, sets, expected):
    """Each run goes on where the one before was killed, a few steps further."""
    for scratch in (False, True):
        out = tmp_path / f"out{scratch}"
        more = ("--scratch", tmp_path / "scratch") if scratch else ()
        renames = 1 + scratch
        while not die_at(out, set_flags(sets, *WISHES, *more), renames):
            if not (out / "manifest.json").exists():
                with pytest.raises(UserError, match="no finished data"):
                    TokenCorpus.open(out, "train")
            renames += 2
        assert renames > 8
        assert digests(out) == expected
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("renames", range(30, 48, 3))
def test_killed_once_late(tmp_path, sets, expected, renames):
    """While parts are finished, between the stages, and while shards are."""
    out = tmp_path / "out"
    assert not die_at(out, set_flags(sets, *WISHES), renames)
    assert die_at(out, set_flags(sets, *WISHES), 10**9)
    assert digests(out) == expected


def test_killed_at_any_moment_and_started_again(tmp_path, sets):
    """The kill that leaves no process time for anything, at random, for one worker and for two."""
    tokenizer = ("--tokenizer", "train:sentencepiece:400", "--shard-tokens", "1K")
    arguments = set_flags(sets, *tokenizer, "--mixture", "Large=1,Small=1", "--tokens", "8K")
    start = time.monotonic()
    assert run(*arguments, "--out", tmp_path / "whole", "--workers", 1).returncode == 0
    whole = time.monotonic() - start
    expected = digests(tmp_path / "whole")
    rng = random.Random()
    survivors = []
    for attempt in range(6):
        out = tmp_path / "killed"
        workers = 1 + attempt % 2
        process = subprocess.Popen(
            command(*arguments, "--out", out, "--workers", workers),
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(rng.uniform(0.2, 1.1) * whole)
        process.send_signal(signal.SIGKILL)  # the parent alone: its workers must end by themselves
        process.wait()
        survivors.append(process.pid)
        # Whatever it got to: finished data are whole, and others are not taken for finished.
        if (out / "manifest.json").exists():
            assert {k: v for k, v in digests(out).items() if k != "unfinished.json"}.keys() >= (
                expected.keys()
            )
            shutil.rmtree(out)
        elif out.exists():
            with pytest.raises(UserError, match="no finished data"):
                TokenCorpus.open(out, "train")
    done = run(*arguments, "--out", tmp_path / "killed", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "killed") == expected
    deadline = time.monotonic() + 10
    while any(map(group_alive, survivors)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(group_alive, survivors))


def group_alive(group):
    """Whether a process of the group still runs (one that only waits to be reaped does not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return True
    return False


def test_killed_before_the_last_file_is_removed(tmp_path, sets, expected, prepare, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "tidy", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "out", *set_flags(sets, *WISHES))
    assert (tmp_path / "out" / "parts").is_dir()
    monkeypatch.undo()
    prepare(tmp_path / "out", *set_flags(sets, *WISHES))
    assert digests(tmp_path / "out") == expected


class Killed(BaseException):
    """Passes through all that handles errors."""


def killed(*_):
    raise Killed


@pytest.mark.parametrize(
    ("until", "then", "stride"),
    [("finish", ("--sets", "Small"), 1), ("tidy", ("--seed", 1, "--sets", "Small"), 5)],
)
def test_killed_at_any_step_of_replacing_other_data(
    tmp_path, sets, prepare, monkeypatch, until, then, stride
):
    """Nothing that other arguments have left is taken for the new ones' own."""
    out, kept, then = tmp_path / "out", tmp_path / "kept", set_flags(sets, *then)
    expected = digests(prepare(tmp_path / "whole", *then))
    real = {name: getattr(os, name) for name in ("unlink", "rmdir", "replace")}

    def overwrite(steps):
        left = [steps]

        def counted(name):
            def act(*given, **more):
                real[name](*given, **more)
                left[0] -= 1
                if left[0] == 0:
                    raise Killed

            return act

        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr("data_prep.pipeline.Plan.load", killed)
            for name in real:
                patch.setattr(os, name, counted(name))
            prepare(out, *then, "--overwrite")
        return left[0] > 0

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(output, until, killed)
        prepare(out, *set_flags(sets, "--sets", "Large"))
    shutil.copytree(out, kept)
    for steps in range(1, 100, stride):
        whole = overwrite(steps)
        try:
            prepare(out, *then)
        except UserError as error:
            assert "--overwrite" in str(error)
            prepare(out, *then, "--overwrite")
        assert digests(out) == expected, f"after {steps} steps"
        if whole:
            break
        shutil.rmtree(out)
        shutil.copytree(kept, out)
    assert 10 < steps < 90


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
    for stage in (("encode", "--task", "1/2"), ("assemble",)):
        with pytest.raises(UserError, match=r"--scratch .* need one that they share"):
            prepare(tmp_path / "out", *arguments, *stage)
    assert digests(tmp_path / "out" / "tokenizer") == before
    shutil.move(tmp_path / "of another machine", tmp_path / "s")
    prepare(tmp_path / "out", *arguments, "assemble")


def test_array_tasks_share_the_folder_and_keep_others_out(tmp_path, sets, prepare):
    encode = (*set_flags(sets), "--stage", "encode", "--task", "0/2")
    with output.locked(tmp_path / "out", shared=True):
        prepare(tmp_path / "out", *encode)
        with pytest.raises(UserError, match="another preparation is writing to it"):
            prepare(tmp_path / "out", *set_flags(sets, "--stage", "assemble"))
    with output.locked(tmp_path / "out"), pytest.raises(UserError, match="another preparation"):
        prepare(tmp_path / "out", *encode)


def test_without_file_locks_the_work_is_done_and_a_note_says_so(
    tmp_path, sets, expected, prepare, monkeypatch, capsys
):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("data_prep.locks.fcntl.flock", unsupported)
    monkeypatch.setattr("data_prep.locks._noted", False)
    prepare(tmp_path / "out", *set_flags(sets, *WISHES))
    assert capsys.readouterr().err.count("no file locks here (Operation not supported)") == 1
    assert digests(tmp_path / "out") == expected


@pytest.mark.parametrize("kind", ["bin", "docs", "json"])
def test_a_damaged_part_is_noticed_and_made_again(tmp_path, sets, expected, prepare, capsys, kind):
    out = tmp_path / "out"
    prepare(out, *set_flags(sets, *WISHES, "--stage", "encode"))
    damaged, cut, gone = (out / "parts" / f"part-0000{n}.0.{kind}" for n in (1, 2, 3))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    prepare(out, *set_flags(sets, *WISHES))
    assert ("1 damaged parts are made again" in capsys.readouterr().out) == (kind != "json")
    assert digests(out) == expected


def test_a_part_that_is_damaged_while_shards_are_written_is_made_again(
    tmp_path, sets, expected, prepare, monkeypatch
):
    out = tmp_path / "out"

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("data_prep.assemble.write_shard", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, *set_flags(sets, *WISHES))
    damaged, gone = (out / "parts" / f"part-0000{n}.0.bin" for n in (0, 4))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    gone.unlink()
    prepare(out, *set_flags(sets, *WISHES))
    assert digests(out) == expected


def test_parts_of_other_work_are_never_taken(tmp_path, sets, prepare):
    """Even where someone has put them there."""
    out = tmp_path / "out"
    prepare(out, *set_flags(sets, "--stage", "encode"))
    prepare(tmp_path / "other", *set_flags(sets, "--sets", "Large", "--stage", "encode"))
    for file in (tmp_path / "other" / "parts").glob("part-*"):
        shutil.copy(file, out / "parts")
    prepare(out, *set_flags(sets))
    assert digests(out) == digests(prepare(tmp_path / "whole", *set_flags(sets)))


@pytest.mark.parametrize("own_validation", [True, False])
def test_parts_go_when_the_shards_that_read_them_are_done(
    tmp_path, sets, prepare, monkeypatch, own_validation
):
    left = []
    real = parts.remove_part

    def remove(*given):
        real(*given)
        folder = tmp_path / "out"
        left.append((len(list(folder.glob("parts/*.bin"))), len(list(folder.glob("train-*.idx")))))

    monkeypatch.setattr("data_prep.assemble.remove_part", remove)
    arguments = set_flags(sets, "--shard-tokens", "5K")
    if not own_validation:  # held-out documents come from all parts
        arguments = ("--source", "files", "--path", sets / "train", *arguments[4:])
    prepare(tmp_path / "out", *arguments)
    numbers, shards = zip(*left, strict=True)
    assert list(numbers) == [*range(6, 0, -1), 0][not own_validation :]
    assert list(shards) == sorted(shards) and shards[-4] < shards[-1]


def test_malformed_lines_are_counted_listed_and_limited(tmp_path, prepare, capsys):
    for number in range(3):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{number} {n}" for n in range(40)])
    with open(tmp_path / "1.jsonl", "a") as stream:
        stream.write('{"\\ud800": 1}\n{"text": 5}\n')
    arguments = ("--source", "files", "--path", tmp_path, "--tokenizer", "bytes", "--workers", 1)
    complaint = r"2 of 122 records are malformed, more than .* 0.01% .* keys are \\ud800 "
    with pytest.raises(UserError, match=complaint):
        prepare(tmp_path / "out", *arguments)
    out = prepare(tmp_path / "out", *arguments, "--max-malformed", "2%")
    assert "left out: 2 malformed records, see malformed.log" in capsys.readouterr().out
    lines = (out / "malformed.log").read_text().splitlines()
    assert [line.split(": ")[0] for line in lines] == ["1.jsonl:41", "1.jsonl:42"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["malformed_documents"] == 2
    assert sum(manifest["splits"][s]["documents"] for s in manifest["splits"]) == 120
    other = prepare(tmp_path / "2", *arguments, "--max-malformed", 2)
    assert digests(other) == digests(out), "the limit decides nothing else"


def test_input_that_is_nothing_but_malformed_is_refused_before_the_work(tmp_path, prepare):
    path = write_jsonl(tmp_path / "x.jsonl", ["a"] * 300)
    with pytest.raises(UserError, match=r"x\.jsonl:1: no text under the key 'body'"):
        prepare(tmp_path / "out", *flags(path, "--text-key", "body", "--max-malformed", "100%"))
    assert not list((tmp_path / "out").iterdir())


def test_the_parts_stay_where_they_are(tmp_path, sets, prepare):
    prepare(tmp_path / "out", *set_flags(sets, "--stage", "encode"))
    with pytest.raises(UserError, match=r"its parts in .*/out/parts; give the same --scratch"):
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


@pytest.mark.parametrize(("kind", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_signals_stop_at_once_and_the_same_command_continues(tmp_path, shared_data, kind, workers):
    source = ("--source", "slimpajama", "--path", shared_data / "slimpajama_sample")
    arguments = (*source, "--tokenizer", "bytes", "--max-bytes", 3_000_000)
    arguments += ("--out", tmp_path / "out", "--workers", workers)
    process = subprocess.Popen(
        command(*arguments),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not list(tmp_path.glob("out/parts/.part-*.bin.*.tmp")):
        time.sleep(0.01)
    process.send_signal(kind)
    _, complaint = process.communicate()
    assert process.returncode == 130, complaint
    assert "Traceback" not in complaint and complaint.count("interrupted") == 1
    assert not list(tmp_path.rglob(".*.tmp"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert TokenCorpus.open(tmp_path / "out", "train").num_bytes >= 3_000_000


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


def test_a_worker_that_dies_ends_the_run_with_a_line(tmp_path, sets):
    script = (
        "import os, sys\n"
        "from data_prep import encode\n"
        "from data_prep.workers import run_tasks\n"
        "from tests.unit.test_data_stages import deadly\n"
        "from cat_lm.errors import command\n"
        "command(lambda: print(list(run_tasks(deadly, [1, 2, 9], 2, print))))()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "a worker process died (exit code -9), most likely for want of memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    script = (
        "from data_prep.workers import run_tasks\n"
        "from tests.unit.test_data_stages import endless\n"
        f"list(run_tasks(endless, [{str(tmp_path)!r}] * 2, 2, print))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, start_new_session=True
    )
    while len(list(tmp_path.iterdir())) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while group_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_alive(process.pid)


def endless(folder, report):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(1000)


def deadly(task, report):
    if task == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def test_texts_come_whole_through_parts_and_shards(tmp_path, sets, prepare):
    out = prepare(tmp_path / "out", *set_flags(sets, "--shard-tokens", "3K"))
    files = sorted(sets.glob("train/*/*.jsonl"))
    texts = [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]
    assert list(texts_of(out, "train")) == texts
