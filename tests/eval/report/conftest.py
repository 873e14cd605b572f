"""Finished runs that the report's tests share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.finished_runs import finished_run, tiny_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_corpus) -> dict[str, Path]:
    """A finished run for every kind of convolution."""
    folder = tmp_path_factory.mktemp("runs")
    kinds = {"none": "pythia", "head": "cat", "multihead": "mh", "depthwise": "canon"}
    return {
        name: finished_run(
            folder / name, tiny_corpus, tiny_model(257, seed=3, conv_type=kind), conv_type=kind
        )
        for kind, name in kinds.items()
    }


@pytest.fixture
def run(runs, tmp_path) -> Path:
    """A run of its own for a test that changes it."""
    return shutil.copytree(runs["cat"], tmp_path / "cat")
