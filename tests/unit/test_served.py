"""The stand-in for an interpreter (tests/served.py) is started, signalled and ends as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.served import served_python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="no fork survives a GPU's driver")

# What `python -u train.py WORDS` does here.
PROGRAM = """
import os, pathlib, signal, subprocess, sys, time
what, *rest = sys.argv[1:]
def caught(number, frame):  # perhaps within the `print` below, which allows no other
    os.write(1, f"caught {signal.Signals(number).name}\\n".encode())
    sys.exit(75)
if what == "tell":
    print(os.getcwd(), os.environ["OF_TEST"], rest, sys.stdin.read(), __name__)
    print("aside", file=sys.stderr)
    sys.exit(3)
elif what == "wait":
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, caught)
    print(os.getpid(), signal.getsignal(signal.SIGINT) == signal.SIG_IGN)
    time.sleep(60)
elif what == "die":
    os.kill(os.getpid(), int(rest[0]))
elif what == "nested":
    sys.exit(subprocess.run([sys.executable, "train.py", "pid"]).returncode)
elif what == "pid":
    print(os.getppid())
else:
    raise ValueError(what)
"""


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with served_python() as path:
        yield path


@pytest.fixture
def start(python: str, tmp_path: Path) -> Callable[..., subprocess.Popen]:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    pipe = subprocess.PIPE

    def run(*words: object, **options: object) -> subprocess.Popen:
        command = [python, "-u", "train.py", *map(str, words)]
        environment = os.environ | {"OF_TEST": "x\udcffy"}
        streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe, **options}
        return subprocess.Popen(command, cwd=folder, env=environment, text=True, **streams)

    return run


def test_streams_folder_environment_and_code(start, tmp_path):
    process = start("tell", "a b", "", encoding="utf-8", errors="surrogateescape")
    said, aside = process.communicate("given")
    assert said == f"{tmp_path}/a folder x\udcffy ['a b', ''] given __main__\n"
    assert (aside, process.returncode) == ("aside\n", 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on(start, number):
    process = start("wait")
    assert process.stdout.readline().endswith("False\n")
    process.send_signal(number)
    assert process.stdout.readline() == f"caught {number.name}\n"
    assert process.wait(60) == 75


def test_a_signal_that_was_ignored_stays_so(start):
    process = start("wait", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.stdout.readline().endswith("True\n")
    process.kill()
    process.wait(60)


def test_who_kills_it_kills_the_command(start):
    process = start("wait")
    command = int(process.stdout.readline().split()[0])
    assert command != process.pid
    process.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{command}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{command}").exists()
    assert process.stdout.read() == ""  # nobody else holds its outputs


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_dies_of_what_the_command_dies_of(start, number):
    process = start("die", int(number))
    said = process.communicate(timeout=60)[1]
    # Ctrl-C raises an exception, of which a command without a `main` of ours ends with code 1.
    expected = 1 if number == signal.SIGINT else -number
    assert process.returncode == expected, said


def test_an_error_has_its_traceback(start):
    process = start("nonsense")
    assert process.communicate()[1].endswith("ValueError: nonsense\n") and process.returncode == 1


def test_what_a_command_starts_is_served_too(start):
    one, other = start("pid"), start("nested")
    assert one.communicate()[0] == other.communicate()[0] != f"{os.getpid()}\n"


def test_what_is_no_command_of_ours_is_run_by_the_interpreter(python):
    code = "import os, sys; print(os.getppid(), sys.executable)"
    for words, given in ((("-c", code), None), (("-", "x"), code)):
        done = subprocess.run([python, *words], input=given, capture_output=True, text=True)
        assert done.stdout.split() == [str(os.getpid()), sys.executable], done.stderr


def test_many_at_once_and_nothing_is_left(tmp_path):
    (tmp_path / "train.py").write_text("import sys, time; time.sleep(0.1); sys.exit(sys.argv[1])")
    with served_python() as python:
        command = [python, "train.py"]
        codes = [subprocess.Popen([*command, str(n)], cwd=tmp_path) for n in range(4)]
        assert [process.wait(60) for process in codes] == [1] * 4  # a text is code 1
        (tmp_path / "train.py").write_text("print(1, flush=True); import time; time.sleep(60)")
        left = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert left.stdout.readline() == "1\n"
    assert left.wait(60) == 1 and not Path(python).exists()
