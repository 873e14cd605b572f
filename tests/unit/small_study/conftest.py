"""What tests of the small study share; tests/e2e runs the real commands once."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Pictures take longer than the rest of a test; one test looks for them."""
    if request.node.name != "test_results":
        monkeypatch.setattr("eval.report.write.report", lambda *_: None)
        monkeypatch.setattr("eval.small_study.figure.study_figure", lambda _: None)
        monkeypatch.setattr("eval.common.style.save_figure", lambda *_: None)


@pytest.fixture
def arguments(long_corpus, tmp_path) -> list[object]:
    models = "pythia,cat_rope,canon_b"
    chosen = ["--models", models, "--documents", 4]
    return ["--data", long_corpus, "--out", tmp_path / "out", *chosen]
