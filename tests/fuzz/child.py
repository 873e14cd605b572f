"""One command in a forked process: started as from a shell, watched, and ended with its children.

The process that forks must have one thread. It becomes the parent of whatever the command leaves.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import importlib
import os
import resource
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.fuzz.privileges import end_with_parent

LIMIT_SECONDS = 30.0
PATIENCE = 4
LIMIT_BYTES = 2 * 2**30
MOST_OUTPUT = 200_000  # bytes that are read of each stream
MOST_PROCESSES = 600
MOST_FILE_BYTES = 2 * 2**30
GRACE_SECONDS = 5.0  # for processes that end when they notice that their parent has
PROMPT = "the command asked for input: "


@dataclass
class Ended:
    """How a command ended.

    Attributes:
        code: its exit code; minus a signal's number; None where it had to be killed.
        seconds: wall clock.
        bytes: resident memory at its peak, over what it had when it was forked.
        trouble: `hang`, `memory` or `left behind` (processes), where it was that.
        stderr, stdout: texts.
    """

    code: int | None
    seconds: float
    bytes: int
    stdout: str
    stderr: str
    trouble: list[str] = field(default_factory=list)


def run_command(
    module: str,
    line: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    logs: Path,
    stdin: str = "",
    limit_seconds: float = LIMIT_SECONDS,
    limit_bytes: int = LIMIT_BYTES,
) -> Ended:
    """Runs `python -m MODULE LINE` in `folder`; `logs` gets its output.

    A command hangs that has not ended after `limit_seconds` and has computed for most of them: on
    a busy machine it is given more, up to `PATIENCE` times as much.
    """
    logs.mkdir(parents=True, exist_ok=True)
    (logs / "stdin").write_text(stdin, encoding="utf-8")
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        names = [Path(f"/proc/self/task/{t}/comm").read_text().strip() for t in threads]
        raise RuntimeError(f"threads beside the first: {names}")
    gc.freeze()
    base = _used(psutil.Process())
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be_the_command(module, line, folder, environment, logs)
    return _watch(pid, start, base, logs, limit_seconds, limit_bytes)


def _be_the_command(
    module: str, line: Sequence[str], folder: Path, environment: dict[str, str], logs: Path
) -> None:
    code = 70
    try:
        _set_up(module, line, folder, environment, logs)
        code = _main(module)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _set_up(
    module: str, line: Sequence[str], folder: Path, environment: dict[str, str], logs: Path
) -> None:
    end_with_parent(signal.SIGKILL)
    os.setsid()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        handle = os.open(logs / name, flags, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the template's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_NPROC, (MOST_PROCESSES, MOST_PROCESSES))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    _note_modules_at_exit(logs / "modules")
    sys.argv = [module, *line]
    asked = builtins.input

    def note_input(prompt: object = "") -> str:
        os.write(2, f"{PROMPT}{prompt}\n".encode())
        return asked(prompt)

    builtins.input = note_input


def _note_modules_at_exit(path: Path) -> None:
    """Leaves the names of the modules that the command imported, for `import_what_was_used`."""
    known, own, leave = set(sys.modules), os.getpid(), os._exit

    def note_and_leave(code: int) -> None:
        if os.getpid() == own and code == 0 and (new := set(sys.modules) - known):
            path.write_text("\n".join(new), encoding="utf-8")
        leave(code)

    os._exit = note_and_leave


def import_what_was_used(logs: Path) -> None:
    """Imports here what the last command had to import, so that the next ones need not."""
    try:
        names = (logs / "modules").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    (logs / "modules").unlink()
    for name in sorted(names):
        # Not all that is in sys.modules can be imported by its name.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def main_of(module: str) -> Callable[[], None]:
    """What `python -m MODULE` calls; of a package that of its `__main__`."""
    found = importlib.import_module(module)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    return found.main


def _main(module: str) -> int:
    """The exit code of the module's `main`, as the interpreter would make it."""
    code = 0
    try:
        main_of(module)()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code == 1 and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    return code & 0xFF


def _watch(
    pid: int, start: float, base: int, logs: Path, limit_seconds: float, limit_bytes: int
) -> Ended:
    trouble: list[str] = []
    process = psutil.Process(pid)
    handle = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    used = 0
    while not poll.poll(50):
        used = max(used, _used(process) - base)
        if used > limit_bytes:
            trouble.append("memory")
        elif _hangs(process, time.monotonic() - start, limit_seconds):
            trouble.append("hang")
        if trouble:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)  # where it is, for the cause
            poll.poll(1000)
            _kill([process, *process.children(recursive=True)])
            break
    os.close(handle)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - start
    if _await_orphans() and not trouble:
        trouble.append("left behind")
    # Its own peak begins with what it shared with this process.
    peak = max(used, usage.ru_maxrss * 1024 - psutil.Process().memory_info().rss)
    if peak > limit_bytes and "memory" not in trouble:
        trouble.append("memory")
    texts = [_end_of(logs / name) for name in ("stdout", "stderr")]
    code = None if trouble[:1] in (["hang"], ["memory"]) else os.waitstatus_to_exitcode(status)
    return Ended(code, seconds, max(0, peak), *texts, trouble)


def _hangs(process: psutil.Process, seconds: float, limit: float) -> bool:
    if seconds <= limit or seconds > PATIENCE * limit:
        return seconds > limit
    with contextlib.suppress(psutil.Error):
        own = [process, *process.children(recursive=True)]
        return sum(sum(each.cpu_times()[:2]) for each in own) > 2 / 3 * limit
    return False


def _end_of(path: Path) -> str:
    if not path.exists():
        return ""
    with open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - MOST_OUTPUT))
        return stream.read().decode("utf-8", "replace")


def _await_orphans() -> bool:
    """Wait for processes that the command has left; kill them after a while, and return True."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), GRACE_SECONDS)
    _kill(alive)
    psutil.wait_procs(alive)
    return bool(alive)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _used(process: psutil.Process) -> int:
    """Return the bytes of memory that a process and those below it do not share with others."""
    used = 0
    with contextlib.suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            memory = each.memory_info()
            used += memory.rss - memory.shared
    return used
