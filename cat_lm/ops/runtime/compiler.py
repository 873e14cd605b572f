"""Compiles C++ kernels at first use, into a folder of the user's cache.

A library's name is a hash of all that it depends on (sources, flags, compiler, processor), so that
a cache can be shared by machines and releases. It is built beside its name and renamed: processes
that build at once, or one that is killed, leave a whole library or none. A library or folder that
another user owns or may write is not used: what is loaded runs as this user. Where the cache cannot
keep a library, each process builds its own in a temporary folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

COMPILERS = ("g++", "clang++", "c++")
SECONDS = 120  # seconds after which a compiler counts as failing

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_lock = threading.Lock()


class Sources(NamedTuple):
    """The source files of a library: a file, and those that it includes."""

    name: str
    files: tuple[Path, ...]

    @property
    def includes(self) -> tuple[str, ...]:
        """The compiler's flags for the folders of the included files."""
        return tuple(f"-I{folder}" for folder in dict.fromkeys(f.parent for f in self.files))


# Headers for every kernel.
SHARED = tuple(Path(__file__).with_name(name) for name in ("numbers.h", "threads.h"))


class Library(NamedTuple):
    """The loaded kernel, or None with the reason, and where it came from."""

    handle: ctypes.CDLL | None
    reason: str


class BuildError(Exception):
    """Why there is no library, as a clause."""


def load_library(sources: Sources) -> Library:
    """Return the kernel of this machine, built if need be (2 to 5 seconds); never raise."""
    with _lock:
        return _load_once(sources)


@functools.cache
def _load_once(sources: Sources) -> Library:
    try:
        return _load(sources)
    except BuildError as error:
        return Library(None, str(error))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        # OSError: files, or a library that does not load; RuntimeError: no home folder.
        return Library(None, f"building the C++ kernel failed: {error}")


def _load(sources: Sources) -> Library:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler was found (looked for {', '.join(COMPILERS)})")
    flags = _flags()
    name = f"{sources.name}-{_fingerprint(sources, compiler, flags)}.so"
    try:
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(OSError):  # It may be missing, damaged or another user's.
            _check_own(path.parent)
            _check_own(path)
            return Library(ctypes.CDLL(str(path)), f"{path} was built before")
        # Other parts of the cache may have made the folder, writable for the user's group.
        status = path.parent.stat()
        if {status.st_uid, path.parent.lstat().st_uid} == {os.geteuid()}:
            path.parent.chmod(status.st_mode & 0o777 & ~_OTHERS_WRITE)
        _check_own(path.parent)
        build(sources, compiler, flags, path)
        _check_own(path)
        return Library(ctypes.CDLL(str(path)), f"{path} was built by {compiler}")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        with tempfile.TemporaryDirectory(prefix="cat_lm-") as folder:
            path = Path(folder) / name
            build(sources, compiler, flags, path)
            reason = f"{path} was built by {compiler}, as the cache cannot keep it ({error})"
            return Library(ctypes.CDLL(str(path)), reason)


def _check_own(path: Path) -> None:
    """Raise PermissionError for files that others may have written: they would run as this user."""
    status = path.stat()
    if {status.st_uid, path.lstat().st_uid} != {os.geteuid()} or status.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"{path} belongs to another user, or others may write it")


def cache_folder() -> Path:
    """Return where libraries are kept: `$XDG_CACHE_HOME/cat_lm`, by default `~/.cache/cat_lm`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "cat_lm"


def build(sources: Sources, compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile the sources to `path`, which appears whole."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        made = Path(folder) / path.name
        command = [compiler, *flags, *sources.includes, str(sources.files[0]), "-o", str(made)]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
        if done.returncode != 0 or not made.exists():
            lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            detail = (lines or done.stderr.splitlines() or ["no message"])[0]
            raise BuildError(f"{compiler} could not build the kernel: {detail}")
        with contextlib.suppress(OSError):  # `_check_own` looks at what has become of it
            made.chmod(0o700)  # The umask must not change this.
        made.replace(path)


def _flags() -> tuple[str, ...]:
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    native = "-march=native" if x86 else "-mcpu=native"
    # No kernel reads the flags of floating-point exceptions. Where they might be read, g++ makes a
    # branch of every comparison, and without AVX-512 does not vectorise a loop of exponentials.
    fast = ("-O3", native, "-ffp-contract=fast", "-fno-trapping-math", "-fopenmp-simd")
    return ("-std=c++17", *fast, "-shared", "-fPIC", "-pthread")


def _fingerprint(sources: Sources, compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run(
        [compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS
    )
    digest = hashlib.sha256()
    for part in (
        *(file.read_bytes() for file in sources.files),
        " ".join((compiler, *flags)).encode(),
        version.stdout,
        processor_features().encode(),
    ):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def processor_features() -> str:
    """List what the processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = ("model name", "flags", "Features", "CPU part")
    found = {line for line in lines if line.split("\t")[0].strip(" :") in names}
    return "\n".join([platform.system(), platform.machine(), *sorted(found)])
