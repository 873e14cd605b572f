"""A process that has imported what commands need, and forks each command from itself.

`python -m tests.fuzz.server`: requests are JSON lines on stdin, answers on stdout. It is no root's,
so that `/dev`, `/proc` and other files stay safe from what commands do with odd names.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil

from tests.commands import be_python
from tests.conftest import REPOSITORY

NOBODY = 65534
# A hang has computed for its seconds, or waited for several times as long.
PATIENCE = 4
MOST_OUTPUT = 200_000  # bytes that are read of each stream
MOST = {"CORE": 0, "FSIZE": 2 * 2**30, "NPROC": 600}
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
GRACE_SECONDS = 5.0  # for processes that end when they notice that their parent has
_DEATH_SIGNAL, _SUBREAPER = 1, 36
# Capability number 2 reads every file: the interpreter may lie in root's home.
_READ_EVERYWHERE = 2
# No network, no GPU, one thread. Libraries read these once, when they are imported.
ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}
ENVIRONMENT |= {"TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
# No process with a second thread may be forked.
ENVIRONMENT |= {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Another user than the checkout's asks for its commit.
ENVIRONMENT |= {"GIT_CONFIG_PARAMETERS": "'safe.directory=*'"}


class Ended(NamedTuple):
    """How a command ended; `trouble` is None, `hang`, `memory` or `left behind` (processes)."""

    code: int
    stdout: str
    stderr: str
    trouble: str | None = None


class Server:
    """The process, started when it is first needed and anew where it broke."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._process: subprocess.Popen | None = None

    def run(
        self,
        words: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        stdin: str = "",
        seconds: float = 30.0,
        memory: int = 2 * 2**30,
    ) -> Ended:
        """Run `python WORDS` in `folder`.

        Args:
            seconds: of computing, after which it is said to hang.
            memory: bytes that it may use beyond those of the server.

        Raises:
            RuntimeError: the server broke.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        limits = (str(self.scratch / "logs"), stdin, seconds, memory)
        request = json.dumps([*limits, list(words), str(folder), environment])
        self._process.stdin.write(f"{request}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or "null")
        if not isinstance(answer, list):
            raise RuntimeError(answer or (self.scratch / "server.log").read_text()[-2000:])
        return Ended(*answer)

    def _start(self) -> subprocess.Popen:
        own_all(self.scratch)
        folders = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR")
        variables = ENVIRONMENT | dict.fromkeys(folders, str(self.scratch))
        words = [*_without_root(), sys.executable, "-m", "tests.fuzz.server"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with open(self.scratch / "server.log", "a", encoding="utf-8") as log:
            environment = os.environ | variables
            return subprocess.Popen(words, cwd=REPOSITORY, env=environment, stderr=log, **pipes)

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()


def own_all(folder: Path) -> None:
    """Give what root has written in `folder` to the user of the commands."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _without_root() -> list[str]:
    """Return the words before a command by which `nobody` runs it, who may still read all files."""
    if os.geteuid() != 0:
        return []
    words = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    permitted = int(re.search(r"CapPrm:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
    if permitted >> _READ_EVERYWHERE & 1:  # containers keep some from root
        words += [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
    return words


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # This process becomes the parent of what a command leaves behind.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    import torch

    from cat_lm.ops.convolution.cpu.kernel import KERNEL
    from cat_lm.pretrained.loading import quiet_transformers
    from tests.distributed import preloaded  # noqa: F401

    torch.set_num_threads(1)
    quiet_transformers()
    KERNEL.library()  # compiled and loaded once
    for line in sys.stdin:
        try:
            answer = _run(*json.loads(line))
        except Exception:
            answer = traceback.format_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(place: str, stdin: str, seconds: float, memory: int, *command: object) -> tuple:
    logs = Path(place)
    logs.mkdir(exist_ok=True)
    (logs / "stdin").write_text(stdin, encoding="utf-8")
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("the server has a second thread, so that it cannot be forked")
    gc.freeze()
    pid = os.fork()
    if pid == 0:
        _be_the_command(logs, seconds, *command)
    trouble = _watch(pid, PATIENCE * seconds, memory)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # By this signal its own limit of computing ends it.
    trouble = trouble or ("hang" if code == -signal.SIGXCPU else None)
    left = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(left, 0 if trouble else GRACE_SECONDS)
    for process in alive:
        process.kill()
        trouble = trouble or "left behind"
    psutil.wait_procs(alive)
    _import_what_was_used(logs / "modules")
    texts = [(logs / name).read_bytes()[-MOST_OUTPUT:] for name in ("stdout", "stderr")]
    return code, *(text.decode("utf-8", "replace") for text in texts), trouble


def _be_the_command(logs: Path, seconds: float, *command: Any) -> NoReturn:
    code, known = 70, set(sys.modules)
    try:
        streams = [os.open(logs / "stdin", os.O_RDONLY)]
        streams += [os.open(logs / name, WRITE, 0o644) for name in ("stdout", "stderr")]
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        for name, most in (MOST | {"CPU": max(1, round(seconds))}).items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most + 5))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(signal.SIGXCPU, file=2, all_threads=True, chain=True)
        tempfile.tempdir = None  # this process's
        be_python(*command, streams, sys.executable)
    except SystemExit as end:
        code = end.code
        threading._shutdown()
    finally:
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            sys.stdout.flush()
            sys.stderr.flush()
        if code == 0:
            (logs / "modules").write_text("\n".join(set(sys.modules) - known))
        os._exit(code & 0xFF)


def _watch(pid: int, seconds: float, memory: int) -> str | None:
    """Wait for the end of a process; end it where it takes too much, and return what."""
    handle, end, trouble = os.pidfd_open(pid), time.monotonic() + seconds, None
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    most = _memory_used(os.getpid()) + memory
    while not poll.poll(50) and trouble is None:
        trouble = "hang" if time.monotonic() > end else None
        trouble = "memory" if _memory_used(pid) > most else trouble
    if trouble:
        os.kill(pid, signal.SIGXCPU)  # which writes where it is
        if not poll.poll(2000):
            os.kill(pid, signal.SIGKILL)
    os.close(handle)
    return trouble


def _memory_used(pid: int) -> int:
    """Return the bytes that a process and those below it do not share with others."""
    used = 0
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        below = first.children(recursive=True) if pid != os.getpid() else []
        for memory in (each.memory_info() for each in (first, *below)):
            used += memory.rss - memory.shared
    return used


def _import_what_was_used(path: Path) -> None:
    """Import here what the last command had to import, so that the next ones need not."""
    names = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    for name in sorted(names):
        with contextlib.suppress(Exception):  # Not all modules can be imported by their names.
            importlib.import_module(name)


if __name__ == "__main__":
    main()
