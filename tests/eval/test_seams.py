"""What one file adds works in language models, in recall and in long-range tasks alike."""

from __future__ import annotations

import runpy
import shutil

import pytest
import torch

from cat_lm import mixers
from cat_lm.core import plugins
from cat_lm.mixers import Setting
from cat_lm.model.context import Context
from eval import records
from eval import study as command
from eval.lab.places import Place, Run
from eval.lab.study import Study
from eval.long_range.cell import Cell as LongRangeCell
from eval.long_range.training import Trial as LongRangeTrial
from eval.recall.cell import Cell as RecallCell
from eval.recall.training import Trial as RecallTrial
from eval.studies import STUDIES
from tests.calls import call_main
from tests.cat_lm.test_own_ideas import registries  # noqa: F401
from tests.conftest import REPOSITORY
from tests.tiny_models import cat_model, random_ids

LONG_RANGE = "listops:min_length=3,max_length=14,train=8,validation=2,test=2"
RECALL = "mqar:vocab_size=16,keys=2"
MIXER = "forgetting:heads=2,start=2.0"


@pytest.fixture
def pattern(registries) -> dict[str, object]:  # noqa: F811
    """Registers the pattern of attention of tests/own_ideas; what its file defines."""
    return runpy.run_path(str(REPOSITORY / "tests/own_ideas/pattern.py"))


def gates(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """Return the linear layer of each of the pattern's modules, which starts from zeros."""
    found = [m for m in model.modules() if type(m).__name__ == "ForgettingCore"]
    assert found and all(m.start == 2.0 for m in found)
    return [m.gate for m in found]


def test_a_pattern_in_one_file_learns_in_a_language_model(pattern):
    model = cat_model(attention="forgetting", attention_options={"start": 2.0})
    assert not any(gate.weight.any() for gate in gates(model))
    model(ids := random_ids(2, 9), labels=ids).loss.backward()
    assert all(gate.weight.grad.any() for gate in gates(model))


def test_a_pattern_in_one_file_learns_in_recall(pattern):
    fixed = {"lr": 1e-3, "epochs": 1, "d_model": 16, "seq_len": 16, "test_examples": 4}
    trial = RecallTrial(RecallCell(RECALL, MIXER, train_examples=8, **fixed), "cpu")
    assert not any(gate.weight.any() for gate in gates(trial.model))
    record = trial.cell.run("cpu", quiet=True)
    assert record["parameters"] == sum(p.numel() for p in trial.model.parameters())
    trial.model(*trial.imitate(4)[:2]).sum().backward()
    assert all(gate.weight.grad.any() for gate in gates(trial.model))


def test_a_pattern_in_one_file_learns_in_a_long_range_task(pattern):
    fixed = {"lr": 1e-3, "epochs": 1, "d_model": 16, "layers": 2, "batch_size": 4}
    cell = LongRangeCell(LONG_RANGE, MIXER, **fixed)
    trial = LongRangeTrial(cell, "cpu")
    assert not any(gate.weight.any() for gate in gates(trial.model))
    assert cell.run("cpu", quiet=True)["parameters"] > 0
    assert len(gates(trial.model)) == 4  # there and back


def test_a_pattern_as_a_mixer_keeps_documents_apart(pattern):
    assert plugins.hash_plugin_sources(mixers.get("forgetting")) is not None  # names its source
    module = mixers.make("forgetting", {"heads": 2, "dropout": 0.0}).build(Setting(16))
    assert isinstance(module.core, pattern["ForgettingCore"])
    module.core.gate.weight.data.normal_()
    x = torch.randn(1, 5, 16)
    alone = torch.cat([module(part, Context()) for part in x.split(2, dim=1)], dim=1)
    torch.testing.assert_close(module(x, Context(documents=torch.arange(5)[None] // 2)), alone)
    assert not torch.allclose(module(x, Context()), alone)


def test_a_study_is_one_declaration_and_gets_its_report(
    monkeypatch, tmp_path, capsys, in_this_process
):
    fixed = {"epochs": 1, "train_examples": 32, "test_examples": 8, "stop_above": None}

    def places(asked):
        runs = [Run("MQAR", "", mixer, RecallCell(RECALL, mixer, 16, 16, **fixed)) for mixer in
                ("cat", "lincat")]  # fmt: skip
        return [Place(run, (1e-2,), asked.seeds or 2) for run in runs]

    def values(run, record):
        return {run.cell.seq_len: {"value": record["accuracy"]}}

    monkeypatch.setattr(STUDIES, "_entries", dict(STUDIES._entries))
    STUDIES.register(Study("own", "a study of one's own", places, values))
    given = ("own", "--scale", "smoke", "--out", tmp_path / "out", "--workers", 1)
    code, out, err = call_main(command.main, monkeypatch, capsys, "eval.study", *given)
    assert code == 0 and "4 runs, 4 to do" in out, err
    text = (tmp_path / "out/own.md").read_text(encoding="utf-8")
    assert text.startswith("# own: a study of one's own\n") and "cat - lincat" in text
    assert (tmp_path / "out/own.png").stat().st_size > 5000
    shutil.copy(tmp_path / "out/own.json", tmp_path)
    assert records.render(tmp_path)["own.md"] == text
