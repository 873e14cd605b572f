"""Building the C++ kernel: where it goes, and what happens where it cannot be built."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from cat_lm.ops.convolution.cpu import kernel
from cat_lm.ops.recurrence import decaying_scan_cpu as _scan_cpu
from cat_lm.ops.runtime import compiler

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler on this machine"
)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, nothing loaded yet, and a compiler that does not take time to optimise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    if found := next(filter(None, map(shutil.which, compiler.COMPILERS)), None):
        (tmp_path / "quick").mkdir()
        quick = tmp_path / "quick/g++"
        quick.write_text(f'#!/bin/sh\nexec "{found}" "$@" -O0\n')
        quick.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'quick'}:{os.environ['PATH']}")
    compiler._load_once.cache_clear()
    yield tmp_path / "cat_lm"
    compiler._load_once.cache_clear()


def fake_compiler(folder: Path, body: str) -> None:
    """A `g++` that answers --version and then runs `body`."""
    folder.mkdir()
    script = f'#!/bin/sh\ncase "$1" in --version) echo fake 1.0; exit 0;; esac\n{body}\n'
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o755)


def check_convolution_without_kernel(reason: str) -> None:
    """The convolution works, silently, and `describe` says why it is not the kernel."""
    x = torch.randn(1, 9, 2, 4, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, filters in (
            ("head", torch.ones(2, 2)),
            ("depthwise", torch.ones(2, 4, 2)),
            ("multihead", torch.eye(2).expand(2, 2, 2)),
        ):
            y = kernel.convolve(name, x, filters.double(), None, None)
            torch.testing.assert_close(y[:, 1:], x[:, 1:] + x[:, :-1])
            y.sum().backward()
    assert not kernel.KERNEL.is_built
    described = kernel.describe("head", torch.float32, 2)
    assert reason in described and "plain torch, lag by lag" in described


@needs_compiler
def test_is_built_once_and_found_again(cache):
    first = kernel.KERNEL.library()
    assert first.handle is not None and "was built by" in first.reason
    (library,) = cache.iterdir()  # and nothing else is left behind
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0
    built = library.stat().st_mtime_ns
    compiler._load_once.cache_clear()
    again = kernel.KERNEL.library()
    assert again.handle is not None and "was built before" in again.reason
    assert library.stat().st_mtime_ns == built
    assert "C++ kernel" in kernel.describe("head", torch.float32, 2)


@needs_compiler
@pytest.mark.parametrize("trapping", [False, True])
def test_loops_of_exponentials_are_vectorised(tmp_path, trapping):
    found = next(filter(None, map(shutil.which, compiler.COMPILERS)))
    x86 = compiler.platform.machine().lower() in ("x86_64", "amd64")
    clang = "clang" in subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if trapping and (clang or not x86):
        pytest.skip("the control is of g++ on x86; clang takes it that nothing traps")
    # Without masks, which AVX-512 has: with them g++ vectorises what may trap, too.
    processor = ["-march=x86-64"] if x86 else []
    source = tmp_path / "loop.cpp"
    source.write_text(
        '#include "numbers.h"\nextern "C" void loop(float* x, int64_t n) {\n'
        "  for (int64_t i = 0; i < n; ++i) x[i] = exponential(x[i]);\n}\n"
    )
    told = "-Rpass=loop-vectorize" if clang else "-fopt-info-vec-optimized"
    flags = [*compiler._flags(), *processor, *(["-ftrapping-math"] if trapping else []), told]
    folder = Path(compiler.__file__).parent
    command = [found, *flags, f"-I{folder}", str(source), "-o", str(tmp_path / "loop.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("loop.cpp:3:" in done.stderr) is not trapping


def test_no_compiler(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check_convolution_without_kernel("no C++ compiler was found")
    assert not cache.exists()


def test_failing_compiler(cache, monkeypatch, tmp_path):
    fake_compiler(tmp_path / "bin", 'echo "fatal error: no such header" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    check_convolution_without_kernel("fatal error: no such header")
    assert list(cache.iterdir()) == []


def test_a_compiler_that_makes_no_library(cache, monkeypatch, tmp_path):
    fake_compiler(tmp_path / "bin", 'while [ "$1" != -o ]; do shift; done; echo text > "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    check_convolution_without_kernel("building the C++ kernel failed")


def test_compiler_that_hangs(cache, monkeypatch, tmp_path):
    fake_compiler(tmp_path / "bin", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(compiler, "SECONDS", 1)
    check_convolution_without_kernel("timed out")
    assert list(cache.iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("cause", ["a file", "another user", "no modes", "no home"])
def test_cache_that_cannot_be_kept_is_a_temporary_folder(cache, monkeypatch, cause):
    if cause == "a file":  # which stops even root, whom permissions do not
        cache.touch()
    elif cause == "another user":
        cache.mkdir()
        if os.geteuid() != 0:
            pytest.skip("needs root to give files away")
        os.chown(cache, 65534, 65534)
    elif cause == "no modes":
        cache.mkdir()
        cache.chmod(0o777)
        monkeypatch.setattr(Path, "chmod", lambda *_: None)
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/proc/no-home")
    library = kernel.KERNEL.library()
    assert library.handle is not None and "as the cache cannot keep it" in library.reason
    assert not list(Path(tempfile.gettempdir()).iterdir())


@needs_compiler
def test_cache_that_a_group_may_write_is_kept_to_the_user(cache):
    cache.mkdir()
    cache.chmod(0o775)
    assert kernel.KERNEL.library().handle is not None
    assert cache.stat().st_mode & 0o777 == 0o755 and len(list(cache.iterdir())) == 1


@needs_compiler
def test_damaged_library_is_built_again(cache):
    cache.mkdir()
    found = next(filter(None, map(shutil.which, compiler.COMPILERS)))
    name = compiler._fingerprint(kernel.KERNEL.sources, found, compiler._flags())
    library = cache / f"convolution-{name}.so"
    library.write_bytes(b"\x7fELF cut short")
    assert kernel.KERNEL.library().handle is not None
    assert library.stat().st_size > 10_000


@needs_compiler
@pytest.mark.parametrize(
    "whose",
    [
        "library",
        pytest.param("folder", marks=pytest.mark.long),
        pytest.param("writable library", marks=pytest.mark.long),
        "writable folder",
    ],
)
def test_library_that_another_user_may_have_written_is_not_loaded(cache, tmp_path, whose):
    if "writable" not in whose and os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    assert kernel.KERNEL.library().handle is not None
    (library,) = cache.iterdir()
    source = tmp_path / "planted.cpp"
    source.write_text('#include <cstdio>\nstatic int ran = std::puts("planted");\n')
    found = next(filter(None, map(shutil.which, compiler.COMPILERS)))
    subprocess.run([found, "-shared", "-fPIC", source, "-o", library], check=True)
    library.chmod(0o775 if whose == "writable library" else 0o755)
    cache.chmod(0o777 if whose == "writable folder" else 0o755)
    if "writable" not in whose:
        os.chown(cache if whose == "folder" else library, 65534, 65534)
    code = "from cat_lm.ops.convolution.cpu.kernel import KERNEL; print(KERNEL.library())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "was built by" in done.stdout and "planted" not in done.stdout


@needs_compiler
@pytest.mark.long
def test_processes_that_build_at_once(cache):
    code = (
        "from cat_lm.ops.convolution.cpu.kernel import KERNEL\n"
        "library = KERNEL.library()\n"
        "assert library.handle is not None, library.reason\n"
        "library.handle.convolution_run\n"
    )
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(list(cache.iterdir())) == 1


def test_name_depends_on_sources_compiler_flags_and_processor(monkeypatch, tmp_path):
    fake_compiler(tmp_path / "one", "exit 0")
    fake_compiler(tmp_path / "two", "exit 0")
    one, two = (str(tmp_path / name / "g++") for name in ("one", "two"))
    source = tmp_path / "a.cpp"
    source.write_text("int a;")
    sources = compiler.Sources("a", (source,))
    names = [
        compiler._fingerprint(sources, one, ("-O3",)),
        compiler._fingerprint(sources, two, ("-O3",)),
        compiler._fingerprint(sources, one, ("-O2",)),
    ]
    source.write_text("int b;")
    names.append(compiler._fingerprint(sources, one, ("-O3",)))
    monkeypatch.setattr(compiler, "processor_features", lambda: "other")
    names.append(compiler._fingerprint(sources, one, ("-O3",)))
    assert len(set(names)) == 5


@pytest.mark.parametrize("kernel", [kernel.KERNEL, _scan_cpu.KERNEL], ids=lambda k: k.name)
def test_sources_are_listed(kernel):
    """What a kernel includes is listed, so that a change of any part builds it anew."""
    sources = kernel.sources
    listed = {path.name: path for path in sources.files}
    included, found = set(), [sources.files[0].name]
    while found:
        name = found.pop()
        included.add(name)
        text = listed[name].read_text()
        found += set(re.findall(r'#include "(.+)"', text)) - included
    assert included == set(listed)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_one_openmp_runtime():
    """The kernel's threads are torch's: it loads no OpenMP runtime of its own."""
    if not kernel.KERNEL.is_built:
        pytest.skip(kernel.KERNEL.library().reason)
    # In a process of its own: other libraries, such as scikit-learn, bring their runtimes along.
    code = """
from pathlib import Path
import torch
def runtimes():
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split()[-1] for line in lines if "/" in line}
    return {path for path in files if "gomp" in path or "iomp" in path or "libomp" in path}
before = runtimes()
from cat_lm.ops.convolution.cpu import kernel
from cat_lm.ops.runtime.native import openmp_runtime
kernel.KERNEL.library()
kernel.convolve("head", torch.randn(1, 4096, 8, 64), torch.randn(8, 21), None, None)
assert openmp_runtime() is None or runtimes() == before, runtimes()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_call_is_laid_out_as_in_the_source():
    """Every field of the C++ struct, in order; all are 8 bytes wide."""
    source = (Path(kernel.__file__).parent / "call.h").read_text()
    body = source.split("struct ConvolutionCall {")[1].split("};")[0]
    fields = []
    for line in body.splitlines():
        declaration = line.split("//")[0].strip().rstrip(";")
        for part in declaration.split(","):
            name = part.split()[-1].strip("*") if part.strip() else ""
            if name:
                fields.append(name.split("[")[0])
    assert fields == [name for name, _ in kernel.KERNEL.struct._fields_]
    assert ctypes.sizeof(kernel.KERNEL.struct) == 8 * (len(fields) + 2 * 3)
