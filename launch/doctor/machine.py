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

from packaging.specifiers import SpecifierSet

from cat_lm.core.host import GIB
from launch.doctor.findings import Finding

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED_PYTHONS = ("3.11", "3.12")
# Import name of what the extras name, and of rivals that benchmarks look for.
OPTIONAL = {
    "triton": "triton",
    "flash-attn": "flash_attn",
    "causal-conv1d": "causal_conv1d",
    "fla-core": "fla",
    "lm-eval": "lm_eval",
    "wandb": "wandb",
}
# Required, and who needs them where a run on prepared data does not.
NEEDED_ELSEWHERE = {
    **dict.fromkeys(("datasets", "pyarrow", "zstandard"), "data_prep and eval"),
    **dict.fromkeys(("matplotlib", "pillow"), "eval"),
    "sentencepiece": "sentencepiece's tokenizers",
}
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
COMPILERS = ("c++", "g++", "clang++")


def python() -> Iterator[Finding]:
    version = platform.python_version()
    supported = " or ".join(SUPPORTED_PYTHONS)
    problem = None
    if ".".join(version.split(".")[:2]) not in SUPPORTED_PYTHONS:
        problem = f"Python {version} is not supported; use {supported}"
    text = f"{version} (supported: {supported})"
    yield Finding("python", text, "python", version, problem, broken=problem is not None)


def requirements(extra: str | None = None) -> dict[str, str]:
    """Package name to supported range, as setup.cfg has them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    key = ("options", "install_requires") if extra is None else ("options.extras_require", extra)
    lines = (line.strip() for line in config.get(*key).splitlines())
    matches = (re.match(r"([\w.-]+)(?:\[[\w,]+\])?(.*)", line) for line in lines if line)
    return {match[1]: match[2].strip() for match in matches}


def packages() -> Iterator[Finding]:
    """Compare the packages that the project needs with setup.cfg's ranges."""
    for name, supported in requirements().items():
        version = _installed(name)
        wanted = f"'{name}{supported}'"
        problem = None
        users = NEEDED_ELSEWHERE.get(name)
        if version is None:
            needed = f", which {users} need" if users else ""
            problem = f"{name} is missing{needed}; install it: pip install {wanted}"
        elif not _in_range(version, supported):
            problem = f"{name} {version} is outside {supported}; install: pip install {wanted}"
        text = f"{name} {version or 'missing'} ({supported})"
        value = {"version": version, "supported": supported}
        broken = problem is not None and not (version is None and users)
        yield Finding("packages", text, name, value, problem, broken=broken)


def optional() -> Iterator[Finding]:
    """Packages that training does without: whether each imports, and why not."""
    known = {}
    for extra in ("gpu", "flash", "eval", "wandb"):
        known |= requirements(extra)
    for name, module in OPTIONAL.items():
        version, supported = _installed(name), known.get(name, "")
        present = importlib.util.find_spec(module) is not None
        value = {"version": version, "supported": supported, "imports": False}
        if not present:
            yield Finding("optional", f"{name}: not installed", name, value)
            continue
        # In a process of its own: a broken binary package may end the interpreter.
        failure = _failure_of(f"import {module}")
        value["imports"] = failure is None
        problem = None
        if failure is not None:
            problem = f"{name} {version} is installed but does not import: {failure}"
        elif supported and version and not _in_range(version, supported):
            problem = f"{name} {version} is outside {supported}"
        yield Finding("optional", f"{name} {version or ''}".strip(), name, value, problem)


def torch_build() -> Iterator[Finding]:
    import torch

    cuda = torch.version.cuda or torch.version.hip
    abi = torch.compiled_with_cxx11_abi()
    text = f"{torch.__version__}, CUDA {cuda or 'none'}, C++11 ABI {'yes' if abi else 'no'}"
    yield Finding("torch", text, "torch", {"cuda": cuda, "cxx11_abi": abi})


def device() -> Iterator[Finding]:
    """GPUs with their driver; the CPU."""
    import torch

    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if driver and not torch.cuda.is_available():
        yield Finding(
            "device",
            "",
            "driver",
            driver,
            f"the driver {driver.split()[0]} shows a GPU that torch {torch.__version__} does not "
            "see, so training uses the CPU; install a torch built for CUDA",
        )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        text = (
            f"cuda:{index} {properties.name}, {properties.total_memory / GIB:.0f} GiB, "
            f"compute capability {capability}, driver {driver.split()[0] if driver else 'unknown'}"
        )
        value = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": capability,
            "driver": driver,
        }
        yield Finding("device", text, f"cuda:{index}", value)
    cores, (model, flags) = len(os.sched_getaffinity(0)), _cpu()
    text = f"CPU {model}, {cores} cores, {torch.get_num_threads()} threads: {' '.join(flags)}"
    yield Finding("device", text, "cpu", {"name": model, "cores": cores, "flags": flags})


def compiler() -> Iterator[Finding]:
    """A C++ compiler, for the CPU kernels of convolutions and scans, and for torch.compile."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        problem = (
            f"no C++ compiler ({', '.join(names)}): convolutions and Mamba's scan on a CPU "
            "take their slower paths, and torch.compile does not work there; install g++ or clang"
        )
        yield Finding("compiler", "none", "compiler", None, problem)
        return
    version = (_output_of(path, "--version") or "unknown version").splitlines()[0]
    yield Finding("compiler", version, "compiler", {"path": path, "version": version})


def attention() -> Iterator[Finding]:
    """The implementations that `model.attn_implementation` can name here."""
    from transformers.utils import is_flash_attn_2_available, is_torch_flex_attn_available

    available = {
        "eager": True,
        "sdpa": True,
        "flash_attention_2": is_flash_attn_2_available(),
        "flex_attention": is_torch_flex_attn_available(),
    }
    text = ", ".join(name for name, there in available.items() if there)
    missing = [name for name, there in available.items() if not there]
    text += f"; not available: {', '.join(missing)}" if missing else ""
    yield Finding("attention", text, "attention", available)


def deepspeed() -> Iterator[Finding]:
    """Yield whether training's DeepSpeed imports; what its extensions would miss."""
    import torch

    on_gpu = torch.cuda.is_available()
    # As training imports it, in a process of its own: it is known to end the interpreter.
    failure = _failure_of(
        "from cat_lm.training.distributed import import_deepspeed; import_deepspeed()",
        DS_ACCELERATOR="cuda" if on_gpu else "cpu",
    )
    value = {
        "imports": failure is None,
        "cuda_home": os.environ.get("CUDA_HOME"),
        "nvcc": shutil.which("nvcc"),
        "numactl": shutil.which("numactl"),
    }
    if failure is not None:
        problem = f"DeepSpeed does not import: {failure}"
        yield Finding("deepspeed", "does not import", "deepspeed", value, problem, broken=True)
        return
    absent = [] if value["numactl"] else ["numactl"]
    if on_gpu and not (value["cuda_home"] or value["nvcc"]):
        absent.append("CUDA_HOME")
    text = "imports; training compiles none of its extensions"
    text += f" (absent here, not needed: {', '.join(absent)})" if absent else ""
    yield Finding("deepspeed", text, "deepspeed", value)


def space() -> Iterator[Finding]:
    """Free disk here and in the temporary folder, and shared memory."""
    for name, path in (("disk", Path.cwd()), ("shared memory", Path("/dev/shm"))):
        if not path.is_dir():
            continue
        free = shutil.disk_usage(path).free
        problem = None
        if free < GIB:
            advice = "for checkpoints" if name == "disk" else "for collectives between processes"
            problem = f"only {free / GIB:.2f} GiB {name} are free at {path}, little {advice}"
        yield Finding("space", f"{free / GIB:.1f} GiB {name} free", name, free, problem)


def convolutions() -> Iterator[Finding]:
    """The backend of each kind of convolution and dtype, for 16 heads of 64 channels, W = 21."""
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
                # Mostly both dtypes are served alike, and share a line.
                dtypes_of.setdefault(tuple(value[name].values()), []).append(name)
            text = "; ".join(
                f"{conv_type}, {' and '.join(dtypes)} on {where}: {backend}, {reason}: {runs}"
                for (backend, reason, runs), dtypes in dtypes_of.items()
            )
            yield Finding("convolutions", text, f"{conv_type} {where}", value)


def kernels() -> Iterator[Finding]:
    """Whether a Triton kernel runs on the GPU, which needs a C compiler and Python's headers."""
    import torch

    from cat_lm.ops.runtime.triton_launch import INSTALLED

    if not (INSTALLED and torch.cuda.is_available()):
        return
    from cat_lm.training.preflight.facts import why_no_kernel

    problem = why_no_kernel(torch.device("cuda"))
    text = "" if problem else "a Triton kernel was built, runs and computes the right numbers"
    yield Finding("kernels", text, "triton kernel", problem is None, problem, problem is not None)


def ptxas() -> Iterator[Finding]:
    """The assembler of Triton's kernels, and whether it is suspected on the GPUs here."""
    import torch

    from cat_lm.ops.runtime.triton_launch import INSTALLED

    if not INSTALLED or torch.version.hip:
        return
    from triton.backends.nvidia.compiler import get_ptxas

    count = torch.cuda.device_count()
    capabilities = [torch.cuda.get_device_capability(index) for index in range(count)]
    on_hopper = (9, 0) in capabilities
    major, minor = (9, 0) if on_hopper or not capabilities else capabilities[0]
    tool = get_ptxas(10 * major + minor)
    problem = None
    if on_hopper and re.match(r"12\.[89](\.|$)", tool.version):
        problem = (
            f"ptxas {tool.version} is suspected of wrong numbers on Hopper; let TRITON_PTXAS_PATH "
            "name a ptxas of CUDA 13.1 or later, such as the ptxas-blackwell of triton 3.7"
        )
    value = {"path": tool.path, "version": tool.version}
    yield Finding("ptxas", f"{tool.version}, {tool.path}", "ptxas", value, problem)


ALL = (
    *(python, packages, torch_build, device, compiler, optional),
    *(attention, deepspeed, space, convolutions, kernels, ptxas),
)


def _in_range(version: str, supported: str) -> bool:
    return SpecifierSet(supported).contains(version, prereleases=True)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _failure_of(code: str, **environment: str) -> str | None:
    """None if `code` runs in an interpreter of its own, else the last line it said."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return lines[-1]


def _output_of(*arguments: str) -> str | None:
    """Return a program's output; None where it is absent or fails."""
    try:
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def _cpu() -> tuple[str, list[str]]:
    """The processor's name, and those of `CPU_FLAGS` that it has."""
    fields: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    has = fields.get("flags", fields.get("features", "")).split()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, [flag for flag in CPU_FLAGS if flag in has]
