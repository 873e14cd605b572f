"""Every family through what comes after training: tasks, lengths, the report, and a run's plan.

The models are those of `tests/cat_lm/architectures/test_families.py`, drawn and not trained.
"""

from __future__ import annotations

import csv
import html
import importlib
import json
import sys

import pytest

from cat_lm import architectures
from cat_lm.config import load_config
from cat_lm.training.estimate import flops_per_token, num_parameters
from tests.cat_lm.architectures.test_families import (
    CASES,
    CONTEXT,
    SHARED,
    family_of,
    model_of,
    section_of,
)
from tests.conftest import REPOSITORY
from tests.finished_runs import CONTEXT as TRAINED
from tests.finished_runs import finished_run
from tests.zero_shot_rows import ROWS, write_rows

each_family = pytest.mark.parametrize("case", architectures.names())
# A row of each family that has one.
PRETRAIN = {
    load_config(path).model.architecture: path
    for path in sorted((REPOSITORY / "configs/pretrain").glob("*.yaml"))
    if not path.stem.startswith("base_")
}


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `python -m MODULE …` in this process; what it wrote on stdout."""

    def run(module: str, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [module, *map(str, words)])
        try:
            importlib.import_module(f"{module}.__main__").main()
        except SystemExit as ended:
            pytest.fail(f"{module} ended with {ended.code}: {capsys.readouterr().err}")
        return capsys.readouterr().out

    # Which eval.zero_shot sets; later tests go without.
    for name in ("TQDM_DISABLE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")
    return run


@each_family
def test_evaluations_and_the_report_take_it(case, command, tiny_corpus, tmp_path):
    family = family_of(case)
    keys = {"architecture": family.name} | SHARED | CASES[case]
    run = finished_run(tmp_path / "run", tiny_corpus, model_of(case), **keys)
    # Longer than the model's context, and as no two pages begin alike.
    pages = [{"page": row["page"] * 2} for row in ROWS["wikitext"][1:3]]
    rows = write_rows(tmp_path / "rows", ROWS | {"wikitext": pages})
    tasks = ("--tasks", "piqa,wikitext", "--data-dir", rows, "--device", "cpu")
    command("eval.zero_shot", run, *tasks, "--bootstrap-iterations", 0)
    found = json.loads((run / "zero_shot/zero_shot.json").read_text(encoding="utf-8"))["tasks"]
    assert 0 <= found["piqa"]["metrics"]["acc"] <= 1

    # The harness's windows and the sweep's are two codes, and agree where the lengths do.
    lengths = ("--lengths", f"{TRAINED},{CONTEXT}", "--out", run / "eval")
    text = ("--text", "wikitext", "--data-dir", rows)
    command("eval.length_sweep", run / "model", *lengths, *text)
    sweep = json.loads((run / "eval/length_sweep.json").read_text(encoding="utf-8"))["rows"]
    assert [row["length"] for row in sweep] == [TRAINED, CONTEXT]
    wanted = found["wikitext"]["metrics"]["word_perplexity"]
    assert sweep[1]["word_perplexity"] == pytest.approx(wanted, rel=1e-5)
    assert sweep[0]["word_perplexity"] != pytest.approx(wanted, rel=1e-5)

    command("eval.report", run, "--out", tmp_path / "page")
    with open(tmp_path / "page/table2.csv", encoding="utf-8", newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["model"] == "run")
    assert float(row["wikitext_ppl"]) == pytest.approx(wanted)
    page = (tmp_path / "page/index.html").read_text(encoding="utf-8")
    assert html.escape(family.summary(section_of(case)).words) in page


@pytest.mark.parametrize("family", PRETRAIN)
def test_row_of_a_family_is_planned(family, command, tmp_path):
    """Numbers of the family's own, and of every number of GPUs what it costs."""
    config, record = PRETRAIN[family], tmp_path / "plan.json"
    said = command("launch.doctor", config, "--ranks", "1,4", "--device", "h100", "--json", record)
    findings, run = json.loads(record.read_text(encoding="utf-8"))["findings"], load_config(config)
    plan = {finding["name"]: finding["value"] for finding in findings}
    assert plan["parameters"] == num_parameters(run, 0)
    assert plan["flops_per_token"] == flops_per_token(run, 0)
    first, second = plan["costs"]
    assert first["compute_seconds"] == pytest.approx(4 * second["compute_seconds"]) and said
