"""Make the virtual environment of this checkout, or bring it up to date.

environment.sh finds an interpreter and runs this file before anything is installed, so that it uses
the standard library only. A record in the environment marks it as finished; after an interruption
the next run repairs an unfinished one.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
RECORD = VENV / "cat_lm-environment.json"
LOG = VENV / "install.log"
THIS_PYTHON = "{}.{}".format(*sys.version_info[:2])

# Settings of pip's configuration, and the variables with the same meaning for uv.
UV_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}

# Settings that change what is installed, and that uv cannot read from variables.
ONLY_OF_PIP = ("no-index", "no-binary", "only-binary", "pre", "require-hashes")

# Patterns in pip's output and their meaning; the first match is the reason of a failure.
REASONS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full"),
    # pip continues after this error, and then reports that the index has no such package.
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
        r"|Network is unreachable|Connection (?:refused|reset|aborted)|Temporary failure in name",
        "the package index cannot be reached; check the network, proxy and `pip config list`",
    ),
    (r"^ERROR: (.+)$", "pip: {}"),
    (r"(.+)\s*\Z", "{}"),
)


class EnvironmentFailed(Exception):
    """The environment cannot be made; the message is one line for the user."""


# The requirements in setup.cfg and requirements.txt


def is_supported_torch(version: str | None) -> bool:
    """Return True if a torch version, such as 2.13.0+cu130, is in the range of setup.cfg.

    `packaging` is not used because nothing is installed yet.
    """

    def minor(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)[:2]]

    setup_cfg = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    low, high = re.search(r"torch>=([\d.]+),<([\d.]+)", setup_cfg).groups()
    return minor(low) <= minor(version or "") < minor(high)


def read_pins() -> dict[str, str]:
    """Return the exact version of each package in requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def fingerprint() -> str:
    """Return a hash of all files that determine what is installed."""
    digest = hashlib.sha256()
    for name in ("requirements.txt", "setup.cfg", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


# The present state


def base_python() -> str:
    """Return the interpreter below a virtual environment, or the running one outside of it."""
    return getattr(sys, "_base_executable", None) or sys.executable


LOOK = """
import json, sys
from importlib.metadata import PackageNotFoundError, distribution
found = {"python": "%d.%d" % sys.version_info[:2]}
for name in ("triton", "torch"):
    try:
        found[name] = distribution(name).version
        found["folder"] = str(distribution(name).locate_file(""))
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def read_versions(python: str | Path) -> dict[str, Any]:
    """Return the versions of an interpreter and of the torch and triton that it would import.

    `folder` is the folder of this torch. Return {} if the interpreter does not run.
    """
    with contextlib.suppress(OSError, ValueError):
        return json.loads(subprocess.run([python, "-c", LOOK], capture_output=True).stdout)
    return {}


def read_record() -> dict[str, Any]:
    """Return the record of an environment that these scripts made; {} for any other."""
    try:
        return json.loads(RECORD.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def write_record(**record: Any) -> None:
    record["root"] = str(ROOT)
    temporary = RECORD.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(RECORD)


def is_current() -> bool:
    """Return True if the environment is finished for this Python, folder and requirements."""
    wanted = {"root": str(ROOT), "python": THIS_PYTHON, "fingerprint": fingerprint()}
    found = read_record()
    return found == found | wanted | {"finished": True} and is_supported_torch(
        read_versions(VENV_PYTHON).get("torch")
    )


def probe() -> int:
    """Print the supported torch of this Python, if any, or the modules that it lacks (code 1)."""
    has = importlib.util.find_spec
    lacking = [name for name in ("venv", "ensurepip") if has(name) is None]
    if lacking and not (Path(sys.prefix) == VENV and has("pip")):  # The environment exists already.
        print(
            f"has no {' and no '.join(lacking)} module "
            f"(Debian, Ubuntu: apt install python{THIS_PYTHON}-venv)"
        )
        return 1
    torch = read_versions(base_python()).get("torch")
    print(torch if is_supported_torch(torch) else "")
    return 0


# Installation


@contextlib.contextmanager
def timed_phase(title: str) -> Iterator[None]:
    """Print the title of a phase at its start, and its seconds at the end."""
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
    """Lock the installation; a second process waits, and then finds everything installed."""
    with open(ROOT / "setup.cfg", "rb") as file:
        # Some network file systems have no locks; there a user must not start two at once.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_reason(log: str) -> str:
    """Return the reason of a failed installation as text, from the installer's output."""
    for pattern, reason in REASONS:
        if found := re.findall(pattern, log, flags=re.MULTILINE):
            return reason.format(found[-1])
    return "no output"


def run_logged(arguments: list[str], what: str, **environment: str) -> None:
    """Run a command with its output in the log. Raises EnvironmentFailed with the reason."""
    settings = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    # With these variables of the user, packages would be installed outside of the environment.
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
        raise EnvironmentFailed(f"{what}: {find_reason(output)} (log: {LOG})")


def make_or_replace_venv() -> None:
    """Make .venv run this Python, if necessary by replacing an environment of these scripts."""
    record, present = read_record(), read_versions(VENV_PYTHON).get("python")
    moved = record.get("root", str(ROOT)) != str(ROOT)
    if present == THIS_PYTHON and not moved:
        return
    contents = list(VENV.iterdir()) if VENV.exists() else []
    # Do not delete through a link, which may lead to another checkout's environment.
    if contents and (VENV.is_symlink() or not record.get("created_here")):
        raise EnvironmentFailed(
            f"{VENV} holds {f'Python {present}' if present else 'no environment'}"
            f"{' of another checkout' * moved}, Python {THIS_PYTHON} is wanted, and these scripts "
            "did not make it: move it away or delete it"
        )
    for path in contents:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    VENV.mkdir(exist_ok=True)
    write_record(finished=False, created_here=True)  # Write it before anything else.
    arguments = [base_python(), "-m", "venv", str(VENV)]
    if is_supported_torch(read_versions(base_python()).get("torch")):
        arguments.append("--system-site-packages")
    with timed_phase(f"making .venv with Python {sys.version.split()[0]}"):
        run_logged(arguments, "the virtual environment could not be made")


def remove_half_installed() -> None:
    """Remove the metadata of packages whose installation or removal was interrupted.

    Installers would take such packages for complete ones. pip writes RECORD last, and uv INSTALLER.
    Names that begin with ~ are what pip has renamed during a removal.
    """
    for site_packages in VENV.glob("lib/python*/site-packages"):
        cut_off = [
            metadata
            for metadata in site_packages.glob("*.dist-info")
            if not all((metadata / name).is_file() for name in ("RECORD", "INSTALLER"))
        ]
        for leftover in (*cut_off, *site_packages.glob("~*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def choose_kept_torch(record: dict[str, Any], there: dict[str, Any]) -> str | None:
    """Return the version of a supported torch that others have installed, or None."""
    installed, pinned = there.get("torch"), read_pins()["torch"]
    if installed is None or installed == record.get("torch_installed"):
        return None
    if installed.split("+")[0] == pinned and Path(there["folder"]).is_relative_to(VENV):
        return None  # It already has the pinned version.
    if is_supported_torch(installed):
        print(f"environment: keeping torch {installed}, which is in the range of setup.cfg")
        return installed
    print(f"environment: torch {installed} is not in the range of setup.cfg: installing {pinned}")
    return None


def write_requirements(kept_torch: str | None, has_triton: bool) -> None:
    """Write the requirements and the constraints of the installation into .venv."""
    wanted = read_pins()
    fixed = [f"setuptools=={wanted['setuptools']}"]
    if kept_torch:
        del wanted["torch"]
        fixed.append(f"torch=={kept_torch}")
        if has_triton:
            # Keep the triton that came with a torch for GPUs.
            del wanted["triton"]
    lines = [f"{package}=={version}" for package, version in wanted.items()]
    (VENV / "requirements.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (VENV / "constraints.txt").write_text("\n".join([*fixed, ""]), encoding="utf-8")


def read_uv_settings() -> dict[str, str]:
    """Return variables with which uv uses the indexes and certificates of pip's configuration.

    Raises:
        EnvironmentFailed: the configuration has a setting that uv does not have.
    """
    pip_config = [str(VENV_PYTHON), "-m", "pip", "config", "list"]
    listed = subprocess.run(pip_config, capture_output=True, text=True).stdout
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's choice among indexes
    # The sections have increasing priority, as in pip.
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)='(.*)'$", listed, re.MULTILINE):
            if name in ONLY_OF_PIP:
                raise EnvironmentFailed(f"uv does not know pip's setting {name}")
            if variable := UV_SETTINGS.get(name):
                separator = "," if variable == "UV_FIND_LINKS" else " "
                settings[variable] = separator.join(value.replace("\\n", " ").split())
    constraints = f".venv/constraints.txt {settings.get('UV_CONSTRAINT', '')}".strip()
    return settings | {
        "UV_CONSTRAINT": constraints,
        "UV_BUILD_CONSTRAINT": ".venv/constraints.txt",
    }


def install_packages(kept_torch: str | None) -> None:
    """Install the requirements by uv, or by pip if uv cannot be installed or fails."""
    pip = [str(VENV_PYTHON), "-m", "pip", "install"]
    uv = [str(VENV_PYTHON), "-m", "uv", "pip", "install", "--python", str(VENV_PYTHON)]
    requirements = ["-r", ".venv/requirements.txt"]
    if kept_torch:
        # uv does not see the packages of the interpreter below .venv, and would install a second
        # torch as a dependency. The requirements lack only dependencies of torch.
        requirements.append("--no-deps")
    # DeepSpeed's source distribution would otherwise look for a CUDA toolkit.
    plain = {"DS_BUILD_OPS": "0"}
    try:
        settings = read_uv_settings()
        once = ["--retries", "0", "--timeout", "15"]  # pip retries below.
        run_logged([*pip, *once, f"uv=={read_pins()['uv']}"], "uv cannot be had")
        run_logged([*uv, *requirements], "uv failed", **plain, **settings)
    except EnvironmentFailed as error:
        print(f"{error}; pip installs instead ...", end=" ", flush=True)
        # Relative paths, because pip splits the variables at spaces.
        limits = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), ".venv/constraints.txt")
        plain |= {"PIP_USE_PEP517": "1", **limits}
        run_logged([*pip, *requirements], "installation failed", **plain)


def install() -> None:
    """Install the pinned packages and the package itself into .venv."""
    record = read_record()
    write_record(**record | {"finished": False})
    python = str(VENV_PYTHON)
    if subprocess.run([python, "-c", "import pip"], capture_output=True).returncode != 0:
        run_logged([python, "-m", "ensurepip", "--default-pip"], "pip could not be installed")
    remove_half_installed()
    there = read_versions(python)
    kept_torch = choose_kept_torch(record, there)
    write_requirements(kept_torch, "triton" in there)
    with timed_phase(f"installing the pinned packages (log: {LOG.relative_to(ROOT)})"):
        install_packages(kept_torch)
    # The build uses the environment's setuptools, so that nothing is downloaded.
    arguments = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", "."]
    with timed_phase("installing cat_lm from this checkout"):
        run_logged(arguments, "cat_lm could not be installed")
    write_record(
        finished=True,
        created_here=record.get("created_here", False),
        python=read_versions(python)["python"],
        fingerprint=fingerprint(),
        torch_installed=None if kept_torch else read_versions(python).get("torch"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check",
        action="store_true",
        help="only check: exit 0 if the environment is up to date, else 1",
    )
    mode.add_argument(
        "--probe",
        action="store_true",
        help="only print whether this Python can make the environment",
    )
    options = parser.parse_args()
    if options.check:
        return 0 if is_current() else 1
    if options.probe:
        return probe()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with locked():
            if not is_current():
                make_or_replace_venv()
                install()
    except (EnvironmentFailed, OSError) as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: interrupted; the next run continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
