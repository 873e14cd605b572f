"""Checks of `launch.doctor` on any machine. Each yields findings of one topic."""

from __future__ import annotations

import configparser
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from cat_lm.core.host import GIB
from launch.doctor.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = Requirement("python>=3.11,<3.13")
# Import names of optional packages, including one that only benchmarks use.
OPTIONAL = {
    "triton": "triton",
    "flash-attn": "flash_attn",
    "causal-conv1d": "causal_conv1d",
    "fla-core": "fla",
    "lm-eval": "lm_eval",
    "wandb": "wandb",
}
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
COMPILERS = ("c++", "g++", "clang++")


def requirements(extra: str | None = None) -> dict[str, Requirement]:
    """Return the requirements in setup.cfg, or of one of its extras, by package name."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    key = ("options", "install_requires") if extra is None else ("options.extras_require", extra)
    found = [Requirement(line) for line in config.get(*key).splitlines() if line.strip()]
    return {requirement.name: requirement for requirement in found}


def python() -> Iterator[Finding]:
    version, problem = platform.python_version(), None
    if not PYTHONS.specifier.contains(version, prereleases=True):
        problem = f"Python {version} is not supported; use 3.11 or 3.12"
    yield Finding("python", version, "python", version, problem, broken=problem is not None)


def packages() -> Iterator[Finding]:
    """Yield the versions of required packages, with the ranges of setup.cfg."""
    for name, needed in requirements().items():
        version, problem = _installed(name), None
        advice = f"pip install '{name}{needed.specifier}'"
        if version is None:
            problem = f"{name} is missing; install it: {advice}"
        elif not needed.specifier.contains(version, prereleases=True):
            problem = f"{name} {version} is outside {needed.specifier}; install: {advice}"
        text = f"{name} {version or 'missing'} ({needed.specifier})"
        yield Finding("packages", text, name, version, problem, broken=problem is not None)


def optional() -> Iterator[Finding]:
    """Yield the versions of optional packages, and why one that is installed does not import."""
    known: dict[str, Requirement] = {}
    for extra in ("gpu", "flash", "eval", "wandb"):
        known |= requirements(extra)
    for name, module in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            yield Finding("optional", f"{name}: not installed", name)
            continue
        version, problem = _installed(name), None
        supported = known[name].specifier if name in known else ""
        # Import it in another process, because a broken binary package may end the interpreter.
        if failure := _failure_of(f"import {module}"):
            problem = f"{name} {version} is installed but does not import: {failure}"
        elif version and supported and not supported.contains(version, prereleases=True):
            problem = f"{name} {version} is outside {supported}"
        yield Finding("optional", f"{name} {version or ''}".strip(), name, version, problem)


def device() -> Iterator[Finding]:
    """Yield torch's version, the GPUs with their driver, and the CPU."""
    import torch

    cuda = torch.version.cuda or torch.version.hip
    yield Finding("torch", f"{torch.__version__}, CUDA {cuda or 'none'}", "torch", cuda)
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = driver.split()[0] if driver else None
    if driver and not torch.cuda.is_available():
        problem = (
            f"the driver {driver} shows a GPU that torch {torch.__version__} does not see, so "
            "training uses the CPU; install a torch built for CUDA"
        )
        yield Finding("device", "", "driver", driver, problem)
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        value = {"name": found.name, "memory_bytes": found.total_memory, "driver": driver}
        value["compute_capability"] = capability = f"{found.major}.{found.minor}"
        text = (
            f"cuda:{index} {found.name}, {found.total_memory / GIB:.0f} GiB, "
            f"compute capability {capability}, driver {driver or 'unknown'}"
        )
        yield Finding("device", text, f"cuda:{index}", value)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8") if info.is_file() else ""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", lines, re.MULTILINE))
    has = fields.get("flags", fields.get("Features", "")).split()
    name, flags = fields.get("model name", platform.machine()), [f for f in CPU_FLAGS if f in has]
    cores = len(os.sched_getaffinity(0))
    text = f"CPU {name}, {cores} cores, {torch.get_num_threads()} threads: {' '.join(flags)}"
    yield Finding("device", text, "cpu", {"name": name, "cores": cores, "flags": flags})


def compiler() -> Iterator[Finding]:
    """Yield the C++ compiler, which CPU kernels and torch.compile need."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        problem = (
            f"no C++ compiler ({', '.join(names)}): convolutions and Mamba's scan on a CPU "
            "take their slower paths, and torch.compile does not work there; install g++ or clang"
        )
        yield Finding("compiler", "none", "compiler", None, problem)
    else:
        version = (_output_of(path, "--version") or "unknown version").splitlines()[0]
        yield Finding("compiler", version, "compiler", path)


def attention() -> Iterator[Finding]:
    """Yield the values of `model.attn_implementation` that are available here."""
    from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available

    available = {
        "eager": True,
        "sdpa": True,
        "flash_attention_2": is_flash_attn_2_available(),
        "flex_attention": is_torch_flex_attn_available(),
    }
    text = ", ".join(name if there else f"no {name}" for name, there in available.items())
    yield Finding("attention", text, "attention", available)


def deepspeed() -> Iterator[Finding]:
    """Yield whether DeepSpeed can be imported as in training."""
    import torch

    # Import it in another process, because it may end the interpreter.
    failure = _failure_of(
        "from cat_lm.training.distributed import import_deepspeed; import_deepspeed()",
        DS_ACCELERATOR="cuda" if torch.cuda.is_available() else "cpu",
    )
    problem = failure and f"DeepSpeed does not import: {failure}"
    text = "" if failure else "imports; training compiles none of its extensions"
    yield Finding("deepspeed", text, "deepspeed", not failure, problem, broken=bool(failure))


def space() -> Iterator[Finding]:
    """Yield the free disk space of the working directory, and the free shared memory."""
    for name, path, use in (
        ("disk", Path.cwd(), "checkpoints"),
        ("shared memory", Path("/dev/shm"), "collectives between processes"),
    ):
        if path.is_dir():
            free, problem = shutil.disk_usage(path).free, None
            if free < GIB:
                problem = f"only {free / GIB:.2f} GiB {name} are free at {path}, little for {use}"
            yield Finding("space", f"{free / GIB:.1f} GiB {name} free", name, free, problem)


def convolutions() -> Iterator[Finding]:
    """Yield the backend of each type of convolution, for 16 heads of 64 channels and W = 21."""
    import torch

    from cat_lm import ops
    from cat_lm.ops.convolution import kinds

    shape = {"window": 21, "heads": 16, "head_dim": 64}
    for where in ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]:
        for conv_type in kinds.names():
            value, dtypes_of = {}, {}
            for name in ("float32", "bfloat16"):
                dtype = getattr(torch, name)
                choice = ops.choose_backend(conv_type, device=where, dtype=dtype, **shape)
                runs = ops.BACKENDS.get(choice.name).describe(conv_type, dtype, shape["window"])
                value[name] = {"backend": choice.name, "reason": choice.reason, "runs": runs}
                # Dtypes with the same backend share a line.
                dtypes_of.setdefault(f"{choice.name}, {choice.reason}: {runs}", []).append(name)
            text = "; ".join(
                f"{conv_type}, {' and '.join(dtypes)} on {where}: {served}"
                for served, dtypes in dtypes_of.items()
            )
            yield Finding("convolutions", text, f"{conv_type} {where}", value)


def triton() -> Iterator[Finding]:
    """Yield whether a Triton kernel runs on the GPU, and the assembler that compiles it."""
    import torch

    from cat_lm.ops.runtime.triton_launch import INSTALLED
    from cat_lm.training.preflight.facts import why_no_kernel

    if INSTALLED and torch.cuda.is_available():
        problem = why_no_kernel(torch.device("cuda"))
        text = "" if problem else "a Triton kernel was built, runs and computes the right numbers"
        yield Finding("kernels", text, "triton kernel", not problem, problem, bool(problem))
    if not INSTALLED or torch.version.hip:
        return
    from triton.backends.nvidia.compiler import get_ptxas

    found = [torch.cuda.get_device_capability(n) for n in range(torch.cuda.device_count())]
    on_hopper = (9, 0) in found
    major, minor = (9, 0) if on_hopper or not found else found[0]
    tool, problem = get_ptxas(10 * major + minor), None
    if on_hopper and re.match(r"12\.[89](\.|$)", tool.version):
        problem = (
            f"ptxas {tool.version} is suspected of wrong numbers on Hopper; let TRITON_PTXAS_PATH "
            "name a ptxas of CUDA 13.1 or later, such as the ptxas-blackwell of triton 3.7"
        )
    yield Finding("ptxas", f"{tool.version}, {tool.path}", "ptxas", tool.version, problem)


ALL = (
    *(python, packages, device, compiler, optional),
    *(attention, deepspeed, space, convolutions, triton),
)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _failure_of(code: str, **environment: str) -> str | None:
    """Return None if `code` runs in another interpreter, otherwise the last line of its error."""
    words = [sys.executable, "-c", code]
    given = {"cwd": ROOT, "env": {**os.environ, **environment}, "timeout": 300}
    done = subprocess.run(words, capture_output=True, text=True, **given)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _output_of(*arguments: str) -> str | None:
    """Return a program's output; None if it is missing or fails."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
