"""The package's metadata, its pins, and what every command and script promises at its door."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).parents[2]
SOURCE_FOLDERS = ("cat_lm", "data_prep", "eval", "launch")
# Files that name the settings of pip, and no index.
SETTINGS_OF_PIP = ("launch/environment.py", "tests/launch/test_environment.py")
SCRIPTS = ("launch/quickstart.sh", "launch/environment.sh", "tests/run.sh", "tests/gpu/run.sh")
SCRIPTS += (".ci/run",)
# A module of an optional package with another name, for machines where it is not installed.
DISTRIBUTIONS = {"fla": "fla-core"}
PROMISED = {
    *("train", "data_prep.prepare", "data_prep.inspect", "cat_lm.export", "cat_lm.generate"),
    *("eval.length_sweep", "eval.quickstart", "eval.report", "eval.speed", "eval.zero_shot"),
    *("launch.doctor", "launch.slurm", "data_prep.adopt", "eval.recall"),
    "eval.long_range",
}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    return parser


def requirements(section: str, key: str) -> list[Requirement]:
    lines = setup_cfg()[section][key].splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pinned_for() -> list[Requirement]:
    """What the pins cover: the package with the extras `eval` and `test`."""
    extras = [requirements("options.extras_require", extra) for extra in ("eval", "test")]
    return requirements("options", "install_requires") + extras[0] + extras[1]


def pins() -> dict[str, Version]:
    result = {}
    for line in (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()
            result[canonicalize_name(name)] = Version(version)
    return result


def needed_by(name: str, extra: str) -> list[Requirement]:
    """What a distribution or its extra needs on Python 3.11 or 3.12; not torch's CUDA libraries."""
    environments = [
        {"python_version": v, "python_full_version": f"{v}.1", "extra": extra}
        for v in ("3.11", "3.12")
    ]
    result = []
    for text in importlib.metadata.distribution(name).requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        of_cuda = name == "torch" and requirement.name.startswith(("nvidia", "cuda", "triton"))
        if not of_cuda and (marker is None or any(marker.evaluate(e) for e in environments)):
            result.append(requirement)
    return result


def test_ranges_hold_the_tested_versions():
    pinned = pins()
    for requirement in pinned_for():
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_pins_are_the_whole_closure_and_agree_with_each_other():
    pinned, closure = pins(), set()
    todo = pinned_for()
    while todo:
        wanted = todo.pop()
        for extra in ("", *wanted.extras):
            name = canonicalize_name(wanted.name)
            if (name, extra) in closure:
                continue
            closure.add((name, extra))
            for requirement in needed_by(name, extra):
                child = canonicalize_name(requirement.name)
                assert child in pinned, f"{name} needs {requirement}, which requirements.txt lacks"
                assert pinned[child] in requirement.specifier, f"{name} needs {requirement}"
                todo.append(requirement)
    assert {name for name, _ in closure} == set(pinned) - {"uv"}  # which installs the others


def test_pyproject_names_only_the_build_system():
    import tomllib

    content = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(content) == {"build-system"}


def test_metadata():
    metadata, options = setup_cfg()["metadata"], setup_cfg()["options"]
    assert (metadata["name"], metadata["license"]) == ("cat_lm", "Apache-2.0")
    assert options["python_requires"] == ">=3.11"
    license_text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in license_text and "END OF TERMS AND CONDITIONS" in license_text


def test_version_is_a_literal_that_setuptools_can_read():
    tree = ast.parse((REPOSITORY / "cat_lm" / "core" / "__init__.py").read_text(encoding="utf-8"))
    values = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__"
    ]
    assert len(values) == 1
    Version(values[0])


def test_torch_is_imported_where_the_checkout_of_an_editable_install_has_moved(tmp_path):
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    names = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
    for name in (*names, "launch/cat_lm_entry.py", "cat_lm/__init__.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, checkout / name)
    build = "from setuptools import build_meta; build_meta.build_editable('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    with zipfile.ZipFile(next(checkout.glob("dist/*.whl"))) as wheel:
        wheel.extractall(site)
    (site / "cat_lm.py").write_text("raise ImportError('moved')")  # as if the tests' own had gone
    paths = os.pathsep.join(map(str, [site, *site.glob("*.data/purelib")]))
    for option in ("-Wdefault", "-Werror"):
        done = subprocess.run(
            [sys.executable, option, "-c", "import torch"],
            cwd=site,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert ("know its models (moved)" in done.stderr) == (option == "-Wdefault")


# Who imports whom


def source_files() -> list[Path]:
    files = [REPOSITORY / "train.py"]
    for folder in SOURCE_FOLDERS:
        files += sorted((REPOSITORY / folder).rglob("*.py"))
    return files


def imported_modules(path: Path) -> set[str]:
    """Full names of all modules a file imports, inside functions too; none are relative."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported_modules(path))


def test_every_imported_package_is_declared():
    extras = setup_cfg()["options.extras_require"]
    declared = requirements("options", "install_requires")
    for extra in extras:
        declared += requirements("options.extras_require", extra)
    allowed = {canonicalize_name(requirement.name) for requirement in declared}
    of_module = importlib.metadata.packages_distributions()
    for path in source_files():
        tops = {name.split(".")[0] for name in imported_modules(path)}
        for top in tops - set(sys.stdlib_module_names) - set(SOURCE_FOLDERS):
            named = of_module.get(top, [DISTRIBUTIONS.get(top, top)])
            distributions = {canonicalize_name(name) for name in named}
            assert distributions & allowed, f"{path}: {top} is not in setup.cfg"


def test_data_flows_one_way():
    for path in source_files():
        relative = path.relative_to(REPOSITORY).as_posix()
        if relative.startswith("cat_lm/"):
            for upper in ("eval", "data_prep", "launch", "tests"):
                assert not imports_of(path, upper), f"{relative} imports {upper}"
        if relative.startswith(("cat_lm/model/", "cat_lm/ops/")):
            for upper in ("cat_lm.training", "deepspeed"):
                assert not imports_of(path, upper), f"{relative} imports {upper}"
            reads_environment = "environ" in path.read_text(encoding="utf-8")
            # The system's convention for where caches lie decides nothing about results.
            is_cache = relative == "cat_lm/ops/runtime/compiler.py"
            assert reads_environment == is_cache, relative


def test_only_training_imports_deepspeed():
    """Data preparation, export and evaluation run where DeepSpeed is not installed (R18)."""
    users = {
        path.relative_to(REPOSITORY).parts[:2]
        for path in source_files()
        if imports_of(path, "deepspeed")
    }
    assert users == {("cat_lm", "training")}


@pytest.mark.long
def test_modules_load_without_deepspeed():
    modules = [
        path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
        for path in source_files()
        if path.name != "__init__.py" and not imports_of(path, "deepspeed")
    ]
    code = "import importlib, sys\nsys.modules['deepspeed'] = None\n"
    code += f"for name in {modules!r}: importlib.import_module(name)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


# Commands


def commands() -> list[str]:
    """Every module or package that can be run, found by its last lines."""
    return [
        path.relative_to(REPOSITORY)
        .as_posix()
        .removesuffix(".py")
        .replace("/", ".")
        .removesuffix(".__main__")
        for path in source_files()
        if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
    ]


# Forks for each command and option, as `python -m` runs it, and prints [code, stdout, stderr, heavy
# modules] of each as a line of JSON. What most commands import is there before, and is not heavy.
CALLS = """
import json, os, runpy, sys, tempfile, traceback
import cat_lm.core.cli, cat_lm.config
HEAVY = {"torch", "transformers", "deepspeed", "datasets", "matplotlib"}
assert not HEAVY & set(sys.modules)

def call(name, option, files):
    for descriptor, file in enumerate(files[:2], start=1):
        os.dup2(file.fileno(), descriptor)
    sys.argv[1:] = [option]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    files[2].write(json.dumps(sorted(HEAVY & set(sys.modules))).encode())
    files[2].flush()
    os._exit(code)

for name in sys.argv[1:]:
    for option in ("--help", "--no-such-option"):
        files = [tempfile.TemporaryFile() for _ in range(3)]
        if not (child := os.fork()):
            call(name, option, files)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in files:
            file.seek(0)
        said = [file.read().decode() for file in files]
        print(json.dumps([name, option, code, *said[:2], json.loads(said[2] or "null")]))
"""


@pytest.fixture(scope="module")
def calls() -> dict[tuple[str, str], tuple[int, str, str, list[str]]]:
    """(exit code, stdout, stderr, heavy modules that it loaded) of each command and option."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *commands()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(name, option): tuple(found) for name, option, *found in rows}


def test_the_promised_commands_exist():
    assert set(commands()) >= PROMISED


@pytest.mark.parametrize("name", commands())
def test_help_is_light(name, calls):
    code, out, err, heavy = calls[name, "--help"]
    assert (code, heavy) == (0, []), err
    assert out.startswith("usage: ")


@pytest.mark.parametrize("name", commands())
def test_unknown_option_is_bad_input(name, calls):
    code, out, err, heavy = calls[name, "--no-such-option"]
    assert (code, out, heavy) == (2, "", [])
    assert "Traceback" not in err and "error: " in err


def foreign_folder(folder: Path) -> Path:
    """Fill a folder as a hostile model's could be; returns the file that its code makes."""
    ran, info = folder / "RAN", folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cat_lm.plugins]\nplugin = plugin\n")
    for name in ("plugin", "argparse", "pydantic", "yaml", "pickle", "multiprocessing", "torch"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\n")
    return ran


PREPARE = "--source files --path text --tokenizer bytes --out out --workers 2"


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("-m cat_lm.export --help", "{}"),
        ("-mcat_lm.export --help", ":{}"),
        ("-m eval.recall run --help", ".:{}"),  # which loads plugins
        ("-um launch.doctor --help", "{}:"),
        ("{}/train.py --keys", ":{}"),
        ("-P {}/train.py --keys", "{}:."),
        (f"-m data_prep.prepare {PREPARE}", "{}"),
    ],
)
def test_commands_import_nothing_from_the_working_directory(words, path, tmp_path):
    ran = foreign_folder(tmp_path)
    (tmp_path / "text").mkdir()
    for name in range(40):
        (tmp_path / f"text/{name}.txt").write_text(f"text {name}\n" * 50)
    environment = os.environ | {"PYTHONPATH": path.format(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *words.format(REPOSITORY).split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
    )
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stderr.decode()


def test_programs_that_import_cat_lm_keep_their_path(tmp_path):
    (tmp_path / "neighbour.py").touch()
    (tmp_path / "program").mkdir()
    (tmp_path / "program/__init__.py").write_text("import cat_lm, neighbour")
    (tmp_path / "program/__main__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-m", "program", "cat_lm.export"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)


SAYS = """
import os, sys
from cat_lm.core.errors import command
@command
def main():
    print("\\u2192" * 99999)
    print("\\u2192", file=sys.stderr)
    with open(os.devnull) as file:
        raise SystemExit(file.fileno() < 3)  # a library may print where a closed stream was
main()
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    ("streams", "code"),
    [
        *((">&2", 0), (">&-", 0), ("2>&-", 0), (">&- 2>&- <&-", 0)),
        *(("| true", 1), (">/dev/full", 2), ("2>/dev/full", 2)),
    ],
)
def test_streams_take_every_character_and_may_be_closed(streams, code, encoding):
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {streams}', sys.executable, SAYS],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr[-2000:]
    assert b"Exception ignored" not in done.stderr


# Scripts


def bash(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", *arguments], capture_output=True, text=True, **options)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    result = bash("-n", REPOSITORY / script)
    assert result.returncode == 0, result.stderr
    if shutil.which("shellcheck"):
        found = subprocess.run(
            ["shellcheck", "-x", script], cwd=REPOSITORY, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout


def test_quickstart_help(tmp_path):
    result = bash(REPOSITORY / "launch" / "quickstart.sh", "--help", cwd=tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.startswith("usage: bash launch/quickstart.sh")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-such-option"], "--no-such-option"),
        (["train.max_steps=5"], "train.max_steps=5"),
        (["--out"], "--out"),
        (["--data", ""], "--data"),
        (["--out", "s3:/bucket/run"], "s3:/bucket/run"),
        (["--out", "me@host:run"], "me@host:run"),
        (["--data", "  "], "--data"),
        (["--", "max_steps"], "max_steps"),
        (["--", "data.path=elsewhere"], "--data"),
        (["--", "train.output_dir=elsewhere"], "train.output_dir"),
    ],
)
def test_quickstart_bad_argument(arguments, named):
    result = bash(REPOSITORY / "launch" / "quickstart.sh", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert named in result.stderr


def test_no_path_of_one_machine():
    """The project stands alone: no absolute paths, no package index of one machine."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True)
    assert listed.returncode == 0, "the tests run in a git checkout"
    # The brackets keep this file from finding itself.
    patterns = {
        r"/[w]ork/|/[f]arm/|/[r]oot/|/[U]sers/|/[o]pt/(wheels|pypi)": (),
        r"[i]ndex-url|[p]ypi\.org|[p]ythonhosted|download\.[p]ytorch": SETTINGS_OF_PIP,
        r"\.\./[s]hared": ("tests/",),
    }
    for name in listed.stdout.decode().split("\0")[:-1]:
        path = REPOSITORY / name
        if not path.is_file() or b"\0" in (content := path.read_bytes()):
            continue
        for pattern, allowed in patterns.items():
            if not name.startswith(tuple(allowed)):
                found = re.search(pattern, content.decode("utf-8"))
                assert found is None, f"{name}: {found.group()}"
