"""Table 2: the paper's marks, runs beside its rows, and what was not measured alike."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

from cat_lm import architectures
from cat_lm.core.files import write_json
from eval.common.runs import read_run
from eval.report import table2
from tests.eval.report.results import KEY, report, zero_shot
from tests.finished_runs import finished_run

# What the paper underlines, column by column; bold is the best of each column.
SECOND = {
    "wikitext_ppl": "CAT, RoPE",
    "lambada_standard_ppl": "MH-CAT, no PE",
    "lambada_openai_ppl": "MH-CAT, no PE",
    "lambada_standard_acc": "MH-CAT, no PE",
    "lambada_openai_acc": "MH-CAT, no PE",
    "piqa": "CAT, RoPE",
    "hellaswag": "CAT, RoPE",
    "winogrande": "Pythia",
    "arc_easy": "Mamba (Gu & Dao, 2023)",
    "arc_challenge": "MH-CAT, no PE",
    "average": "MH-CAT, no PE",
}


class TestTable2:
    def test_runs_of_the_papers_rivals_stand_above_its_rows(self, tiny_corpus, tmp_path):
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
        gla = architectures.get("gla")
        fields = gla.fields(gla.Section(**shape), 257, 32)
        model = gla.classes().causal_lm(gla.config_class()(**fields))
        run = finished_run(tmp_path / "gla", tiny_corpus, model, architecture="gla", **shape)
        write_json(run / "zero_shot/zero_shot.json", zero_shot(run))
        ours = table2.own_rows([read_run(run)])
        lines = table2.markdown(ours, table2.paper_rows(), "").splitlines()
        assert lines[2].startswith("| gla | this report | 30.000 |")
        assert any(line.startswith("| GLA (Yang et al., 2023)* | paper |") for line in lines)

    def test_marks_are_the_paper_s(self):
        rows = table2.paper_rows().set_index("model")
        marked = table2.best_and_second(rows)
        for column, model in SECOND.items():
            assert [name.rstrip("*") for name in marked.index[marked[column] == "second"]] == [
                model
            ]
            (best,) = marked.index[marked[column] == "best"]
            values = rows[column].dropna()
            pick = min if column.endswith("_ppl") else max
            assert rows.loc[best, column] == pick(values)

    def test_runs_and_paper_are_marked_apart_and_told_apart(
        self, runs, tmp_path, monkeypatch, capsys
    ):
        folders = [shutil.copytree(runs[name], tmp_path / name) for name in ("cat", "pythia")]
        for folder, scale in zip(folders, (1.0, 1.1), strict=True):
            write_json(folder / "zero_shot/zero_shot.json", zero_shot(folder, scale))
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, *folders, "--out", out) == (0, "")
        text = (out / "table2.md").read_text(encoding="utf-8")
        lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
        average = 0.02 * sum(range(13, 20)) / 7
        assert lines["pythia"].endswith(f"**{1.1 * average:.3f}** |")
        assert lines["cat"].endswith(f"<u>{average:.3f}</u> |")
        assert "| this report |" in lines["cat"]
        assert "| paper |" in lines["Pythia"]
        assert lines["MH-CAT, RoPE"].endswith("**0.422** |")
        assert "GLA (Yang et al., 2023)*" in lines
        with open(out / "table2.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["source"] for row in rows] == ["this report"] * 2 + ["paper"] * 8
        assert float(rows[0]["wikitext_ppl"]) == 30.0
        assert float(rows[0]["piqa_stderr"]) == 0.0123
        page = (out / "index.html").read_text(encoding="utf-8")
        assert "Printed in the paper, not measured here" in page
        assert 'class="best"><span>0.422' in page
        assert "eval.zero_shot" not in page.split("How this was made")[0]
        summary = json.loads((out / "summary.json").read_text())
        assert summary["runs"][0]["zero_shot_average"] == pytest.approx(average)

    def test_missing_tasks_and_limits_are_said(self, run, tmp_path, monkeypatch, capsys):
        write_json(run / "zero_shot/zero_shot.json", zero_shot(run, leave_out="piqa", limit=40))
        out = tmp_path / "out"
        assert report(monkeypatch, capsys, run, "--out", out)[0] == 0
        page = (out / "index.html").read_text(encoding="utf-8")
        assert f"python -m eval.zero_shot {run} --tasks table2" in page
        note = "Not whole tasks, by --limit: only the first 40 rows (cat) of each."
        assert note in page
        assert f"**{note}**" in (out / "table2.md").read_text(encoding="utf-8")
        line = (out / "table2.md").read_text(encoding="utf-8").splitlines()[2]
        assert line.count("–") == 2, "PIQA and the average"
        assert "**" not in line, "one run is neither best nor second"

    def test_runs_that_were_not_measured_alike_are_said(self, runs, tmp_path):
        folders = [shutil.copytree(runs[name], tmp_path / name) for name in ("cat", "pythia")]

        def warned(rows: str = "a", **second: object) -> str:
            for folder, changes in zip(folders, ({}, second), strict=True):
                result = zero_shot(folder)
                result["model"] |= changes
                digest = rows if folder is folders[1] else "a"
                result["tasks"]["piqa"]["key"] = KEY | {"rows_sha256": digest}
                write_json(folder / "zero_shot/zero_shot.json", result)
            found = [read_run(folder) for folder in folders]
            row = table2.own_rows(found).loc[1]
            expected = {"max_length": 1024, "dtype": "float32"} | second
            assert (row["context"], row["dtype"]) == tuple(expected.values())
            return table2.warnings(found)

        assert warned() == ""
        length = "Not at one length, by --max-length: 512 tokens (pythia); 1,024 tokens (cat)."
        assert warned(max_length=512) == length
        arithmetic = "Not in one arithmetic, by --dtype: bfloat16 (pythia); float32 (cat)."
        assert warned(dtype="bfloat16") == arithmetic
        assert warned(rows="b") == "Not of the same rows, or by another definition: piqa."
