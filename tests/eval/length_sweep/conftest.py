"""Models and texts for the tests of the length sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_tokenizer
from eval.length_sweep import sweep as length_sweep
from tests.eval.length_sweep.calls import DOCUMENTS, TEXT
from tests.finished_runs import tiny_model


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_corpus) -> dict[str, Path]:
    """CAT, Pythia and CAT without positions, exported."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")
    changes = {"cat": {}, "pythia": {"conv_type": "none"}, "nope": {"position_embedding": "none"}}
    return {
        name: export_model(
            tiny_model(257, seed=seed, rotary_pct=0.5, **fields), tokenizer, folder / name
        )
        for seed, (name, fields) in enumerate(changes.items())
    }


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Pictures take longer than the rest of a test; the one test about them undoes this."""
    monkeypatch.setattr(length_sweep, "_draw", lambda rows, out: None)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def documents(tmp_path) -> Path:
    path = tmp_path / "documents.txt"
    path.write_text("\n===\n".join(DOCUMENTS), encoding="utf-8")
    return path
