"""Modules import each other in no circle, and rooms one way.

Imports inside functions count; those for type checkers only do not.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

from tests.unit.test_packaging import REPOSITORY, source_files

# Rooms and modules of a folder, the upper ones first: none imports one of a row above its own, nor
# another one of its row. A room inside another one stands in its own row.
LAYERS = {
    "": (("train",), ("launch",), ("eval",), ("data_prep",), ("cat_lm",)),
    "cat_lm": (
        ("sparsify",),
        ("upcycle",),
        ("export", "generate"),
        ("training",),
        ("data",),
        ("pretrained",),
        ("config",),
        ("architectures",),
        ("model.hf",),
        ("mixers",),
        ("model",),
        ("ops",),
        ("core",),
    ),
    "data_prep": (
        ("prepare", "inspect", "adopt"),
        ("megatron", "check"),
        ("assemble",),
        ("encode",),
        ("sources",),
        ("common",),
    ),
    "eval": (
        ("quickstart", "language"),
        ("report", "samples", "speed"),
        ("length_sweep", "recall"),
        ("zero_shot",),
        ("common",),
    ),
    "launch": (("slurm", "doctor"), ("environment",)),
}


def module_name(path: Path) -> str:
    return path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            child = ast.Module(child.orelse, [])
        yield child
        yield from run_time_nodes(child)


def imports(source: str, modules: set[str]) -> set[str]:
    """The modules among these that a text imports, wherever in it."""
    found = set()
    for node in run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                known = {inner, f"{inner}.__init__"} & modules
                found.add(inner if known else node.module)
    packages = {f"{name}.__init__" for name in found}
    return (found | packages) & modules


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    texts = {module_name(path): path.read_text(encoding="utf-8") for path in source_files()}
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


def test_a_circle_within_functions_would_be_found():
    modules = {"a", "b", "c"}
    texts = {
        "a": "import b",
        "b": "def f():\n    from c import thing",
        "c": "if TYPE_CHECKING:\n    import a\nelse:\n    import b",
    }
    graph = {name: imports(text, modules) for name, text in texts.items()}
    assert graph == {"a": {"b"}, "b": {"c"}, "c": {"b"}}
    assert sorted(set(circle(graph))) == ["b", "c"]
    assert circle({**graph, "c": set()}) == []


def test_a_package_is_told_from_a_name_in_it():
    modules = {"room.__init__", "room.door", "room.inner.__init__"}
    assert imports("from room import door", modules) == {"room.door"}
    assert imports("from room import anything", modules) == {"room.__init__"}
    assert imports("from room import inner", modules) == {"room.inner.__init__"}
    assert imports("import room.door", modules) == {"room.door"}


@pytest.mark.parametrize("folder", LAYERS)
def test_rooms_import_one_way(graph, folder):
    rank = {room: row for row, rooms in enumerate(LAYERS[folder]) for room in rooms}
    prefix = f"{folder}." if folder else ""

    def room_of(module: str) -> str | None:
        parts = module.removeprefix(prefix).split(".") if module.startswith(prefix) else [""]
        inner = ".".join(parts[:2])
        return inner if inner in rank else parts[0] or None

    assert rank.keys() <= {room_of(module) for module in graph}, "a room of the table is gone"
    for module, imported in graph.items():
        for other in imported:
            above, below = room_of(module), room_of(other)
            if above != below and above in rank and below in rank:
                assert rank[above] < rank[below], f"{module} imports {other}"
