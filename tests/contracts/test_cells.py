"""What every kind of cell must do: be frozen, have its own file, and give one result."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

from cat_lm.core.errors import UserError
from cat_lm.data.manifest import read_manifest
from eval.lab import cell as cells
from eval.lab.cell import cell_path
from eval.lab.training import Trial
from eval.language.cell import Cell as LanguageModelCell
from eval.long_range.cell import Cell as LongRangeCell
from eval.recall.cell import Cell as RecallCell
from eval.recall.language import LanguageCell
from eval.studies.landmark import Cell as LandmarkCell
from eval.studies.mamba import PlateauCell

FEW = {"lr": 1e-2, "epochs": 2, "batch_size": 8}
TASK = ("mqar:vocab_size=16,keys=2", "cat:heads=2", 16, 16)
ROWS = {"train_examples": 32, "test_examples": 8, "validation_examples": 8}
LISTOPS = "listops:min_length=3,max_length=14,train=32,validation=4,test=4"
TRAINED = {
    "recall": RecallCell(*TASK, **FEW, **ROWS),
    "mamba": PlateauCell(*TASK, **FEW, **ROWS, eval_steps=3),
    "long range": LongRangeCell(LISTOPS, "las:heads=2", 16, 1, **FEW),
    "text": LanguageCell("DATA", "", "cat:heads=2", 16, 16, 1, 6, 1e-2, batch_size=4, documents=3),
}
KINDS = TRAINED | {
    "language model": LanguageModelCell("cat", "cpu", (("DATA", "x"),), 1e-3, lengths=(64,)),
    "landmark": LandmarkCell("none-dense", "smoke", (("DATA", "x"),), 2e-3, lengths=(128,)),
}
NO_PART = {"place", "data"}  # of a result, which a fingerprint stands for


def changed(value):
    """Another value of an option's kind, or None where there is none to make up."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    return (*value, 96) if isinstance(value, tuple) and value[:1] in ((64,), (128,)) else None


@pytest.mark.parametrize("kind", KINDS)
def test_cell_is_frozen_and_each_option_decides_its_file(kind, tmp_path):
    cell = KINDS[kind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        cell.lr = 1.0
    files = [cell_path(tmp_path, cell)]
    assert cell_path(tmp_path, replace(cell)) == files[0]
    for field in dataclasses.fields(cell):
        other = changed(getattr(cell, field.name))
        if other is not None and field.name not in NO_PART:
            try:
                files.append(cell_path(tmp_path, replace(cell, **{field.name: other})))
            except (ValueError, UserError):
                continue  # needs another option too
    assert len(files) == len(set(files)) > 4
    assert cell_path(tmp_path, cell.timed()) == cell_path(tmp_path, replace(cell).timed())


@pytest.mark.parametrize("kind", TRAINED)
def test_killed_and_restarted_cell_gives_the_same(kind, tiny_corpus, tmp_path, monkeypatch):
    cell = TRAINED[kind]
    if kind == "text":
        fingerprint = read_manifest(tiny_corpus)["fingerprint"]
        cell = replace(cell, data=str(tiny_corpus), fingerprint=fingerprint)

    def result(folder):
        record = cells.run(tmp_path / folder, cell, "cpu", quiet=True)
        record = json.loads(json.dumps(record))
        return {k: v for k, v in record.items() if k not in ("seconds", "provenance")}

    whole = result("whole")
    update, made = Trial.update, []

    def killed(self, *given):
        made.append(given)
        if len(made) == 3:
            raise KeyboardInterrupt
        return update(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Trial, "update", killed)
        with pytest.raises(KeyboardInterrupt):
            result("killed")
    assert cells.finished(tmp_path / "killed", cell) is None
    assert result("killed") == whole
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "update", lambda *_: pytest.fail("trained again"))
        assert result("killed") == whole
    other = cells.run(tmp_path / "killed", replace(cell, seed=1), "cpu", quiet=True)
    assert other["history"] != whole["history"]
