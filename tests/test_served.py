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
import os, signal, sys, time
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
else:
    raise ValueError(what)
"""


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with served_python() as path:
        yield path
    assert not Path(path).exists()


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
    process = start("nonsense")
    assert process.communicate()[1].endswith("ValueError: nonsense\n") and process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on(start, number):
    process = start("wait", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert process.stdout.readline().endswith("True\n"), "what is ignored stays so"
    process.send_signal(number)
    assert process.stdout.readline() == f"caught {number.name}\n"
    assert process.wait(60) == 75


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_of_what_the_command_dies_of(start, number):
    process = start("die", int(number))
    said = process.communicate(timeout=60)[1]
    assert process.returncode == -number, said


def test_what_is_no_command_of_ours_is_run_by_the_interpreter(python):
    code = "import os, sys; print(os.getppid(), sys.executable)"
    done = subprocess.run([python, "-", "x"], input=code, capture_output=True, text=True)
    assert done.stdout.split() == [str(os.getpid()), sys.executable], done.stderr
