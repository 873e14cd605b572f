"""Record where a result came from: command, date, versions, commit, machine."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from cat_lm.core import plugins
from cat_lm.core.plugins import commit

PACKAGES = (
    *("cat_lm", "torch", "transformers", "deepspeed", "numpy"),
    # Only on a GPU, and only where installed.
    *("triton", "flash-attn", "flash-linear-attention", "fla-core", "causal-conv1d"),
)


def provenance() -> dict[str, Any]:
    """Return the running command, the time, versions, the commit, and the machine."""
    return {
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | versions(),
        "commit": commit(),
        "machine": machine(),
        **({"plugins": found} if (found := plugins.describe()) else {}),
    }


def command_line() -> str:
    """Return the command as it was typed, `python -m` restored."""
    module = getattr(sys.modules.get("__main__"), "__spec__", None)
    # A package is run through its `__main__`, so that name is not part of the typed command.
    start = (
        ["python", "-m", module.name.removesuffix(".__main__")]
        if module
        else ["python", sys.argv[0]]
    )
    return shlex.join([*start, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Return installed versions of the packages that decide a result."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine() -> str:
    """Return processor, cores and, where torch is loaded and sees them, GPUs in one line."""
    parts = [f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}"]
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")
        if torch.get_float32_matmul_precision() != "highest":
            parts.append("fp32 products in TF32")
    return ", ".join(parts)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
