"""The environment scripts: which Python and torch they take, what they repair, what they say."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch import environment

REPOSITORY = Path(__file__).parents[2]
THIS_PYTHON = "{}.{}".format(*sys.version_info[:2])


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A checkout with nothing but what the environment is made from, in a path with a space."""
    root = tmp_path / "a checkout"
    (root / "launch").mkdir(parents=True)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(REPOSITORY / name, root / name)
    for name in ("environment.sh", "environment.py", "cat_lm_entry.py"):
        shutil.copy(REPOSITORY / "launch" / name, root / "launch" / name)
    venv = root / ".venv"
    for name, value in (
        ("ROOT", root),
        ("VENV", venv),
        ("VENV_PYTHON", venv / "bin" / "python"),
        ("RECORD", venv / "cat_lm-environment.json"),
        ("LOG", venv / "install.log"),
    ):
        monkeypatch.setattr(environment, name, value)
    return root


def write_executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def finished_environment(project: Path, torch: str = "2.13.0") -> None:
    """A .venv with a finished record, whose Python answers version and torch only."""
    write_executable(
        project / ".venv" / "bin" / "python",
        f'case "$2" in *torch*) echo {torch};; *) echo {THIS_PYTHON};; esac',
    )
    environment.write_record(
        finished=True, created_here=True, python=THIS_PYTHON, fingerprint=environment.fingerprint()
    )


# Which torch stays


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        *(("2.11.0", True), ("2.12", True), ("2.13.1+cu130", True), ("2.13.0a0+5228986c39", True)),
        *(("2.10.2", False), ("2.14.0", False), ("2.14.0.dev20261001", False), ("3.0", False)),
        *(("2.11.0rc2", False), ("2.9.1+rocm6.3", False), ("unknown", False)),
    ],
)
def test_torch_range(version, inside):
    assert environment.in_range(version, ">=2.11,<2.14") is inside


def test_torch_range_comes_from_setup_cfg(project):
    setup_cfg = project / "setup.cfg"
    assert environment.torch_range().startswith(">=")
    old = f"torch{environment.torch_range()}"
    setup_cfg.write_text(setup_cfg.read_text().replace(old, "torch>=7.1,<7.2"))
    assert environment.torch_range() == ">=7.1,<7.2"


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize(
    ("installed", "kept"),
    [("2.12.1+rocm6.9", "2.12.1+rocm6.9"), ("2.9.0", None), (None, None), ("2.13.0+cu130", None)],
)
def test_a_torch_that_is_there_stays(project, monkeypatch, installed, kept, has_triton):
    monkeypatch.setattr(environment, "installed_torch", lambda python: installed)
    pins = {"torch": "2.13.0", "triton": "3.7.1", "setuptools": "81.0.0"}
    monkeypatch.setattr(environment, "pins", lambda: pins.copy())
    monkeypatch.setattr(environment, "has_triton", lambda python: has_triton)
    (project / ".venv").mkdir()
    assert environment.torch_to_keep({}) == kept
    environment.choose_requirements(kept)
    wanted = (project / ".venv" / "requirements.txt").read_text().split()
    fixed = (project / ".venv" / "constraints.txt").read_text().split()
    assert ("torch==2.13.0" in wanted) is (kept is None)
    assert (f"torch=={installed}" in fixed) is (kept is not None)
    assert ("triton==3.7.1" in wanted) is (kept is None or not has_triton)


def test_a_torch_that_these_scripts_installed_follows_the_pin(project, monkeypatch):
    monkeypatch.setattr(environment, "installed_torch", lambda python: "2.12.0+cpu")
    assert environment.torch_to_keep({"torch_installed": "2.12.0+cpu"}) is None


# When there is something to do


def test_finished_environment_is_current(project):
    assert not environment.is_current(THIS_PYTHON)
    finished_environment(project)
    assert environment.is_current(THIS_PYTHON)
    assert not environment.is_current("3.99")


@pytest.mark.parametrize("changed", ["requirements.txt", "setup.cfg", "pyproject.toml"])
def test_changed_requirements_are_not_current(project, changed):
    finished_environment(project)
    with (project / changed).open("a") as file:
        file.write("# another line\n")
    assert not environment.is_current(THIS_PYTHON)


def test_interrupted_moved_or_torchless_is_not_current(project, monkeypatch):
    finished_environment(project)
    environment.write_record(**environment.read_record() | {"finished": False})
    assert not environment.is_current(THIS_PYTHON)
    finished_environment(project, torch="2.9.0")
    assert not environment.is_current(THIS_PYTHON)
    finished_environment(project)
    monkeypatch.setattr(environment, "ROOT", project.parent)
    shutil.copytree(project, project.parent, dirs_exist_ok=True)
    assert not environment.is_current(THIS_PYTHON)


def test_half_installed_packages_are_forgotten(project):
    site_packages = project / ".venv" / "lib" / f"python{THIS_PYTHON}" / "site-packages"
    for name in ("whole-1.0.dist-info", "half-1.0.dist-info", "~olf"):
        (site_packages / name).mkdir(parents=True)
    (site_packages / "whole-1.0.dist-info" / "RECORD").touch()
    environment.remove_half_installed()
    assert [path.name for path in site_packages.iterdir()] == ["whole-1.0.dist-info"]


# Environments of others


@pytest.fixture
def created(monkeypatch) -> list[bool]:
    """Calls of create(), which would make an environment: whether system packages are seen."""
    calls = []
    monkeypatch.setattr(environment, "create", lambda system_site_packages: calls.append(True))
    return calls


def test_usable_environment_of_another_stays(project, created):
    write_executable(project / ".venv" / "bin" / "python", f"echo {THIS_PYTHON}")
    environment.make_usable(THIS_PYTHON)
    assert created == []


def test_environment_of_another_with_a_wrong_python_is_not_deleted(project, created):
    python = write_executable(project / ".venv" / "bin" / "python", "echo 3.9")
    with pytest.raises(environment.EnvironmentFailed, match=r"holds Python 3\.9"):
        environment.make_usable(THIS_PYTHON)
    assert python.is_file() and created == []


@pytest.mark.parametrize("state", ["missing", "empty", "own", "wreck"])
def test_what_is_replaced(project, created, state):
    venv = project / ".venv"
    if state != "missing":
        venv.mkdir()
    if state == "own":
        write_executable(venv / "bin" / "python", "echo 3.9")
        environment.write_record(finished=True, created_here=True)
    if state == "wreck":
        (venv / "pyvenv.cfg").touch()
    environment.make_usable(THIS_PYTHON)
    assert created == [True]
    assert not venv.exists() or list(venv.iterdir()) == []


def test_a_link_to_another_checkouts_environment_is_left_alone(project, created, tmp_path):
    """Replacing it would empty the folder that the other one works with."""
    other = tmp_path / "other"
    python = write_executable(other / ".venv" / "bin" / "python", f"echo {THIS_PYTHON}")
    (project / ".venv").symlink_to(other / ".venv")
    record = {"finished": True, "created_here": True, "root": str(other)}
    (other / ".venv" / environment.RECORD.name).write_text(json.dumps(record))
    with pytest.raises(environment.EnvironmentFailed, match=r"environment of the checkout .*other"):
        environment.make_usable(THIS_PYTHON)
    assert python.is_file() and created == []
    # The checkout itself was moved, and its environment with it: that one is replaced.
    (project / ".venv").unlink()
    (other / ".venv").rename(project / ".venv")
    environment.make_usable(THIS_PYTHON)
    assert created == [True]


# What a failure says


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: No matching distribution found for tqdm==4.70.1",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for tqdm==4.70.1", "has no tqdm==4.70.1"),
        ("  ERROR: Failed building wheel for deepspeed\n", "deepspeed could not be built"),
        ("one line\nERROR: Cannot install a and b\n", "pip: Cannot install a and b"),
        ("one line\nthe last line\n", "the last line"),
    ],
)
def test_reason_of_a_failed_installation(project, log, reason):
    (project / ".venv").mkdir()
    assert reason in environment.explain(log)


def test_failed_command_names_reason_and_log(project):
    (project / ".venv").mkdir()
    code = "import sys; print('ERROR: No matching distribution found for x==1'); sys.exit(1)"
    with pytest.raises(environment.EnvironmentFailed, match=r"^stage: .*no x==1 \(log: .*log\)$"):
        environment.run_logged([sys.executable, "-c", code], "stage")
    assert "No matching distribution" in environment.LOG.read_text()


# Finding the interpreter


def set_up(project: Path, *, python: str | None = None) -> subprocess.CompletedProcess:
    """Run environment.sh with nothing but fake interpreters on PATH."""
    tools = project / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("bash", "dirname", "sh"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name))
    variables = {"PATH": str(tools), "PYTHONPATH": "/nowhere"}
    if python:
        variables["PYTHON"] = python
    script = project / "launch" / "environment.sh"
    return subprocess.run(["bash", str(script)], env=variables, capture_output=True, text=True)


def fake_python(project: Path, name: str, version: str, torch: str = "", broken: str = "") -> None:
    """An interpreter that answers the questions of environment.sh and says when it is chosen."""
    write_executable(
        project / "bin" / name,
        f"""[ -z "$PYTHONPATH" ] || exit 9
case "$*" in
    *--probe) echo "{broken or torch}"; exit {1 if broken else 0};;
    -c*) echo {version};;
    *) echo "chosen: {name}";;
esac""",
    )


def test_first_supported_python_is_chosen(project):
    fake_python(project, "python3", "3.13")
    write_executable(project / "bin" / "python3.12", "echo 'command not found' >&2; exit 127")
    fake_python(project, "python3.11", "3.11")
    fake_python(project, "python", "3.12")
    assert set_up(project).stdout == "chosen: python3.11\n"


def test_python_with_a_torch_is_preferred(project):
    fake_python(project, "python3.12", "3.12")
    fake_python(project, "python3", "3.11", torch="2.12.0")
    assert set_up(project).stdout == "chosen: python3\n"


def test_named_python_is_taken_or_refused(project):
    fake_python(project, "python3.12", "3.12")
    fake_python(project, "python-old", "3.10")
    fake_python(project, "python-mine", "3.11")
    assert set_up(project, python="python-mine").stdout == "chosen: python-mine\n"
    for python, reason in (("python-old", "is Python 3.10"), ("python-none", "no such command")):
        result = set_up(project, python=python)
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert f"PYTHON={python}" in result.stderr and reason in result.stderr


def test_no_usable_python_is_one_line_with_every_reason(project):
    fake_python(project, "python3", "3.13")
    fake_python(project, "python3.11", "3.11", broken="has no ensurepip module")
    result = set_up(project)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    for part in ("no Python 3.11 or 3.12", "python3 is Python 3.13", "python3.11 has no ensurepip"):
        assert part in result.stderr


def test_scripts_find_the_environment_from_anywhere(project, tmp_path):
    """Another environment active, another folder: PATH and VIRTUAL_ENV are those of .venv."""
    write_executable(project / ".venv" / "bin" / "python", "exit 0")
    script = f'source "{project}/launch/environment.sh"; '
    script += 'echo "$VIRTUAL_ENV"; command -v python; echo "$OMP_WAIT_POLICY"'
    result = subprocess.run(
        ["bash", "-euc", script],
        env={"PATH": os.environ["PATH"], "VIRTUAL_ENV": "/elsewhere", "PYTHONHOME": "/elsewhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    venv = project.resolve() / ".venv"
    assert result.stdout.splitlines() == [str(venv), str(venv / "bin" / "python"), "passive"]
