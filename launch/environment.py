"""Make the virtual environment of this checkout, or bring it up to date.

environment.sh finds the interpreter and runs this file with it, before anything is installed: the
standard library only. The environment is finished when its record says so; a run that is cut off
at any moment leaves an unfinished record, and the next run repairs what it finds.
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

# Settings of pip's configuration and the variables by which uv takes the same.
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

# Settings that change what is installed and that uv does not take from variables.
ONLY_OF_PIP = ("no-index", "no-binary", "only-binary", "pre", "require-hashes")

# Patterns of pip's output and what they mean; the first that is found is the reason of a failure.
REASONS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full"),
    # pip goes on after this, and says that the index has no such package.
    (
        r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError"
        r"|Network is unreachable|Connection (?:refused|reset|aborted)|Temporary failure in name",
        "the package index cannot be reached; check the network, proxy and `pip config list`",
    ),
    (r"^ERROR: (.+)$", "pip: {}"),
    (r"(.+)\s*\Z", "{}"),
)


class EnvironmentFailed(Exception):
    """The environment cannot be made; the message is the one line shown."""


# What setup.cfg and requirements.txt ask for


def is_supported_torch(version: str | None) -> bool:
    """Return True if a torch version, such as 2.13.0+cu130, lies in the range of setup.cfg.

    `packaging` is not used because nothing is installed yet.
    """

    def minor(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)[:2]]

    setup_cfg = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    low, high = re.search(r"torch>=([\d.]+),<([\d.]+)", setup_cfg).groups()
    return minor(low) <= minor(version or "") < minor(high)


def pins() -> dict[str, str]:
    """Return the exact version of each package in requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def fingerprint() -> str:
    """Hash every file that decides what is installed."""
    digest = hashlib.sha256()
    for name in ("requirements.txt", "setup.cfg", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


# What is there


def base_python() -> str:
    """Return the interpreter under the running one: itself unless that is of an environment."""
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


def look_into(python: str | Path) -> dict[str, Any]:
    """Return the versions of an interpreter, and of the torch and triton that it would import.

    Empty where it does not run; `folder` is where that torch is installed.
    """
    with contextlib.suppress(OSError, ValueError):
        return json.loads(subprocess.run([python, "-c", LOOK], capture_output=True).stdout)
    return {}


def read_record() -> dict[str, Any]:
    """Return the record of an environment that these scripts made; empty for any other."""
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
    """Return True if the environment is finished, for this Python, place and requirements."""
    wanted = {"root": str(ROOT), "python": THIS_PYTHON, "fingerprint": fingerprint()}
    found = read_record()
    return found == found | wanted | {"finished": True} and is_supported_torch(
        look_into(VENV_PYTHON).get("torch")
    )


def probe() -> int:
    """Print whether this Python will do: the version of its torch, if any, or what it lacks."""
    has = importlib.util.find_spec
    lacking = [name for name in ("venv", "ensurepip") if has(name) is None]
    if lacking and not (Path(sys.prefix) == VENV and has("pip")):  # the environment is there
        print(
            f"has no {' and no '.join(lacking)} module "
            f"(Debian, Ubuntu: apt install python{THIS_PYTHON}-venv)"
        )
        return 1
    torch = look_into(base_python()).get("torch")
    print(torch if is_supported_torch(torch) else "")
    return 0


# Making it


@contextlib.contextmanager
def phase(title: str) -> Iterator[None]:
    """Print one line: the title at the start, the seconds at the end."""
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
    """Let one installation run at a time; a second one waits and then finds everything done."""
    with open(ROOT / "setup.cfg", "rb") as file:
        # Some network file systems lock no file: there the user must not start two at once.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def explain(log: str) -> str:
    """Return the reason of a failed installation, in words, from the installer's output."""
    for pattern, reason in REASONS:
        if found := re.findall(pattern, log, flags=re.MULTILINE):
            return reason.format(found[-1])
    return "no output"


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


def make_usable() -> None:
    """Leave a .venv that runs this Python: the present one, or a new one in its place."""
    record, present = read_record(), look_into(VENV_PYTHON).get("python")
    moved = record.get("root", str(ROOT)) != str(ROOT)
    if present == THIS_PYTHON and not moved:
        return
    contents = list(VENV.iterdir()) if VENV.exists() else []
    # A link may lead to the environment of another checkout, which still needs it.
    if contents and (VENV.is_symlink() or not record.get("created_here")):
        raise EnvironmentFailed(
            f"{VENV} holds {f'Python {present}' if present else 'no environment'}"
            f"{' of another checkout' * moved}, Python {THIS_PYTHON} is wanted, and these scripts "
            "did not make it: move it away or delete it"
        )
    for path in contents:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    VENV.mkdir(exist_ok=True)
    write_record(finished=False, created_here=True)  # before anything else is in it
    arguments = [base_python(), "-m", "venv", str(VENV)]
    if is_supported_torch(look_into(base_python()).get("torch")):
        arguments.append("--system-site-packages")
    with phase(f"making .venv with Python {sys.version.split()[0]}"):
        run_logged(arguments, "the virtual environment could not be made")


def remove_half_installed() -> None:
    """Remove the metadata of packages whose installation or removal was cut off.

    pip writes RECORD last, uv INSTALLER; they would take such a package for a whole one. The names
    that begin with ~ are what pip moved aside during a removal.
    """
    for site_packages in VENV.glob("lib/python*/site-packages"):
        cut_off = [
            metadata
            for metadata in site_packages.glob("*.dist-info")
            if not all((metadata / name).is_file() for name in ("RECORD", "INSTALLER"))
        ]
        for leftover in (*cut_off, *site_packages.glob("~*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def torch_to_keep(record: dict[str, Any], there: dict[str, Any]) -> str | None:
    """Return the version of a torch that somebody else put where .venv finds it, if it may stay."""
    installed, pinned = there.get("torch"), pins()["torch"]
    if installed is None or installed == record.get("torch_installed"):
        return None
    if installed.split("+")[0] == pinned and Path(there["folder"]).is_relative_to(VENV):
        return None  # It satisfies the pin as it is.
    if is_supported_torch(installed):
        print(f"environment: keeping torch {installed}, which is in the range of setup.cfg")
        return installed
    print(f"environment: torch {installed} is not in the range of setup.cfg: installing {pinned}")
    return None


def write_requirements(kept_torch: str | None, has_triton: bool) -> None:
    """Write into .venv what is to be installed and which versions may not change."""
    wanted = pins()
    fixed = [f"setuptools=={wanted['setuptools']}"]
    if kept_torch:
        del wanted["torch"]
        fixed.append(f"torch=={kept_torch}")
        if has_triton:
            # A torch for GPUs comes with the triton that it was built for.
            del wanted["triton"]
    lines = [f"{package}=={version}" for package, version in wanted.items()]
    (VENV / "requirements.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (VENV / "constraints.txt").write_text("\n".join([*fixed, ""]), encoding="utf-8")


def uv_settings() -> dict[str, str]:
    """Return variables that make uv use the indexes and certificates of pip's configuration.

    Raises:
        EnvironmentFailed: the configuration has a setting that uv would not follow.
    """
    pip_config = [str(VENV_PYTHON), "-m", "pip", "config", "list"]
    listed = subprocess.run(pip_config, capture_output=True, text=True).stdout
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip chooses among indexes
    # From the weakest to the strongest, as pip has it.
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
    """Install the requirements by uv, or by pip where uv cannot be had or fails."""
    pip = [str(VENV_PYTHON), "-m", "pip", "install"]
    uv = [str(VENV_PYTHON), "-m", "uv", "pip", "install", "--python", str(VENV_PYTHON)]
    requirements = ["-r", ".venv/requirements.txt"]
    if kept_torch:
        # The requirements are complete but for what a torch brings along. The interpreter under
        # .venv is not seen by uv, which would install a second torch as a dependency.
        requirements.append("--no-deps")
    # DeepSpeed's source distribution would otherwise look for a CUDA toolkit.
    plain = {"DS_BUILD_OPS": "0"}
    try:
        settings = uv_settings()
        once = ["--retries", "0", "--timeout", "15"]  # pip tries again below
        run_logged([*pip, *once, f"uv=={pins()['uv']}"], "uv cannot be had")
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
    there = look_into(python)
    kept_torch = torch_to_keep(record, there)
    write_requirements(kept_torch, "triton" in there)
    with phase(f"installing the pinned packages (log: {LOG.relative_to(ROOT)})"):
        install_packages(kept_torch)
    # With the environment's own setuptools: nothing is downloaded here.
    arguments = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", "."]
    with phase("installing cat_lm from this checkout"):
        run_logged(arguments, "cat_lm could not be installed")
    write_record(
        finished=True,
        created_here=record.get("created_here", False),
        python=look_into(python)["python"],
        fingerprint=fingerprint(),
        torch_installed=None if kept_torch else look_into(python).get("torch"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="only: exit 0 if nothing is to be done")
    mode.add_argument("--probe", action="store_true", help="only: say whether this Python will do")
    options = parser.parse_args()
    if options.check:
        return 0 if is_current() else 1
    if options.probe:
        return probe()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with locked():
            if not is_current():
                make_usable()
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
