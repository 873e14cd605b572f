"""What decides a zero-shot task's answers: not the batch, the context, rows from the Hub."""

from __future__ import annotations

import json

import datasets
import pytest

from eval.zero_shot.run import run
from eval.zero_shot.tasks import sources
from tests.unit.zero_shot.runs import FEW, answers, settings
from tests.zero_shot_rows import ROWS, write_rows

SPLITS = ("train", "validation", "test")


def flat(value) -> list[float]:
    return [x for part in value for x in flat(part)] if isinstance(value, list) else [value]


class TestBatches:
    def test_answers_do_not_depend_on_the_batch(self, models, rows, tmp_path):
        """R28 on one rank; tests/distributed has two."""
        for name, folder in models.items():
            for size in (1, 8):
                out = tmp_path / f"{name}-{size}"
                run(folder, FEW, out, settings(rows, batch_size=size, samples=True))
            one, eight = answers(tmp_path / f"{name}-1"), answers(tmp_path / f"{name}-8")
            assert set(one) == set(FEW)
            for task in FEW:
                assert flat(one[task]) == pytest.approx(flat(eight[task]), rel=1e-5, abs=1e-4)
            accuracies = [
                {
                    (task, metric): value
                    for task, values in json.loads(
                        (tmp_path / f"{name}-{size}/zero_shot.json").read_text(encoding="utf-8")
                    )["tasks"].items()
                    for metric, value in values["metrics"].items()
                    if metric.startswith("acc")
                }
                for size in (1, 8)
            ]
            assert accuracies[0] == accuracies[1] and len(accuracies[0]) == 4

    def test_generated_answers_do_not_depend_on_the_batch(self, model, tmp_path):
        """Any other task of the harness; generation pads on the left."""
        rows = [
            row | {"question": row["question"] * (1 + i)}
            for i, row in enumerate(ROWS["arc_challenge"])
        ]
        folder = write_rows(tmp_path / "rows", {"arc_challenge_chat": rows})
        texts = []
        for size in (1, 3):
            changes = {"batch_size": size, "samples": True, "max_length": 900, "limit": 3}
            out = tmp_path / str(size)
            result = run(model, ["arc_challenge_chat"], out, settings(folder, **changes))
            texts.append(answers(out)["arc_challenge_chat"])
            metrics = result["tasks"]["arc_challenge_chat"]["metrics"]
            assert set(metrics) == {"exact_match,remove_whitespace"}
        assert texts[0] == texts[1] and len(texts[0]) == 3

    def test_context_is_cut_from_the_left_and_counted(self, model, rows, tmp_path):
        result = run(model, ["piqa"], tmp_path / "short", settings(rows, max_length=24))
        values = result["tasks"]["piqa"]
        assert (values["truncated"], result["model"]["max_length"]) == (10, 24)
        whole = run(model, ["piqa"], tmp_path / "whole", settings(rows))
        assert whole["tasks"]["piqa"]["truncated"] == 0

    def test_every_row_and_request_is_counted(self, model, rows, tmp_path, capsys):
        """Scored and left out are all there are, with and without a limit."""
        for limit in (None, 2):
            changes = {"limit": limit, "max_length": 24}
            result = run(
                model, ["piqa", "lambada_openai"], tmp_path / str(limit), settings(rows, **changes)
            )
            for name, values in result["tasks"].items():
                assert values["n"] == min(limit or 5, 5)
                assert values["n"] + sum(values["left_out"].values()) == len(ROWS[name])
                assert values["requests"] == values["n"] * (2 if name == "piqa" else 1)
                assert 0 < values["truncated"] <= values["requests"]
            said = capsys.readouterr().err
            cut = result["tasks"]["piqa"]["truncated"]
            left_out = ", 3 left out by --limit" if limit else ""
            requests = f"{cut} of {values['n'] * 2} requests without the start of their context"
            assert f"({values['n']} of 5 rows scored{left_out}, {requests}; " in said

    def test_generated_answers_to_cut_questions_are_counted(self, model, tmp_path):
        long = [row | {"question": row["question"] * 40} for row in ROWS["arc_challenge"][:2]]
        folder = write_rows(tmp_path / "rows", {"arc_challenge_chat": [*long, *ROWS["arc_easy"]]})
        changes = {"batch_size": 3, "max_length": 900}
        values = run(model, ["arc_challenge_chat"], tmp_path, settings(folder, **changes))["tasks"]
        counts = values["arc_challenge_chat"]
        assert (counts["truncated"], counts["requests"], counts["n"]) == (2, 7, 7)

    def test_a_row_without_an_answer_is_an_error(self, model, rows, tmp_path, monkeypatch):
        from eval.zero_shot import run as zero_shot_run

        original = zero_shot_run.evaluate

        def forgets_one(scorer, tasks, **options):
            found = original(scorer, tasks, **options)
            tasks["tasks"]["piqa"].instances[0].resps.clear()
            tasks["tasks"]["piqa"].instances[1].resps.clear()
            return found

        monkeypatch.setattr(zero_shot_run, "evaluate", forgets_one)
        with pytest.raises(RuntimeError, match="task piqa: 4 of 5 rows were scored"):
            run(model, ["piqa"], tmp_path, settings(rows))
        assert not (tmp_path / "zero_shot.json").exists()

    def test_limit(self, model, rows, tmp_path):
        result = run(model, ["piqa"], tmp_path, settings(rows, limit=2))
        values = result["tasks"]["piqa"]
        assert (values["n"], values["rows"], result["settings"]["limit"]) == (2, 5, 2)
        assert result["average"]["value"] is None


class TestHub:
    def test_revisions_are_recorded(self, model, tmp_path, monkeypatch):
        asked = []

        def load_dataset(path, name=None, revision=None):
            asked.append((path, revision))
            return {split: datasets.Dataset.from_list(ROWS["piqa"]) for split in SPLITS}

        monkeypatch.setattr(sources, "load_dataset", load_dataset)
        monkeypatch.setattr(sources, "newest_commit", lambda dataset, branch: f"{branch}-1")
        result = run(model, ["piqa"], tmp_path, settings(None))
        expected = {"dataset": "baber/piqa", "config": None, "split": "validation"}
        assert result["tasks"]["piqa"]["data"] == expected | {"revision": "main-1"}
        assert asked == [("baber/piqa", "main-1")]
        # The same rows from a file are the same task.
        local = run(model, ["piqa"], tmp_path, settings(write_rows(tmp_path / "rows")))
        assert local["tasks"]["piqa"]["key"] == result["tasks"]["piqa"]["key"]
        assert len(list((tmp_path / "tasks").iterdir())) == 1
