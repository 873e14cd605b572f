"""Who imports whom: no circle of modules, folders one way, only declared packages.

Imports inside functions count; those for type checkers only do not.
"""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY

SOURCE_FOLDERS = ("cat_lm", "data_prep", "eval", "launch")
# A module of an optional package with another name, for machines where it is not installed.
DISTRIBUTIONS = {"fla": "fla-core"}
# Folders and modules of a folder, the upper ones first: none imports one of a row above its own,
# nor another one of its row. A folder inside another one stands in its own row.
LAYERS = {
    "": (("train",), ("launch",), ("eval",), ("data_prep",), ("cat_lm",)),
    "cat_lm": (
        *(("sparsify",), ("upcycle",), ("export", "generate"), ("training",), ("data",)),
        *(("pretrained",), ("config",), ("architectures", "callbacks", "optimizers")),
        ("model.hf",),
        *(("mixers",), ("model",), ("ops",), ("core",)),
    ),
    "data_prep": (
        *(("prepare", "inspect", "adopt"), ("megatron", "check"), ("assemble",), ("encode",)),
        *(("sources",), ("common",)),
    ),
    "eval": (
        *(("quickstart", "language"), ("report", "samples", "speed"), ("length_sweep", "recall")),
        *(("zero_shot",), ("common",)),
    ),
    "launch": (("slurm", "doctor"), ("environment",)),
}


def requirements(extra: str | None = None) -> list[Requirement]:
    """What setup.cfg asks for: of the package, or of one of its extras."""
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    section = parser["options.extras_require" if extra else "options"]
    lines = section[extra or "install_requires"].splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def source_files() -> list[Path]:
    folders = (REPOSITORY / folder for folder in SOURCE_FOLDERS)
    return [REPOSITORY / "train.py", *sorted(p for folder in folders for p in folder.rglob("*.py"))]


def module_name(path: Path) -> str:
    return path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            child = ast.Module(child.orelse, [])
        yield child
        yield from run_time_nodes(child)


def imported_names(source: str) -> set[str]:
    """Full names of all modules, and names in them, that a text imports, wherever in it."""
    names = set()
    for node in run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports(source: str, modules: set[str]) -> set[str]:
    """The modules among these that a text imports; of a name in a module, the module."""
    found = set()
    for name in imported_names(source):
        above = name.rpartition(".")[0]
        candidates = (name, f"{name}.__init__", above, f"{above}.__init__")
        found |= {next((module for module in candidates if module in modules), name)}
    return found & modules


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {module_name(path): path.read_text(encoding="utf-8") for path in source_files()}


@pytest.fixture(scope="module")
def graph(texts) -> dict[str, set[str]]:
    return {name: imports(text, set(texts)) - {name} for name, text in texts.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in turn, or none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_circle_of_imports(graph):
    assert len(graph) > 150
    assert circle(graph) == []


@pytest.mark.parametrize("package", ["cat_lm", "data_prep"])
def test_no_circle_of_folders(graph, package):
    """What an `__init__` hands on from its own subfolders is no dependency of the folder."""
    folders: dict[str, set[str]] = {}
    for module, imported in graph.items():
        folder, _, file = module.rpartition(".")
        # Importing a module imports the packages above it anyway.
        above = {f"{parent}.__init__" for parent in accumulate(module.split("."), "{}.{}".format)}
        others = {other.rpartition(".")[0] for other in imported - above} - {folder}
        if file == "__init__":
            others = {other for other in others if not other.startswith(f"{folder}.")}
        folders.setdefault(folder, set()).update(others)
    inside = {folder: others for folder, others in folders.items() if folder.startswith(package)}
    assert circle(inside) == []


def test_circle_within_functions_would_be_found():
    modules = {"a", "b", "c.__init__", "c.d"}
    texts = {
        "a": "import b",
        "b": "def f():\n    from c import thing",
        "c.__init__": "if TYPE_CHECKING:\n    import a\nelse:\n    import b",
        "c.d": "from c import d",
    }
    graph = {name: imports(text, modules) for name, text in texts.items()}
    assert graph == {"a": {"b"}, "b": {"c.__init__"}, "c.__init__": {"b"}, "c.d": {"c.d"}}
    assert sorted(set(circle(graph | {"c.d": set()}))) == ["b", "c.__init__"]
    assert circle({"a": {"b"}, "b": set()}) == []


@pytest.mark.parametrize("folder", LAYERS)
def test_folders_import_one_way(graph, folder):
    rank = {room: row for row, rooms in enumerate(LAYERS[folder]) for room in rooms}
    prefix = f"{folder}." if folder else ""

    def room_of(module: str) -> str | None:
        parts = module.removeprefix(prefix).split(".") if module.startswith(prefix) else [""]
        inner = ".".join(parts[:2])
        return inner if inner in rank else parts[0] or None

    assert rank.keys() <= {room_of(module) for module in graph}, "a folder of the table is gone"
    for module, imported in graph.items():
        for other in imported:
            above, below = room_of(module), room_of(other)
            if above != below and above in rank and below in rank:
                assert rank[above] < rank[below], f"{module} imports {other}"


def test_every_imported_package_is_declared(texts):
    extras = ("eval", "gpu", "flash", "remote", "test", "wandb")
    declared = [r for extra in (None, *extras) for r in requirements(extra)]
    allowed = {canonicalize_name(requirement.name) for requirement in declared}
    of_module = importlib.metadata.packages_distributions()
    for module, text in texts.items():
        tops = {name.split(".")[0] for name in imported_names(text)}
        for top in tops - set(sys.stdlib_module_names) - set(SOURCE_FOLDERS):
            named = of_module.get(top, [DISTRIBUTIONS.get(top, top)])
            distributions = {canonicalize_name(name) for name in named}
            assert distributions & allowed, f"{module}: {top} is not in setup.cfg"


def users_of(package: str, texts: dict[str, str]) -> set[str]:
    return {
        module
        for module, text in texts.items()
        if any(f"{name}.".startswith(f"{package}.") for name in imported_names(text))
    }


def test_models_know_neither_training_nor_the_environment(texts):
    """Data preparation, export and evaluation run where DeepSpeed is not installed."""
    assert {m.split(".")[1] for m in users_of("deepspeed", texts)} == {"training"}
    lower = ("cat_lm.model.", "cat_lm.ops.")
    assert not [m for m in users_of("cat_lm.training", texts) if m.startswith(lower)]
    readers = [m for m, text in texts.items() if m.startswith(lower) and "environ" in text]
    # The system's convention for where caches lie decides nothing about results.
    assert readers == ["cat_lm.ops.runtime.compiler"]


@pytest.mark.long
def test_modules_load_without_deepspeed(texts):
    own = users_of("deepspeed", texts)
    modules = [m for m in texts if not m.endswith("__init__") and m not in own]
    code = "import importlib, sys\nsys.modules['deepspeed'] = None\n"
    code += f"for name in {modules!r}: importlib.import_module(name)"
    words = [sys.executable, "-c", code]
    result = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
