"""The preparation killed at every step, interrupted, and without one of its workers."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.manifest import read_manifest
from cat_lm.data.opening import open_corpus
from data_prep.assemble import output_folder
from tests.conftest import REPOSITORY
from tests.data_prep.helpers import WISHES, command, made, run, set_flags


def dying(out, arguments, renames):
    """Prepares in a process that dies at a rename, half of the time just before it."""
    from data_prep.assemble.pipeline import prepare
    from data_prep.encode import plan
    from data_prep.prepare import parse_arguments

    plan.MARGIN /= 5  # the estimate comes out too low
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


@pytest.mark.long
def test_killed_at_one_rename_after_the_other(tmp_path, sets, expected):
    """Each run goes on where the one before was killed, a few steps further."""
    for scratch in (False, True):
        out = tmp_path / f"out{scratch}"
        more = ("--scratch", tmp_path / "scratch") if scratch else ()
        renames = 1 + scratch
        while not die_at(out, set_flags(sets, *WISHES, *more), renames):
            if not (out / "manifest.json").exists():
                with pytest.raises(UserError, match="no finished data"):
                    open_corpus(out, "train")
            renames += 2
        assert renames > 8
        assert made(out) == expected
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize(
    "renames", [21, 33, *(pytest.param(n, marks=pytest.mark.nightly) for n in (24, 27, 30, 36, 39))]
)
def test_killed_once_late(tmp_path, sets, expected, renames):
    """While parts are finished, between the stages, and while shards are."""
    out = tmp_path / "out"
    assert not die_at(out, set_flags(sets, *WISHES), renames)
    assert die_at(out, set_flags(sets, *WISHES), 10**9)
    assert made(out) == expected


def group_alive(group):
    """Whether a process of the group still runs (one that only waits to be reaped does not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return True
    return False


@pytest.mark.parametrize("is_moved", [False, True])
def test_what_is_killed_while_it_is_moved_is_not_made_again(
    tmp_path, sets, prepare, monkeypatch, is_moved
):
    out = prepare(tmp_path / "out", *set_flags(sets))
    then, real = set_flags(sets, "--sets", "Small", "--overwrite"), output_folder.OutputFolder

    def killed(folder, replace=real._replace_data):
        if is_moved:
            replace(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(real, "_replace_data", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, *then)
    monkeypatch.setattr("data_prep.assemble.pipeline._plan_job", killed)
    prepare(out, *then)
    assert read_manifest(out)["arguments"]["sets"] == ["Small"]
    assert not list(out.glob(".*lock")) and not (out / "unfinished").exists()


class Killed(BaseException):
    """Passes through all that handles errors."""


def killed(*_):
    raise Killed


def test_killed_while_earlier_data_are_removed_leaves_no_manifest(
    tmp_path, sets, prepare, monkeypatch
):
    out, then = tmp_path / "out", set_flags(sets, "--sets", "Small")
    expected = made(prepare(tmp_path / "whole", *then))
    prepare(out, *set_flags(sets))
    real = output_folder.remove_files

    def remove(folder, names):
        if folder == out:
            raise Killed
        real(folder, names)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(output_folder, "remove_files", remove)
        prepare(out, *then, "--overwrite")
    assert not (out / "manifest.json").exists()
    prepare(out, *then)
    assert made(out) == expected


@pytest.mark.long
@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.nightly)])
def test_killed_at_any_step_of_replacing_other_data(tmp_path, sets, prepare, monkeypatch, stride):
    """The earlier data are whole, or are continued; never a mixture of both."""
    out, kept, then = tmp_path / "out", tmp_path / "kept", set_flags(sets, "--sets", "Small")
    expected = made(prepare(tmp_path / "whole", *then))
    old = made(prepare(kept, *set_flags(sets, "--shard-tokens", "20K")))
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
            for name in real:
                patch.setattr(os, name, counted(name))
            prepare(out, *then, "--overwrite")
        return left[0] > 0

    for steps in range(1, 400, stride):
        shutil.copytree(kept, out)
        is_done = overwrite(steps)
        if (out / "manifest.json").exists():
            found = {k: v for k, v in made(out).items() if not k.startswith("unf")}
            assert found in (old, expected), f"after {steps} steps"
        try:
            prepare(out, *then)
        except UserError as error:
            assert "--overwrite" in str(error)
            prepare(out, *then, "--overwrite")
        assert made(out) == expected, f"after {steps} steps"
        shutil.rmtree(out)
        if is_done:
            break
    assert 10 < steps < 390


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "workers"),
    [pytest.param(signal.SIGINT, 1, marks=pytest.mark.long), (signal.SIGTERM, 2)],
)
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
    while process.poll() is None and not list(
        tmp_path.glob("out/unfinished/parts/.part-*.bin.*.tmp")
    ):
        time.sleep(0.01)
    process.send_signal(kind)
    _, complaint = process.communicate()
    assert process.returncode == 130, complaint
    assert "Traceback" not in complaint and complaint.count("interrupted") == 1
    assert not list(tmp_path.rglob(".*.tmp"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert open_corpus(tmp_path / "out", "train").num_bytes >= 3_000_000


def test_a_worker_that_dies_ends_the_run_with_a_line(tmp_path, sets):
    script = (
        "import os, sys\n"
        "from data_prep.encode import encoding\n"
        "from data_prep.common.workers import run_tasks\n"
        "from tests.data_prep.test_kills import deadly\n"
        "from cat_lm.core.errors import command\n"
        "command(lambda: print(list(run_tasks(deadly, [1, 2, 9], 2, print))))()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "a worker process died, most likely for want of memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    script = (
        "from data_prep.common.workers import run_tasks\n"
        "from tests.data_prep.test_kills import endless\n"
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
