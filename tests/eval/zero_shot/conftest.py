"""Models and rows for the tests of the zero-shot command."""

from __future__ import annotations

from pathlib import Path

import pytest

from cat_lm.export import export_model
from cat_lm.pretrained.loading import load_tokenizer
from tests.eval.zero_shot.calls import CONTEXT
from tests.finished_runs import tiny_model
from tests.zero_shot_rows import write_rows


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_corpus) -> dict[str, Path]:
    """CAT with and without rotary positions, exported with the tokenizer `bytes`."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")

    def export(name, **changes):
        model = tiny_model(257, max_position_embeddings=CONTEXT, **changes)
        return export_model(model, tokenizer, folder / name)

    return {"rope": export("rope"), "nope": export("nope", position_embedding="none")}


@pytest.fixture
def model(models) -> Path:
    return models["rope"]
