"""The studies landmark and needles: what they train, and from training to report."""

from __future__ import annotations

import json
import math

import pytest

from cat_lm.config import load_config
from cat_lm.core.errors import UserError
from cat_lm.core.files import write_json
from eval.lab.study import StudyOptions
from eval.landmark import __main__ as program
from eval.landmark.options import LEARNED, SELECTORS
from eval.studies import landmark as study
from tests.commands import python


def places(data, scale="cpu", **more):
    return study.plan_places(StudyOptions(scale, more={"data": (str(data),)}, **more))


@pytest.fixture
def long_validation(monkeypatch):
    """The tiny corpus passes for one that holds out enough."""
    manifest = {"splits": {"validation": {"tokens": 10**6}}}
    monkeypatch.setattr(study, "read_manifest", lambda folder: manifest)


@pytest.mark.parametrize("scale", study.SCALES)
def test_models_train_as_the_quickstart_with_landmarks(scale, tiny_corpus, long_validation):
    found = dict.fromkeys(place.run.cell for place in places(tiny_corpus, scale))
    assert {cell.model for cell in found} == set(study.MODELS)
    for cell in found:
        position, way = cell.model.split("-")
        config = cell.config
        assert config.model.attention == "landmark"
        assert config.model.position_embedding == position
        assert config.model.attention_options["block"] == cell.block
        assert config.train.landmark_loss == way and config.data.path == str(tiny_corpus)
        assert config.optimizer.lr == load_config(study.CONFIG).optimizer.lr == study.RATE
        assert cell.lengths == (4 * config.data.context_length,)
        assert (set(LEARNED) <= set(cell.select)) == (scale == "cpu")


def test_text_is_checked_before_anything_is_trained(tiny_corpus, monkeypatch):
    manifest = {"splits": {"validation": {"tokens": 1024}}}
    monkeypatch.setattr(study, "read_manifest", lambda folder: manifest)
    with pytest.raises(UserError, match=r"validation split has 1,024 tokens, .* read at 1,024;"):
        places(tiny_corpus)
    with pytest.raises(UserError, match="--models x: choose among none-dense, none-guided, rope"):
        places(tiny_corpus, models=("x",))


def test_a_cell_is_trained_swept_and_diagnosed(tiny_corpus, long_validation, tmp_path, monkeypatch):
    (place, *_) = places(tiny_corpus, models=("rope-guided",))
    cell, called = place.run.cell, []
    rows = [{"select": "dense", "top_k": None, "loss": 2.0, "over_dense_error": None}]
    for number, name in enumerate(SELECTORS):
        row = {"select": name, "loss": 2.0 + number, "over_dense": 1.0, "over_dense_error": 0.5}
        rows += [row | {"top_k": k, "share": 0.1} for k in cell.top_k]

    def call(words, log, device):
        called.append(words)
        options = program._parser().parse_args(words[2:])
        options.out.mkdir(parents=True, exist_ok=True)
        name = "landmark_sweep" if options.command == "sweep" else "diagnosis"
        write_json(options.out / f"{name}.json", {"rows": rows, "means": []})

    trained = {"diverged": False, "loss": 3.0, "precision": "fp32"}
    trained |= {"parameters": 1000, "tokens_per_second": 1.0}
    monkeypatch.setattr(study.Cell, "_train_run", lambda self, folder, device: dict(trained))
    monkeypatch.setattr(study, "check_command", call)
    record = cell.run_in(tmp_path, "cpu")
    assert [words[2] for words in called] == ["sweep", "diagnose"]
    assert ("--calibrate" in called[0]) and record["rows"][0]["text"] == tiny_corpus.name
    found = study.measured_values(place.run, record)
    assert found[2] == {"value": 0.0, "loss": 2.0, "share": 0.1, "error": 0.25}  # of the oracle
    assert sorted(found) == list(cell.top_k)
    trained["diverged"] = True
    lost = cell.run_in(tmp_path, "cpu")
    assert len(called) == 2 and math.isnan(study.measured_values(place.run, lost)[2]["value"])


@pytest.mark.long
def test_small_needles_from_start_to_page(tmp_path):
    done = python("-m", "eval.study", "needles", "--scale", "smoke", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "needles.json").read_text())
    assert {line["x"] for line in record["lines"]} == {32, 64}
    assert len(record["contrasts"]) == 2 * 5 and (tmp_path / "needles.png").exists()


@pytest.mark.long
def test_small_landmark_from_training_to_page(tiny_corpus, tmp_path):
    words = ("landmark", "--scale", "smoke", "--models", "none-guided", "--seeds", "1")
    done = python("-m", "eval.study", *words, "--data", tiny_corpus, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "landmark.json").read_text())
    assert record["extra"]["retrieval"]["no positions, guided"]
    assert (tmp_path / "landmark-retrieval.png").exists() and not record["diverged"]
