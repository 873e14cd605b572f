"""Make the virtual environment of this checkout, or bring it up to date.

environment.sh finds the interpreter and runs this file with it, before anything is installed: the
standard library only. The environment is finished when its record says so; a run that is cut off
at any moment leaves an unfinished record, and the next run repairs what it finds.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
RECORD = VENV / "cat_lm-environment.json"
LOG = VENV / "install.log"
SUPPORTED_PYTHONS = ("3.11", "3.12")


class EnvironmentFailed(Exception):
    """The environment cannot be made; the message is the one line shown."""


# What setup.cfg and requirements.txt ask for


def torch_range() -> str:
    """The torch range of setup.cfg, such as ">=2.11,<2.14"."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    for line in config["options"]["install_requires"].splitlines():
        if line.startswith("torch>"):
            return line.removeprefix("torch").strip()
    raise EnvironmentFailed("setup.cfg gives no torch range in install_requires")


def in_range(version: str, specifiers: str) -> bool:
    """Return True if a torch version lies in a range of >= and <, without its pre-releases.

    Not `packaging`: nothing is installed yet. A local part (+cu130) plays no role.
    """
    parsed = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(a|b|rc|\.dev)?", version)
    if parsed is None:
        return False
    release = tuple(int(part or 0) for part in parsed.groups()[:3])
    is_prerelease = parsed.group(4) is not None
    for specifier in specifiers.split(","):
        operator, bound_text = re.match(r"(>=|<)(.+)", specifier.strip()).groups()
        bound = tuple(int(part) for part in bound_text.split("."))
        bound += (0,) * (3 - len(bound))
        if operator == ">=" and (release < bound or (release == bound and is_prerelease)):
            return False
        if operator == "<" and release >= bound:
            return False
    return True


def pins() -> dict[str, str]:
    """Package name → exact version, from requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def fingerprint() -> str:
    """Hash over every file that decides what is installed."""
    digest = hashlib.sha256()
    names = ("requirements.txt", "setup.cfg", "setup.py", "pyproject.toml")
    for name in (*names, "launch/cat_lm_entry.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


# What is there


def base_python() -> str:
    """The interpreter under the running one: itself, unless that is a virtual environment's."""
    return getattr(sys, "_base_executable", None) or sys.executable


def installed_torch(python: str | Path) -> str | None:
    """Version of the torch that `python` would import; None where there is none."""
    code = "from importlib.metadata import version; print(version('torch'))"
    result = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def has_triton(python: str | Path) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('triton') is None)"
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def keepable_torch(python: str | Path) -> str | None:
    version = installed_torch(python)
    return version if version and in_range(version, torch_range()) else None


def python_version(python: str | Path) -> str | None:
    """ "3.11" of an interpreter; None where it does not run."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    with contextlib.suppress(OSError):
        result = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
        return result.stdout.strip() if result.returncode == 0 else None
    return None


def read_record() -> dict | None:
    """The record of an environment that these scripts made; None for any other."""
    try:
        return json.loads(RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_record(**record) -> None:
    record["root"] = str(ROOT)
    temporary = RECORD.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(RECORD)


def is_current(python: str) -> bool:
    """Return True if the environment is finished, for this Python, place and requirements."""
    record = read_record()
    return (
        record is not None
        and record.get("finished") is True
        and record.get("root") == str(ROOT)
        and record.get("python") == python
        and record.get("fingerprint") == fingerprint()
        and keepable_torch(VENV_PYTHON) is not None
    )


def missing_modules() -> str | None:
    """Name what the interpreter lacks for making environments; None where it lacks nothing."""
    if Path(sys.prefix) == VENV and importlib.util.find_spec("pip"):
        return None  # the environment is there already
    lacking = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    package = "python{}.{}-venv".format(*sys.version_info[:2])
    return f"has no {' and no '.join(lacking)} module (Debian, Ubuntu: apt install {package})"


# Making it


@contextlib.contextmanager
def phase(title: str) -> Iterator[None]:
    """One line per phase: its name at the start, its seconds at the end."""
    started = time.monotonic()
    print(f"environment: {title} ...", end=" ", flush=True)
    try:
        yield
    except BaseException:
        print(flush=True)
        raise
    print(f"{time.monotonic() - started:.0f} s", flush=True)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One installation at a time; the second waits and then finds everything done."""
    descriptor = os.open(ROOT, os.O_RDONLY)
    try:
        # Some network file systems lock no folder: there the user must not start two at once.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("environment: waiting for another run that is installing", flush=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def explain(log: str) -> str:
    """The reason of a failed installation, in words, from pip's output."""
    free = shutil.disk_usage(VENV).free
    # Not every tool that runs here says why it failed, hence the look at the disk.
    if free < 2**24 or "No space left on device" in log or "Disk quota exceeded" in log:
        return (
            f"the disk is full ({free / 2**30:.1f} GiB free at {VENV}); TMPDIR and PIP_CACHE_DIR "
            "can point elsewhere"
        )
    unreachable = (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
        r"|Network is unreachable|Connection (?:refused|reset|aborted)|Temporary failure in name"
    )
    if re.search(unreachable, log):
        return "the package index cannot be reached; check the network, proxy and `pip config list`"
    for pattern, reason in (
        (r"Failed (?:building wheel for|to build) '?([\w.-]+)", "{} could not be built"),
        (r"No matching distribution found for (\S+)", "the package index has no {}"),
        (r"^ERROR: (.+)$", "pip: {}"),
    ):
        if found := re.findall(pattern, log, flags=re.MULTILINE):
            return reason.format(found[-1])
    lines = log.strip().splitlines()
    return lines[-1] if lines else "no output"


def run_logged(arguments: list[str], what: str, **environment: str) -> None:
    """Run a command with its output in the log; raise with the reason where it fails."""
    settings = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    # Left over from the user's configuration, these send packages past the environment.
    for name in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME"):
        settings.pop(name, None)
    settings |= {"PIP_USER": "0", **environment}
    with LOG.open("a+", encoding="utf-8", errors="replace") as log:
        log.write(f"$ {' '.join(arguments)}\n")
        log.flush()
        start = log.tell()
        result = subprocess.run(
            arguments, cwd=ROOT, env=settings, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.seek(start)
        output = log.read()
    if result.returncode != 0:
        raise EnvironmentFailed(f"{what}: {explain(output)} (log: {LOG})")


def create(system_site_packages: bool) -> None:
    """A new virtual environment, its record begun before anything else is in it."""
    VENV.mkdir(exist_ok=True)
    write_record(finished=False, created_here=True)
    arguments = [base_python(), "-m", "venv", str(VENV)]
    if system_site_packages:
        arguments.append("--system-site-packages")
    with phase(f"making .venv with Python {sys.version.split()[0]}"):
        run_logged(arguments, "the virtual environment could not be made")


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_half_installed() -> None:
    """Take away the metadata of packages whose installation or removal was cut off.

    pip writes RECORD last; without it, it would take the package for a whole one. The names that
    begin with ~ are what it moved aside during a removal.
    """
    for site_packages in VENV.glob("lib/python*/site-packages"):
        for metadata in site_packages.glob("*.dist-info"):
            if not (metadata / "RECORD").is_file():
                shutil.rmtree(metadata)
        for leftover in site_packages.glob("~*"):
            remove(leftover)


def torch_to_keep(record: dict) -> str | None:
    """Version of a torch that somebody else put where .venv finds it and that may stay."""
    installed, pinned = installed_torch(VENV_PYTHON), pins()["torch"]
    if installed is None or installed == record.get("torch_installed"):
        return None
    if installed.split("+")[0] == pinned:
        return None  # satisfies the pin as it is
    if in_range(installed, torch_range()):
        print(f"environment: keeping torch {installed}, in the tested range {torch_range()}")
        return installed
    print(f"environment: torch {installed} is not in {torch_range()}: installing {pinned}")
    return None


def choose_requirements(kept_torch: str | None) -> None:
    """Write into .venv what pip is to install and which versions it may not change."""
    wanted = pins()
    fixed = [f"setuptools=={wanted['setuptools']}"]
    if kept_torch:
        del wanted["torch"]
        fixed.append(f"torch=={kept_torch}")
        if has_triton(VENV_PYTHON):
            # A torch for GPUs comes with the triton that it was built for.
            del wanted["triton"]
    for name, lines in (
        ("requirements.txt", [f"{package}=={version}" for package, version in wanted.items()]),
        ("constraints.txt", fixed),
    ):
        (VENV / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def install() -> None:
    """Install the pinned packages and the package itself into .venv."""
    record = read_record() or {}
    write_record(**record | {"finished": False})
    python = str(VENV_PYTHON)
    if subprocess.run([python, "-c", "import pip"], capture_output=True).returncode != 0:
        run_logged([python, "-m", "ensurepip", "--default-pip"], "pip could not be installed")
    remove_half_installed()
    kept_torch = torch_to_keep(record)
    choose_requirements(kept_torch)

    # Relative paths: pip splits the variables at spaces. Source distributions build in isolation,
    # so that DeepSpeed's does not look at torch and ask for a CUDA toolkit.
    limits = {
        "PIP_CONSTRAINT": ".venv/constraints.txt",
        "PIP_BUILD_CONSTRAINT": ".venv/constraints.txt",
        "PIP_USE_PEP517": "1",
        "DS_BUILD_OPS": "0",
    }
    arguments = [python, "-m", "pip", "install", "-r", ".venv/requirements.txt"]
    with phase(f"installing the pinned packages (log: {LOG.relative_to(ROOT)})"):
        run_logged(arguments, "installation failed", **limits)
    # With the environment's own setuptools: nothing is downloaded here.
    arguments = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", "."]
    with phase("installing cat_lm from this checkout"):
        run_logged(arguments, "cat_lm could not be installed")

    write_record(
        finished=True,
        created_here=record.get("created_here", False),
        python=python_version(python),
        fingerprint=fingerprint(),
        torch_installed=None if kept_torch else installed_torch(python),
    )


def make_usable(wanted_python: str) -> None:
    """Leave a .venv that runs the wanted Python: the present one, or a new one in its place."""
    if VENV.exists():
        record, present = read_record() or {}, python_version(VENV_PYTHON)
        maker = Path(record.get("root", ROOT))
        moved = maker != ROOT
        if present == wanted_python and not moved:
            return
        if moved and (maker / ".venv").exists() and (maker / ".venv").samefile(VENV):
            raise EnvironmentFailed(
                f"{VENV} is the environment of the checkout {maker}, which is still there: "
                "remove the link to it, and this checkout gets its own"
            )
        is_wreck = present is None and (VENV / "pyvenv.cfg").is_file()
        if not (record.get("created_here") or is_wreck or not any(VENV.iterdir())):
            found = f"Python {present}" if present else "no environment"
            raise EnvironmentFailed(
                f"{VENV} holds {found}, Python {wanted_python} is wanted, and these scripts did "
                "not make it: move it away or delete it"
            )
        # The contents, not the folder: it may be a link to another disk.
        for path in VENV.iterdir():
            remove(path)
    create(system_site_packages=keepable_torch(base_python()) is not None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="only: exit 0 if nothing is to be done")
    mode.add_argument("--probe", action="store_true", help="only: say whether this Python will do")
    options = parser.parse_args()
    python = "{}.{}".format(*sys.version_info[:2])
    if options.check:
        return 0 if is_current(python) else 1
    if options.probe:
        lacking = missing_modules()
        print(lacking or keepable_torch(base_python()) or "")
        return 1 if lacking else 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with locked():
            if not is_current(python):
                make_usable(python)
                install()
    except EnvironmentFailed as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        print(f"environment: {f'the disk of {VENV} is full' if full else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: interrupted; the next run continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
