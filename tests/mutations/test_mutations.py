"""The list of faults applies to the source as it is, and the tool tells what tests find."""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests.mutations.__main__ import examine
from tests.mutations.faults import Fault, probed, read_faults
from tests.mutations.reached import in_order
from tests.mutations.scratch import ROOT, Clone

FAULTS = read_faults()


def test_faults_have_distinct_names_and_meanings():
    assert len(FAULTS) >= 60
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.meaning.endswith(".") for fault in FAULTS)


def test_faults_apply_once_and_compile():
    for fault in FAULTS:
        assert not fault.problem(ROOT), fault.name
        assert "\n" not in fault.old and fault.old != fault.new, fault.name
        if fault.file.endswith(".py"):
            ast.parse(fault.broken((ROOT / fault.file).read_text(encoding="utf-8")))


def test_faults_cover_every_package():
    packages = {
        path.parent.relative_to(ROOT)
        for room in ("cat_lm", "data_prep", "eval", "launch")
        for path in ROOT.glob(f"{room}/*/__init__.py")
    }
    files = [Path(fault.file) for fault in FAULTS]
    assert not [p for p in packages if not any(file.is_relative_to(p) for file in files)]
    assert Path("train.py") in files


def test_every_fault_has_a_probe_or_names_tests():
    by_file = defaultdict(list)
    for fault in FAULTS:
        assert all((ROOT / test).exists() for test in fault.tests), fault.name
        if not fault.tests:
            by_file[fault.file].append(fault)
    for file, own in by_file.items():
        source = probed((ROOT / file).read_text(encoding="utf-8"), own)
        ast.parse(source)
        assert source.count("tests.mutations.probe") == len(own)


@pytest.mark.parametrize(
    "source, place",
    [
        ("def f(x):\n    if x:\n        pass\n    elif OLD:\n        pass\n", 1),
        ("def f(x):\n    try:\n        pass\n    except E:\n        OLD\n", 4),
        ("def f(x):\n    match x:\n        case 1:\n            y = (\n                OLD)\n", 3),
        ('def f(x=OLD):\n    """Say."""\n    return x\n', 2),
        ("class A:\n    def f(self):\n        if self: OLD\n", 2),
    ],
)
def test_probe_stands_before_innermost_statement(source, place):
    lines = probed(source, [Fault("a", "a.py", "OLD", "NEW", "")]).splitlines()
    ast.parse("\n".join(lines))
    assert ".probe" in lines[place]


def test_probe_notes_each_test_once_and_never_fails(tmp_path):
    code = "from tests.mutations.probe import hit; hit('a'); hit('a'); hit('b')"
    given = {"PYTEST_CURRENT_TEST": "tests/test_x.py::test_y[1 2] (call)"}
    for folder in (tmp_path, tmp_path / "absent", None):
        variables = {} if folder is None else {"CAT_LM_FAULT_HITS": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | given | variables,
            capture_output=True,
            check=True,
        )
        assert not done.stdout and not done.stderr
    notes = (tmp_path / "hits").read_text().splitlines()
    assert notes == [f"{name}\t{given['PYTEST_CURRENT_TEST']}" for name in "ab"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    """A clone of a project of two functions, with tests of one of them."""
    project = tmp_path_factory.mktemp("project")
    (project / "tests").mkdir()
    files = {
        "source.py": "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
        "tests/test_source.py": "from source import add, sub\n\n\n"
        "def test_a_failure():\n    assert False\n\n\n"
        "def test_add():\n    assert add(1, 2) == 3\n\n\n"
        "def test_sub():\n    assert sub(2, 2) == 0\n",
    }
    files["tests/conftest.py"] = (
        "def pytest_addoption(parser):\n    parser.addoption('--all', action='store_true')\n"
    )
    for name, text in files.items():
        (project / name).write_text(text)
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "all")):
        subprocess.run(["git", *words], cwd=project, check=True)
    return Clone(tmp_path_factory.mktemp("scratch"), project)


def test_examine_tells_found_from_survived(clone):
    tests = [f"tests/test_source.py::test_{name}" for name in ("a_failure", "add", "sub", "gone")]
    parts, unsound = in_order(tests, clone.root), set()
    assert [len(part) for part in parts] == [3]
    found = examine(clone, Fault("a", "source.py", "a + b", "a - b", "."), parts, unsound)
    assert found == {"result": "found", "test": tests[1], "how": "failed"}
    assert unsound == {tests[0]}
    survived = Fault("b", "source.py", "a - b", "b - a", ".")
    assert examine(clone, survived, parts, unsound) == {"result": "survived"}
    assert examine(clone, survived, [], unsound) == {"result": "not covered"}
    absent = Fault("c", "source.py", "a * b", "a - b", ".")
    assert examine(clone, absent, parts, unsound)["result"] == "error"
