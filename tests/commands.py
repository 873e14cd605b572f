"""Runs a command as `python …` does, in a process forked from one that has imported torch.

The imports of a real interpreter take much longer than most commands of the tests; where they, the
environment or signals are the point, tests start one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import weakref
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NoReturn

import torch

from tests.conftest import REPOSITORY


class Command:
    """A running command, with what tests need of `subprocess.Popen`.

    Where there is a GPU, whose driver no fork survives, it is a new interpreter.

    Args:
        words: `train.py …`, `-m module …` or `-c code`.
        apart: keep the two outputs apart; else stderr goes where stdout goes.
        log: the file that gets stdout; None: a temporary one.
        executable: what the command starts as `sys.executable`.
        environment: variables beside this process's.
    """

    def __init__(
        self,
        *words: object,
        cwd: Path = REPOSITORY,
        apart: bool = False,
        log: Path | None = None,
        executable: str = sys.executable,
        **environment: str,
    ) -> None:
        self.words = [str(word) for word in words]
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        self._files[0] = log or self._files[0]
        files = self._files if apart else [self._files[0]] * 2
        variables = os.environ | environment
        self._process = preloaded().Process(
            target=_run, args=(self.words, str(cwd), variables, executable, *map(str, files))
        )
        self._process.start()
        # Python's end would wait for what a failed test has left behind.
        weakref.finalize(self, self._process.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = 600) -> int:
        """Wait for the end and return the exit code, which is -N after signal N."""
        self._process.join(timeout)
        if self.poll() is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self.words, timeout)
        return self.poll()

    def said(self, file: int = 0) -> str:
        """Return what it has written so far: 0 stdout, 1 stderr."""
        path = self._files[file]
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def finish(command: Command, code: int = 0) -> str:
    """Wait for `command`, which must end with `code`; return what it said."""
    ended = command.wait()
    assert ended == code, command.said()
    return command.said()


def python(
    *words: object, cwd: Path = REPOSITORY, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess:
    """Run `python WORDS` in the folder `cwd`; `environment` are variables beside this process's."""
    command = Command(*words, cwd=cwd, apart=True, **environment)
    code = command.wait(timeout)
    return subprocess.CompletedProcess(command.words, code, command.said(0), command.said(1))


def preloaded() -> BaseContext:
    """Processes that have imported what most commands need; with a GPU, new interpreters."""
    multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])
    return multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")


def _run(
    command: list[str], cwd: str, variables: dict[str, str], executable: str, *files: str
) -> None:
    streams = [os.open(os.devnull, os.O_RDONLY)]
    streams += [os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in files]
    be_python(command, cwd, variables, streams, executable)


def be_python(
    command: list[str], cwd: str, variables: dict[str, str], streams: list[int], executable: str
) -> NoReturn:
    """Run `python COMMAND` in this process, with these descriptors as stdin, stdout and stderr."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # The streams of the process forked from remember whether its own files could be sought.
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    how = {"buffering": 1, "encoding": "utf-8", "closefd": False}
    sys.stdout = os.fdopen(1, "w", errors="surrogateescape", **how)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", **how)
    sys.executable = executable
    os.chdir(cwd)
    os.environ.clear()  # a forked process has the environment that the first of them was given
    os.environ.update(variables)
    torch.set_num_threads(1)
    # As a new interpreter would find modules and installed packages.
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [cwd, *(path for path in paths if path and path not in sys.path)]
    code: object = 1
    try:
        _execute(command)
        code = 0
    except SystemExit as exit_:
        code = exit_.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    sys.exit(code or 0)  # multiprocessing's end, which gives semaphores back


def _execute(command: list[str]) -> None:
    first, *rest = command
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)  # or runpy would warn that it has been imported before
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(first, run_name="__main__")
