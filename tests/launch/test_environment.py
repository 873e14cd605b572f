"""The environment scripts: which Python and torch they take, what they repair, what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from launch import environment
from tests.conftest import REPOSITORY


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A checkout with nothing but what the environment is made from, in a path with a space."""
    root = tmp_path / "a checkout"
    (root / "launch").mkdir(parents=True)
    for name in ("setup.cfg", "pyproject.toml", "requirements.txt"):
        shutil.copy(REPOSITORY / name, root / name)
    for name in ("environment.sh", "environment.py"):
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
    found = json.dumps({"python": environment.THIS_PYTHON, "torch": torch})
    write_executable(project / ".venv" / "bin" / "python", f"echo '{found}'")
    environment.write_record(
        finished=True,
        created_here=True,
        python=environment.THIS_PYTHON,
        fingerprint=environment.fingerprint(),
    )


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        *(("2.11.0", True), ("2.12", True), ("2.13.1+cu130", True), ("2.13.0a0+5228986c39", True)),
        *(("2.10.2", False), ("2.14.0.dev20261001", False), ("unknown", False), (None, False)),
    ],
)
def test_torch_range_of_setup_cfg(project, version, inside):
    text = (project / "setup.cfg").read_text()
    text = re.sub(r"torch>=[\d.]+,<[\d.]+", "torch>=2.11,<2.14", text)
    (project / "setup.cfg").write_text(text)
    assert environment.is_supported_torch(version) is inside


@pytest.mark.parametrize(
    ("installed", "inside", "kept", "has_triton"),
    [
        ("2.12.1+rocm6.9", False, "2.12.1+rocm6.9", True),
        ("2.9.0", False, None, True),
        (None, False, None, False),
        # The pinned version is kept where uv does not see it: in the interpreter under .venv.
        ("2.13.0+cu130", False, "2.13.0+cu130", False),
        ("2.13.0+cu130", True, None, True),
    ],
)
def test_supported_torch_is_kept(project, monkeypatch, installed, inside, kept, has_triton):
    pins = {"torch": "2.13.0", "triton": "3.7.1", "setuptools": "81.0.0"}
    monkeypatch.setattr(environment, "read_pins", lambda: pins.copy())
    (project / ".venv").mkdir()
    folder = project / ".venv" / "lib" if inside else project
    there = {"torch": installed, "folder": str(folder)}
    assert environment.choose_kept_torch({}, there) == kept
    assert environment.choose_kept_torch({"torch_installed": installed}, there) is None  # our own
    environment.write_requirements(kept, has_triton)
    wanted = (project / ".venv" / "requirements.txt").read_text().split()
    fixed = (project / ".venv" / "constraints.txt").read_text().split()
    assert ("torch==2.13.0" in wanted) is (kept is None)
    assert (f"torch=={installed}" in fixed) is (kept is not None)
    assert ("triton==3.7.1" in wanted) is (kept is None or not has_triton)


def test_look_into_reports_the_imported_torch():
    torch = pytest.importorskip("torch")
    found = environment.read_versions(sys.executable)
    assert found["python"] == environment.THIS_PYTHON and found["torch"] == torch.__version__
    assert Path(torch.__file__).is_relative_to(found["folder"])
    assert environment.read_versions("/nowhere/python") == {}


def test_environment_is_current_until_something_changes(project, monkeypatch):
    assert not environment.is_current()
    for name in ("requirements.txt", "setup.cfg", "pyproject.toml"):
        finished_environment(project)
        assert environment.is_current()
        with (project / name).open("a") as file:
            file.write("# another line\n")
        assert not environment.is_current()
    for change in ({"finished": False}, {"python": "3.99"}):
        finished_environment(project)
        environment.write_record(**environment.read_record() | change)
        assert not environment.is_current()
    finished_environment(project, torch="2.9.0")
    assert not environment.is_current()
    finished_environment(project)
    monkeypatch.setattr(environment, "ROOT", project.parent)
    shutil.copytree(project, project.parent, dirs_exist_ok=True)
    assert not environment.is_current()


def test_half_installed_packages_are_forgotten(project):
    site_packages = project / ".venv" / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.0.dist-info", "half-1.0.dist-info", "uv-1.0.dist-info", "~olf"):
        (site_packages / name).mkdir(parents=True)
    for name in ("whole-1.0.dist-info/RECORD", "whole-1.0.dist-info/INSTALLER"):
        (site_packages / name).touch()
    (site_packages / "uv-1.0.dist-info/RECORD").touch()  # uv was killed before INSTALLER
    environment.remove_half_installed()
    assert [path.name for path in site_packages.iterdir()] == ["whole-1.0.dist-info"]


# Installing


@pytest.fixture
def commands(project, monkeypatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands that would have installed, with their variables."""
    (project / ".venv").mkdir()
    run = []
    monkeypatch.setattr(environment, "run_logged", lambda a, what, **e: run.append((a, e)))
    monkeypatch.setattr(environment, "VENV_PYTHON", Path(sys.executable))
    return run


def test_uv_installs_from_the_indexes_of_pip(commands, monkeypatch, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = http://one/simple\nfind-links = /a\n  /b c\n"
        "extra-index-url = http://weaker/simple\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://two/simple http://three/simple")
    environment.install_packages(None)
    (get_uv, _), (by_uv, variables) = commands
    assert get_uv[-1].startswith("uv==") and by_uv[1:4] == ["-m", "uv", "pip"]
    assert "--no-deps" not in by_uv
    assert variables["UV_DEFAULT_INDEX"] == "http://one/simple"
    assert variables["UV_INDEX"] == "http://two/simple http://three/simple"
    assert variables["UV_FIND_LINKS"] == "/a,/b,c"
    assert variables["UV_CONSTRAINT"].split()[0] == ".venv/constraints.txt"


@pytest.mark.parametrize("setting", ["NO_INDEX", "ONLY_BINARY"])
def test_pip_installs_where_uv_would_not_follow_its_configuration(commands, monkeypatch, setting):
    monkeypatch.setenv(f"PIP_{setting}", "1")
    environment.install_packages(None)
    ((arguments, _),) = commands
    assert arguments[1:4] == ["-m", "pip", "install"] and "-r" in arguments


def test_pip_installs_where_uv_cannot(commands, monkeypatch, capsys):
    run = environment.run_logged

    def fail(arguments, what, **variables):
        if arguments[2] == "uv":
            raise environment.EnvironmentFailed(f"{what}: no")
        run(arguments, what, **variables)

    monkeypatch.setattr(environment, "run_logged", fail)
    environment.install_packages("2.12.0")
    arguments, variables = commands[-1]
    assert arguments[1:4] == ["-m", "pip", "install"]
    assert "--no-deps" in arguments, "a kept torch is not installed again as a dependency"
    assert variables["PIP_CONSTRAINT"] == ".venv/constraints.txt"
    assert "pip installs instead" in capsys.readouterr().out


# Environments of others


@pytest.fixture
def created(monkeypatch) -> list[list[str]]:
    """Commands that would have made an environment."""
    calls = []
    monkeypatch.setattr(environment, "run_logged", lambda arguments, what: calls.append(arguments))
    return calls


def python_of(version: str) -> str:
    return f"echo '{json.dumps({'python': version})}'"


def test_environment_of_another_stays(project, created):
    """It is used if its Python is right, and never deleted."""
    python = project / ".venv" / "bin" / "python"
    write_executable(python, python_of(environment.THIS_PYTHON))
    environment.make_or_replace_venv()
    write_executable(python, python_of("3.9"))
    with pytest.raises(environment.EnvironmentFailed, match=r"holds Python 3\.9"):
        environment.make_or_replace_venv()
    assert python.is_file() and created == []


@pytest.mark.parametrize("state", ["missing", "empty", "own"])
def test_what_is_replaced(project, created, state):
    venv = project / ".venv"
    if state != "missing":
        venv.mkdir()
    if state == "own":
        write_executable(venv / "bin" / "python", python_of("3.9"))
        environment.write_record(finished=True, created_here=True)
    environment.make_or_replace_venv()
    assert [arguments[1:3] for arguments in created] == [["-m", "venv"]]
    assert list(venv.iterdir()) == [environment.RECORD]


def test_a_link_to_another_checkouts_environment_is_left_alone(project, created, tmp_path):
    """Replacing it would empty the folder that the other one works with."""
    other = tmp_path / "other"
    python = other / ".venv" / "bin" / "python"
    write_executable(python, python_of(environment.THIS_PYTHON))
    (project / ".venv").symlink_to(other / ".venv")
    record = {"finished": True, "created_here": True, "root": str(other)}
    (other / ".venv" / environment.RECORD.name).write_text(json.dumps(record))
    with pytest.raises(environment.EnvironmentFailed, match="of another checkout"):
        environment.make_or_replace_venv()
    assert python.is_file() and created == []
    # The checkout itself was moved, and its environment with it: that one is replaced.
    (project / ".venv").unlink()
    (other / ".venv").rename(project / ".venv")
    environment.make_or_replace_venv()
    assert len(created) == 1


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
        ("one line\nERROR: Cannot install a and b\n", "pip: Cannot install a and b"),
        ("one line\nthe last line\n", "the last line"),
    ],
)
def test_failed_command_names_reason_and_log(project, log, reason):
    (project / ".venv").mkdir()
    code = f"import sys; print({log!r}); sys.exit(1)"
    with pytest.raises(environment.EnvironmentFailed) as error:
        environment.run_logged([sys.executable, "-c", code], "stage")
    assert str(error.value).startswith("stage: ") and reason in str(error.value)
    assert str(error.value).endswith(f"(log: {environment.LOG})")
    assert log.splitlines()[-1] in environment.LOG.read_text()


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


def test_first_supported_python_is_chosen_and_one_with_a_torch_preferred(project):
    fake_python(project, "python3", "3.13")
    write_executable(project / "bin" / "python3.12", "echo 'command not found' >&2; exit 127")
    fake_python(project, "python3.11", "3.11")
    assert set_up(project).stdout == "chosen: python3.11\n"
    fake_python(project, "python", "3.12", torch="2.12.0")
    assert set_up(project).stdout == "chosen: python\n"


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
