"""The registry: files by their names, names that are wrong, and entries that lack something."""

from dataclasses import dataclass
from unittest import mock

import pytest

from cat_lm.core import plugins
from cat_lm.core.errors import UserError
from cat_lm.core.registry import Registry
from cat_lm.ops.convolution.backends import BACKENDS, Backend


@dataclass(frozen=True)
class Tool:
    name: str


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package with an entry that is right, one under another name, and one that is broken."""
    (tmp_path / "workshop").mkdir()
    (tmp_path / "workshop/__init__.py").write_text("")
    for file, code in (
        (
            "long_saw",
            "from tests.cat_lm.core.test_registry import Tool\nENTRY = Tool('long-saw')\n",
        ),
        ("hammer", "from tests.cat_lm.core.test_registry import Tool\nENTRY = Tool('nail')\n"),
        ("drill", "raise RuntimeError('imported')\n"),
    ):
        (tmp_path / f"workshop/{file}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return Registry("tool", Tool, package="workshop", separator="-", others=("none",))


def test_files_are_names_and_are_imported_when_asked_for(folder):
    with mock.patch.object(plugins, "load", side_effect=UserError("a plugin is broken")):
        assert folder.own_names() == ("drill", "hammer", "long-saw")
        assert folder.get("long-saw") == Tool("long-saw") and "long-saw" in folder
    assert folder.names() == ("drill", "hammer", "long-saw")
    with pytest.raises(RuntimeError, match="imported"):
        folder.get("drill")
    with pytest.raises(ValueError, match="must be named 'hammer'"):
        folder.get("hammer")


def test_unknown_name_raises_user_error_with_the_nearest(folder):
    said = r"^tool='lonsaw': must be one of none, drill, hammer, long-saw; did you mean long-saw\?$"
    for error in (UserError, ValueError):
        with pytest.raises(error, match=said):
            folder.get("lonsaw")
    assert folder.problem("none") is None
    with pytest.raises(UserError, match=r"^--with=\['a'\]: must be one of"):
        folder.get(["a"], "--with")


@pytest.mark.parametrize("name", ["long-saw", "none", "spoon"])
def test_taken_name_is_refused(folder, name):
    folder.register(Tool("spoon"))
    assert "spoon" in folder.names() and "spoon" not in folder.own_names()
    with pytest.raises(ValueError, match=f"tool '{name}': there is one of this name already"):
        folder.register(Tool(name))


def test_kernel_of_an_unknown_kind_is_not_registered():
    reference = BACKENDS.get("reference")
    half = Backend(
        "half", reference.convolve, lambda *_: None, reference.describe, ("head", "circular")
    )
    with pytest.raises(ValueError, match=r"backend 'half': has kernels for unknown kinds .*circul"):
        BACKENDS.register(half)
    assert "half" not in BACKENDS
