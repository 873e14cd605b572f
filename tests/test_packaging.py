"""The package's pins, and what every command and script promises at its door."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import REPOSITORY
from tests.test_imports import requirements, source_files

# Files that name the settings of pip, and no index.
SETTINGS_OF_PIP = ("launch/environment.py", "tests/launch/test_environment.py")
SCRIPTS = ("launch/quickstart.sh", "launch/environment.sh", "tests/run.sh", "tests/gpu/run.sh")
SCRIPTS += (".ci/run",)


def pinned_for() -> list[Requirement]:
    """What the pins cover: the package with the extras `eval` and `test`."""
    return [*requirements(), *requirements("eval"), *requirements("test")]


def pins() -> dict[str, Version]:
    text = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)$", text, re.M)
    assert len(found) == len([line for line in text.splitlines() if not line.startswith("#")])
    return {canonicalize_name(name): Version(version) for name, version in found}


def needed_by(name: str, extra: str) -> list[Requirement]:
    """What a distribution or its extra needs on Python 3.11 or 3.12; not torch's CUDA libraries."""
    environments = [
        {"python_version": v, "python_full_version": f"{v}.1", "extra": extra}
        for v in ("3.11", "3.12")
    ]
    result = []
    for requirement in map(Requirement, importlib.metadata.distribution(name).requires or []):
        marker = requirement.marker
        of_cuda = name == "torch" and requirement.name.startswith(("nvidia", "cuda", "triton"))
        if not of_cuda and (marker is None or any(marker.evaluate(e) for e in environments)):
            result.append(requirement)
    return result


def test_pins_are_the_whole_closure_and_agree_with_each_other():
    pinned, closure = pins(), set()
    todo = pinned_for()
    for requirement in todo:
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement
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


def test_version_is_a_literal_that_setuptools_can_read():
    text = (REPOSITORY / "cat_lm/core/__init__.py").read_text(encoding="utf-8")
    (value,) = re.findall(r'^__version__ = "(.*)"$', text, re.M)
    Version(value)


# Commands


def commands() -> list[str]:
    """Every module or package that can be run, found by its last lines."""
    runnable = [
        path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
        for path in source_files()
        if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
    ]
    return [name.removesuffix(".__main__") for name in runnable]


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
        found = [name, option, code, *said[:2], json.loads(said[2] or "null")]
        print(json.dumps(found), flush=True)  # The next child would print it, too.
"""


def test_help_is_light_and_unknown_options_are_bad_input():
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *commands()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(commands()) >= 16, "the promised commands exist"
    for name, option, code, out, err, heavy in map(json.loads, done.stdout.splitlines()):
        assert heavy == [], name
        if option == "--help":
            assert code == 0 and out.startswith("usage: "), f"{name}: {err}"
        else:
            assert (code, out) == (2, "") and "error: " in err and "Traceback" not in err, name


# A call of each command that imports something heavy, and how its first line begins. RUN is a run
# folder with a checkpoint and an export, both empty.
FIRST_LINES = {
    "cat_lm.export": ("RUN", "exporting the newest checkpoint of RUN"),
    "cat_lm.generate": ("RUN once", "loading RUN"),
    "cat_lm.sparsify": ("RUN/model RUN/new --block 8 --top-k 2", "loading RUN/model"),
    "cat_lm.upcycle": ("RUN/model RUN/new", "loading RUN/model"),
    "data_prep.adopt": (
        "RUN/a --validation RUN/b --tokenizer bytes --out RUN/new",
        "RUN/new: adopting RUN/a",
    ),
    "data_prep.inspect": ("RUN/data", "RUN/data: reading"),
    "data_prep.prepare": (
        "--source files --path RUN --tokenizer bytes --out RUN/new",
        "RUN/new: preparing files",
    ),
    "eval.landmark": ("diagnose RUN --data d --length 64 --out RUN/new", "loading RUN"),
    "eval.length_sweep": ("RUN --data RUN/data --out RUN/new --lengths 8", "loading RUN"),
    "eval.long_range": ("show listops --cache RUN/cache", "listops: data in RUN/cache"),
    "eval.quickstart": ("RUN --out RUN/new", "loading RUN"),
    "eval.recall": ("tradeoff --out RUN/new", "RUN/new: simulating landmarks"),
    "eval.records": ("render --folder RUN", "RUN: rendering"),
    "eval.report": ("RUN --out RUN/new", "RUN/new: writing the report of RUN"),
    "eval.samples": ("RUN", "loading RUN"),
    "eval.speed": ("conv", "measuring conv on device auto"),
    "eval.study": ("maps --out RUN/new", "RUN/new: study maps at "),
    "eval.zero_shot": ("RUN", "zero-shot tasks table2 of RUN"),
    "launch.doctor": ("", "examining this machine"),
    "train": (
        "configs/quickstart.yaml train.output_dir=RUN/new",
        "RUN/new: starting the run of configs/quickstart.yaml",
    ),
}
# A heavy module that ends the process as it is imported.
PIPES = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
STUB = "import os\nos.write(2, b'heavy\\n')\nos._exit(0)\n"


def test_first_line_comes_before_heavy_imports(tmp_path):
    """Torch alone takes seconds, in which a silent command seems to hang."""
    assert set(commands()) - FIRST_LINES.keys() == {"launch.slurm", "launch.environment"}
    for name in ("torch", "transformers", "datasets", "matplotlib", "pandas", "tokenizers"):
        (tmp_path / f"stubs/{name}").mkdir(parents=True)
        (tmp_path / f"stubs/{name}/__init__.py").write_text(STUB)
    for name in ("checkpoints/step-00000001", "model"):
        (tmp_path / "run" / name).mkdir(parents=True)
    for name in ("config.yaml", "model/config.json", "model/model.safetensors"):
        (tmp_path / "run" / name).write_text("{}")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "stubs")}
    for name, (words, first) in FIRST_LINES.items():
        run = str(tmp_path / "run")
        call = [sys.executable, "-m", name, *words.replace("RUN", run).split()]
        with subprocess.Popen(call, cwd=REPOSITORY, env=environment, text=True, **PIPES) as process:
            line = process.stderr.readline()
            process.kill()
        assert line.startswith(first.replace("RUN", run)), name


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
        ("-m eval.recall run --help", ".:{}"),  # which loads plugins
        ("{}/train.py --keys", ":{}"),
        (f"-m data_prep.prepare {PREPARE}", "{}"),
    ],
)
def test_commands_import_nothing_from_the_working_directory(words, path, tmp_path):
    ran = foreign_folder(tmp_path)
    (tmp_path / "text").mkdir()
    for name in range(40):
        (tmp_path / f"text/{name}.txt").write_text(f"text {name}\n" * 50)
    done = subprocess.run(
        [sys.executable, *words.format(REPOSITORY).split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path.format(REPOSITORY)},
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


@pytest.mark.parametrize(
    ("streams", "encoding", "code"),
    [
        *((">&2", "ascii", 0), (">&-", "latin-1", 0), ("2>&-", "utf-8", 0)),
        *((">&- 2>&- <&-", "ascii", 0), ("| true", "utf-8", 1)),
        *((">/dev/full", "ascii", 2), ("2>/dev/full", "latin-1", 2)),
    ],
)
def test_streams_take_every_character_and_may_be_closed(streams, encoding, code):
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


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_scripts_pass_shellcheck():
    words = ["shellcheck", "-x", *SCRIPTS]
    found = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--no-such-option"], "--no-such-option"),
        (["train.max_steps=5"], "train.max_steps=5"),
        (["--out"], "--out"),
        (["--data", "  "], "--data"),
        (["--out", "s3:/bucket/run"], "s3:/bucket/run"),
        (["--out", "me@host:run"], "me@host:run"),
        (["--", "max_steps"], "max_steps"),
        (["--", "data.path=elsewhere"], "--data"),
        (["--", "train.output_dir=elsewhere"], "train.output_dir"),
    ],
)
def test_quickstart_refuses_wrong_arguments(arguments, named):
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
