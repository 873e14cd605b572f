"""What evaluation commands share: the store of cells, tables, pages from templates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from cat_lm.core.errors import UserError
from cat_lm.core.files import write_sealed
from cat_lm.core.readers import Versioned
from cat_lm.pretrained.loading import model_label
from eval.common.html import render
from eval.common.text_table import align_columns, markdown_table
from eval.lab.store import CellStore, DamagedCell, key_hash


class Shape(Versioned):
    loss: float | None
    tokens: int


VALUES = {"loss": 1.5, "tokens": 3, "more": ["kept"]}
DAMAGE = {
    "cut": (lambda text: text[:20], "is not JSON"),
    "empty": (lambda text: "", "is not JSON"),
    "a list": (lambda text: "[]", "holds [], must be an object"),
    "another number": (lambda text: text.replace("1.5", "1.6"), "was changed after it was written"),
    "no seal": (lambda text: '{"format": 1, "loss": 1.5}', "was changed after it was written"),
}


@pytest.fixture
def store(tmp_path) -> CellStore:
    return CellStore(tmp_path / "cells", Shape)


class TestCellStore:
    def test_what_is_written_is_read(self, store):
        assert store.read("a") is None
        store.write("a", VALUES)
        assert store.read("a") == VALUES
        assert store.read("b") is None
        assert [path.name for path in store.folder.iterdir()] == ["a.json"]

    @pytest.mark.parametrize(
        ("written", "said"),
        [
            (VALUES, "has no format, must be 1: another version of cat_lm wrote it"),
            (VALUES | {"format": 2}, "format is 2, must be 1: another version of cat_lm wrote it"),
            ({"format": 1, "loss": 1.5}, "has no tokens"),
            ({"format": 1, "loss": 1.5, "tokens": "3"}, 'tokens is "3": should be a valid integer'),
        ],
    )
    def test_whole_cells_of_another_shape_are_refused_and_kept(self, store, written, said):
        write_sealed(store.path("a"), written)
        kept = store.path("a").read_bytes()
        with pytest.raises(UserError) as error:
            store.read_intact("a")
        line = f"{store.path('a')}: {said}; delete it, and the same command makes it again"
        assert str(error.value) == line and store.path("a").read_bytes() == kept

    @pytest.mark.parametrize("kind", DAMAGE)
    def test_damage_is_named_and_may_be_computed_again(self, store, kind, capsys):
        store.write("a", VALUES)
        damage, why = DAMAGE[kind]
        store.path("a").write_text(damage(store.path("a").read_text()))
        with pytest.raises(DamagedCell) as error:
            store.read("a")
        assert str(error.value).startswith(f"{store.path('a')}: damaged: {why}")
        assert str(error.value).endswith("; delete it, and the same command makes it again")
        assert store.read_intact("a") is None
        assert capsys.readouterr().err == f"{store.path('a')}: damaged, is computed again\n"

    def test_a_cell_of_something_else_is_damaged(self, store):
        store.write("a", VALUES)
        assert store.read("a", lambda values: values["tokens"] == 3) == VALUES
        with pytest.raises(DamagedCell, match="is of something else"):
            store.read("a", lambda values: values["tokens"] == 4)

    def test_names_depend_on_all_of_a_key_in_any_order(self):
        assert key_hash({"a": 1, "b": Path("x")}) == key_hash({"b": Path("x"), "a": 1})
        assert key_hash({"a": 1}) != key_hash({"a": 2})
        assert key_hash({"a": 1}, digits=8) == key_hash({"a": 1})[:8]

    def test_cells_have_the_names_that_are_asked_for(self):
        from eval.lab.cell import cell_path
        from eval.recall.cell import Cell
        from eval.recall.language import LanguageCell

        cell = Cell("mqar:vocab_size=64", "cat:streams=k", 16, 16, seed=2)
        name = r"out/cells/mqar_vocab_size=64-cat_streams=k-d16-L16-lr0\.01-seed2-[0-9a-f]{8}\.json"
        assert re.fullmatch(name, str(cell_path(Path("out"), cell)))
        model = LanguageCell("data", "f" * 64, "lincat", 64, 64, 2, 100, 0.01)
        name = r"out/cells/language-lincat-d64-L64-lr0\.01-seed0-[0-9a-f]{8}\.json"
        assert re.fullmatch(name, str(cell_path(Path("out"), model)))
        assert key_hash({"task": "piqa", "limit": None, "rows_sha256": "ab"}) == "fb88bbc774b1f4ba"


class TestTables:
    def test_columns_are_as_wide_as_their_widest_cell(self):
        rows = [("a", "1.5", "x"), ("long", "10", "yy")]
        assert align_columns(("", "n", "w"), rows) == "        n   w\na     1.5   x\nlong   10  yy"
        assert align_columns(("", "n", "w"), rows, left=(0, 2)).splitlines()[1] == "a     1.5  x"

    def test_markdown_keeps_its_columns(self):
        text = markdown_table(["a", "b"], [["x|y", "1"]], right=[1])
        assert text == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_a_model_in_a_run_is_called_as_the_run(tmp_path):
    assert model_label(tmp_path / "mine" / "model") == "mine"
    assert model_label(tmp_path / "exported") == "exported"


class TestPages:
    def test_values_are_text_and_a_forgotten_one_is_an_error(self, tmp_path):
        page = tmp_path / "x.html"
        page.write_text('{% extends "page.html" %}{% block content %}{{ words }}{% endblock %}')
        text = render(page, title="a < b", words="<script>")
        assert "<h1>a &lt; b</h1>" in text and "&lt;script&gt;" in text
        assert "<script>" not in text and "color-scheme: light;" in text
        with pytest.raises(UndefinedError):
            render(page, title="x")
