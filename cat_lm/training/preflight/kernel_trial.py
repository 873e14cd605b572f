"""Whether a Triton kernel really runs on a device: compiled, built, loaded, launched and right.

That Triton imports says little: at the first launch on each node it builds, in C and against
Python's headers, what loads and starts a kernel (triton/runtime/build.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

COMPILERS = ("clang", "gcc")  # that Triton looks for


def why_no_kernel(device: torch.device) -> str | None:
    """Launch the convolution of a few numbers on `device`; None where it runs and is right.

    A second or two the first time on a node, milliseconds where Triton's cache has the kernel.

    Returns:
        What is wrong and what to do, in one line.
    """
    from cat_lm.ops.convolution.triton import convolve

    x = torch.arange(16.0, device=device).view(1, 16, 1, 1).expand(1, 16, 1, 16)
    try:
        found = convolve("head", x, torch.ones(1, 2, device=device), None, None)[0, :, 0, 0]
        wrong = found.tolist() != [0.0, *(float(2 * t - 1) for t in range(1, 16))]
    except Exception as error:  # of Triton, its compilers, the loader, the driver
        said = " ".join(str(error).split())
        return what_is_missing() or f"a Triton kernel does not run: {type(error).__name__}: {said}"
    return "a Triton kernel runs and computes wrong numbers on this device" if wrong else None


def what_is_missing() -> str | None:
    """Return what Triton still needs on this node, and what to do; None where all is there."""
    named = os.environ.get("CC")
    if named is not None and shutil.which(named) is None:
        return (
            f"CC={named}: no such C compiler, which Triton's kernels need; unset CC, or install it"
        )
    if named is None and not any(map(shutil.which, COMPILERS)):
        return (
            f"there is no C compiler ({' or '.join(COMPILERS)}), which Triton's kernels need on "
            "every node; install gcc, or name one in CC"
        )
    folder = Path(_headers())
    if not (folder / "Python.h").is_file():
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"{folder}/Python.h is missing, which Triton's kernels need on every node; install "
            f"Python's headers (Debian and Ubuntu: {version}-dev)"
        )
    return None


def _headers() -> str:
    """The folder of Python's headers, as Triton finds it."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder where there are none.
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
