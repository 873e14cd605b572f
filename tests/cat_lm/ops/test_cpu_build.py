"""Building the C++ kernels: where they go, and what happens where they cannot be built."""

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

from cat_lm.ops.activation import gelu
from cat_lm.ops.convolution.cpu import kernel
from cat_lm.ops.convolution.kinds import reference
from cat_lm.ops.landmark import decode
from cat_lm.ops.loss import cross_entropy_cpu
from cat_lm.ops.recurrence import decaying_scan_cpu
from cat_lm.ops.recurrence.decaying_scan import decaying_scan
from cat_lm.ops.runtime import compiler
from tests.conftest import REPOSITORY

FOUND = next(filter(None, map(shutil.which, compiler.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(FOUND is None, reason="no C++ compiler on this machine")
KERNELS = [
    *(kernel.KERNEL, decaying_scan_cpu.KERNEL, decode.KERNEL, cross_entropy_cpu.KERNEL),
    gelu.KERNEL,
]
each_kernel = pytest.mark.parametrize("built", KERNELS, ids=lambda k: k.name)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, nothing loaded yet, and a compiler that does not take time to optimise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    write_compiler(tmp_path / "quick", f'exec "{FOUND}" "$@" -O0', monkeypatch)
    compiler._load_once.cache_clear()
    yield tmp_path / "cat_lm"
    compiler._load_once.cache_clear()


def write_compiler(folder: Path, body: str, monkeypatch) -> None:
    """Put a `g++` that answers --version and then runs `body` before all others."""
    folder.mkdir()
    script = f'#!/bin/sh\ncase "$1" in --version) echo fake 1.0; exit 0;; esac\n{body}\n'
    (folder / "g++").write_text(script)
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


BROKEN = {
    "no C++ compiler was found": None,
    "fatal error: no such header": 'echo "fatal error: no such header" >&2; exit 1',
    "building the C++ kernel failed": 'while [ "$1" != -o ]; do shift; done; echo text > "$2"',
    "timed out": "exec sleep 60",
}


@pytest.mark.parametrize("reason", BROKEN)
def test_without_a_library_torch_computes_the_same_and_says_why(
    reason, cache, monkeypatch, tmp_path
):
    if BROKEN[reason] is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        write_compiler(tmp_path / "bin", BROKEN[reason], monkeypatch)
    monkeypatch.setattr(compiler, "SECONDS", 1)
    x = torch.randn(1, 9, 2, 4, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = kernel.convolve("head", x, torch.ones(2, 2).double(), None, None)
        torch.testing.assert_close(y[:, 1:], x[:, 1:] + x[:, :-1])
        y.sum().backward()
        q = torch.randn(1, 5, 1, 2)
        out = decaying_scan(q, q, q, torch.zeros(1, 5, 1, 1, 1), torch.zeros(1, 1, 1))
        torch.testing.assert_close(
            out[:, 1], ((q[:, :2] * q[:, 1:2]).sum(-1, True) * q[:, :2]).sum(1)
        )
        activated = gelu.gelu_with_bias(q, torch.ones(2))
        torch.testing.assert_close(activated, torch.nn.functional.gelu(q + 1))
    assert not kernel.KERNEL.is_built
    described = kernel.describe("head", torch.float32, 2)
    assert reason in described and "plain torch, lag by lag" in described
    assert not cache.exists() or "failed" in reason or list(cache.iterdir()) == []


@needs_compiler
def test_library_is_built_once_and_found_again(cache):
    first = kernel.KERNEL.library()
    assert first.handle is not None and "was built by" in first.reason
    (library,) = cache.iterdir()  # and nothing else is left behind
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0
    built = library.stat().st_mtime_ns
    compiler._load_once.cache_clear()
    assert "was built before" in kernel.KERNEL.library().reason
    assert library.stat().st_mtime_ns == built


@needs_compiler
def test_damaged_library_is_built_again(cache):
    cache.mkdir()
    name = compiler._fingerprint(kernel.KERNEL.sources, shutil.which("g++"), compiler._flags())
    library = cache / f"convolution-{name}.so"
    library.write_bytes(b"\x7fELF cut short")
    assert kernel.KERNEL.library().handle is not None
    assert library.stat().st_size > 10_000


@needs_compiler
@pytest.mark.skipif(compiler.platform.machine() != "x86_64", reason="the flag is of x86")
def test_narrow_vectors_without_products_of_bf16_compute_the_same(cache, monkeypatch, tmp_path):
    write_compiler(tmp_path / "narrow", f'exec "{FOUND}" "$@" -O1 -mno-avx512f', monkeypatch)
    x, taps = torch.randn(2, 70, 3, 24).bfloat16(), torch.randn(5, 3, 3).bfloat16()
    positions = (torch.arange(70) % 31).int().expand(2, 70)
    for kind, filters in (("multihead", taps), ("head", taps[:, :, 0].mT.contiguous())):
        y = kernel.convolve(kind, x, filters, None, positions)
        wanted = reference.convolve(kind, x.double(), filters.double(), None, positions)
        torch.testing.assert_close(y.double(), wanted, rtol=1e-2, atol=1e-2)
    assert kernel.KERNEL.is_built


@needs_compiler
@pytest.mark.parametrize("trapping", [False, True])
def test_loops_of_exponentials_are_vectorised(tmp_path, trapping):
    x86 = compiler.platform.machine().lower() in ("x86_64", "amd64")
    clang = "clang" in subprocess.run([FOUND, "--version"], capture_output=True, text=True).stdout
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
    command = [FOUND, *flags, f"-I{folder}", str(source), "-o", str(tmp_path / "loop.so")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("loop.cpp:3:" in done.stderr) is not trapping


@needs_compiler
@pytest.mark.parametrize("cause", ["a file", "another user", "no home"])
def test_cache_that_cannot_be_kept_is_a_temporary_folder(cache, monkeypatch, cause):
    if cause == "a file":  # which stops even root, whom permissions do not
        cache.touch()
    elif cause == "another user":
        cache.mkdir()
        if os.geteuid() != 0:
            pytest.skip("needs root to give files away")
        os.chown(cache, 65534, 65534)
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
@pytest.mark.parametrize(
    "whose", ["library", pytest.param("writable folder", marks=pytest.mark.long)]
)
def test_library_that_another_user_may_have_written_is_not_loaded(cache, tmp_path, whose):
    if whose == "library" and os.geteuid() != 0:
        pytest.skip("needs root to give files away")
    assert kernel.KERNEL.library().handle is not None
    (library,) = cache.iterdir()
    source = tmp_path / "planted.cpp"
    source.write_text('#include <cstdio>\nstatic int ran = std::puts("planted");\n')
    subprocess.run([FOUND, "-shared", "-fPIC", source, "-o", library], check=True)
    if whose == "library":
        os.chown(library, 65534, 65534)
    else:
        cache.chmod(0o777)
    code = "from cat_lm.ops.convolution.cpu.kernel import KERNEL; print(KERNEL.library())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "was built by" in done.stdout and "planted" not in done.stdout


@needs_compiler
@pytest.mark.long
def test_processes_that_build_at_once_leave_one_library(cache):
    code = "from cat_lm.ops.convolution.cpu.kernel import KERNEL\nassert KERNEL.is_built\n"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert len(list(cache.iterdir())) == 1


def test_name_depends_on_sources_compiler_flags_and_processor(monkeypatch, tmp_path):
    for name in ("one", "two"):
        write_compiler(tmp_path / name, "exit 0", monkeypatch)
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


@each_kernel
def test_sources_are_listed(built):
    """What a kernel includes is listed, so that a change of any part builds it again."""
    listed = {path.name: path for path in built.sources.files}
    included, found = set(), [built.sources.files[0].name]
    while found:
        name = found.pop()
        included.add(name)
        found += set(re.findall(r'#include "(.+)"', listed[name].read_text())) - included
    assert included == set(listed)


@each_kernel
def test_call_is_laid_out_as_in_the_source(built):
    """Every field of the C++ struct is there, in order, and 8 bytes wide; strides are three."""
    text = "".join(path.read_text() for path in built.sources.files)
    body = re.search(r"struct \w+Call {(.*?)};", text, re.DOTALL)[1]
    body = " ".join(line.split("//")[0] for line in body.splitlines())
    body = re.sub(r"\b(?:const|int64_t|int32_t|float|void)\b|\[\w*\]", "", body)
    fields = built.struct._fields_
    assert re.findall(r"\w+", body) == [name for name, _ in fields]
    if not any(kind is ctypes.c_float for _, kind in fields):
        strided = sum(name.endswith("_strides") for name, _ in fields)
        assert ctypes.sizeof(built.struct) == 8 * (len(fields) + 2 * strided)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_process_has_one_openmp_runtime():
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
from cat_lm.ops.activation import gelu
from cat_lm.ops.convolution.cpu import kernel
from cat_lm.ops.convolution.kinds import reference
from cat_lm.ops.runtime.native import openmp_runtime
kernel.KERNEL.library()
kernel.convolve("head", torch.randn(1, 4096, 8, 64), torch.randn(8, 21), None, None)
assert openmp_runtime() is None or runtimes() == before, runtimes()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_keeps_out_of_its_parents_threads():
    """The parent loaded the kernel and used torch's threads, but had not yet called the kernel."""
    code = """
import os, signal, torch
from cat_lm.ops import depthwise_conv
from cat_lm.ops.convolution.cpu.kernel import KERNEL
torch.set_num_threads(2)
KERNEL.library()
x = torch.randn(4, 4096, 2, 16)
x.exp()
if os.fork() == 0:
    signal.alarm(30)
    depthwise_conv(x, torch.randn(2, 16, 4))
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=REPOSITORY)
