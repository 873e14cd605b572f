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
from pathlib import Path

import torch

from tests.conftest import REPOSITORY


def python(
    *words: object, cwd: Path = REPOSITORY, timeout: float = 600, **environment: str
) -> subprocess.CompletedProcess:
    """Run `python WORDS` in the folder `cwd`: `train.py …`, `-m module …` or `-c code`.

    Where there is a GPU, whose driver no fork survives, it is a new interpreter.

    Args:
        environment: variables beside this process's.
    """
    command = [str(word) for word in words]
    variables = os.environ | environment
    if torch.cuda.is_available():
        return subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(command, str(cwd), variables, *map(str, files))
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        said = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        return subprocess.CompletedProcess(command, process.exitcode, *said)


def _run(command: list[str], cwd: str, variables: dict[str, str], *files: str) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
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
