"""The guides in docs/: their examples run, and their pictures are the script's."""

from __future__ import annotations

import runpy
import shlex
from xml.etree import ElementTree

import pytest

from tests.commands import python
from tests.conftest import REPOSITORY
from tests.finished_runs import checkpoint, tiny_model
from tests.readme import blocks

DOCS = REPOSITORY / "docs"


def test_pictures_are_what_the_script_draws(tmp_path):
    drawn = runpy.run_path(str(DOCS / "drawings.py"))
    for draw in ("cat_block", "pipeline"):
        drawn[draw].__globals__["FOLDER"] = tmp_path
        drawn[draw]()
    committed = {path.name: path.read_bytes() for path in (DOCS / "images").glob("*.svg")}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == committed
    for text in committed.values():
        title = ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title")
        assert title is not None and title.text


@pytest.mark.long
def test_examples_for_hugging_face_run(tmp_path, tiny_corpus):
    guide = DOCS / "hugging_face.md"
    checkpoint(tmp_path / "runs/mine", tiny_model(257), tiny_corpus / "tokenizer", step=12)
    export = next(line for line in blocks("bash", guide) if "cat_lm.export" in line)
    done = python(*shlex.split(export)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mine/model/modeling_cat_neox.py").is_file()
    done = python("-c", "\n".join(blocks("python", guide)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trainable params" in done.stdout
